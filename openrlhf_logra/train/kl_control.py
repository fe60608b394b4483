"""The predicted-KL controller as a callback: measures what math/kl.py decides on (spec section 6)."""

import math
import time
from dataclasses import dataclass, replace

import torch

from ..config import LograConfig, one_line
from ..math.kl import KLController, KLSettings
from ..strategies import strategy_class
from .callbacks import Callback, UpdateContext
from .probe import HeadWeights, Probe, ProbeBatch
from .ranks import largest_over_ranks, sum_over_ranks
from .shards import is_partitioned

PROBE_KL = 5e-3  # differences: with more the third order shows, with less bf16 does (docs/kl.md)
_SEARCHES = 4
_HEAD_TOLERANCE = 0.02  # of the largest logit; bf16 rounds by 0.004
_AGREEMENT = 0.25


def controls_kl(config: LograConfig) -> bool:
    """Whether the flags ask for the controller, and the strategy has a step size for it to set."""
    return not config.kl_disable and strategy_class(config.method).sizes_steps


@dataclass
class _Measured:
    """One update's probe: what realised KL is compared with after the step."""

    batch: ProbeBatch
    positions: float
    before: list[torch.Tensor]
    head: HeadWeights | None
    q: float


class KLControl(Callback):
    """Sets alpha so that the predicted KL of each step is its budget, and measures the KL that came of it.

    Args:
        settings: the controller's constants.
        probe: "jvp" (forward-mode AD), "fd" (central differences) or "auto" (jvp where the model has it).
        log: says, once, which estimator is used.

    Attributes:
        controller: budget, mismatch, feedback.
    """

    def __init__(self, settings: KLSettings, probe: str = "auto", log=print):
        self.controller = KLController(settings)
        self._kind, self._automatic, self._log = probe, probe == "auto", log
        self._guess: float | None = None  # the last q that was found by differences
        self._probe: Probe | None = None
        self._measured: _Measured | None = None
        self._seconds = 0.0

    def on_update(self, context: UpdateContext) -> None:
        start = time.perf_counter()
        self._measured = self._measure(context)
        self._decide(context)
        self._seconds = time.perf_counter() - start

    def on_step_end(self, context: UpdateContext) -> None:
        start = time.perf_counter()
        measured, self._measured = self._measured, None
        if measured is not None and not context.outcome.skipped:
            predicted = context.outcome.alpha**2 * measured.q
            after = self._probe.hidden(measured.batch)
            divergence = self._probe.divergence(measured.batch, measured.before, after, measured.head)
            realised = sum_over_ranks([divergence], context.device)[0] / measured.positions
            self.controller.observe_realised(predicted, realised)
            context.metrics.update({"logra/predicted_kl": predicted, "logra/realized_kl": realised})
        context.metrics["timing/logra_probe"] = self._seconds + time.perf_counter() - start
        self._seconds = 0.0

    def observe_mismatch(self, difference: float | None) -> None:
        """Mean of rollout minus trainer log-probability over the tokens of the rollouts to come; None: it cannot be
        known any more."""
        if difference is None:
            self.controller.mismatch = None
        else:
            self.controller.observe_mismatch(difference)

    def state_dict(self) -> dict:
        return {"controller": self.controller.state_dict(), "guess": self._guess, "probe": self._kind}

    def load_state_dict(self, state: dict) -> None:
        self.controller.load_state_dict(state["controller"])
        self._guess = state["guess"]
        if self._automatic:
            self._kind = state["probe"]

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, context: UpdateContext) -> _Measured | None:
        """q, and where the policy stands before the step; None where no rank has a position."""
        passes = len(context.batch.passes())
        batch = replace(context.batch, idle=largest_over_ranks(passes, context.device) - passes)
        (positions,) = sum_over_ranks([batch.count], context.device)
        if not positions:
            return None
        if self._probe is None:
            self._probe = self._checked_probe(context)
        measured = _Measured(batch, positions, self._probe.hidden(batch), self._probe.head(), math.nan)
        settled = self._kind
        if self._kind in ("auto", "jvp"):
            measured.q = self._by_tangent(measured, context)
        if self._kind == "fd":
            measured.q = self._by_difference(measured, context)
        elif settled == "auto":
            self._compare(measured, context)
        return measured

    def _checked_probe(self, context: UpdateContext) -> Probe:
        if context.model.get_output_embeddings() is None:
            raise RuntimeError(
                "LoGRA: predicted-KL control finds no output head in this model; say --logra.kl.disable"
            )
        probe = Probe(context.model, context.forward)
        (wrong,) = sum_over_ranks([float(not probe.learn_head(context.batch) < _HEAD_TOLERANCE)], context.device)
        if wrong:
            raise RuntimeError(
                "LoGRA: this model's logits are not its output head's, scaled and capped: predicted-KL control would "
                "measure another policy; say --logra.kl.disable"
            )
        return probe

    def _by_tangent(self, measured: _Measured, context: UpdateContext) -> float:
        variance, error = math.nan, None
        try:
            variance = self._probe.variance_by_tangent(measured.batch, context.along)
        except (NotImplementedError, RuntimeError) as raised:  # running out of memory included
            if not self._automatic or any(map(is_partitioned, context.model.parameters())):
                # Under ZeRO 3 the pass broke off with parameters gathered, and other ranks may be waiting in theirs.
                hint = "say --logra.kl.probe fd"
                raise RuntimeError(f"LoGRA: forward-mode AD failed ({one_line(raised)}); {hint}") from raised
            error = raised
        total, failed = sum_over_ranks([variance if error is None else 0.0, error is not None], context.device)
        if failed:
            reason = one_line(error) if error else "on another rank"
            self._take_differences(f"forward-mode AD failed ({reason})")
            return math.nan
        if self._kind == "auto":
            self._kind = "jvp"
        return self._q(total, measured)

    def _compare(self, measured: _Measured, context: UpdateContext) -> None:
        """The first time, by both: an operation without derivative in the model's path loses tangents silently."""
        q = self._by_difference(measured, context)
        if abs(q - measured.q) > _AGREEMENT * max(q, measured.q):
            self._take_differences(f"forward-mode AD says q = {measured.q:.2e}, they say {q:.2e}")
            measured.q = q
        else:
            self._log("[logra] predicted KL by forward-mode AD, which this model has")

    def _take_differences(self, reason: str) -> None:
        self._log(f"[logra] predicted KL by central differences: {reason}")
        self._kind = "fd"

    def _by_difference(self, measured: _Measured, context: UpdateContext) -> float:
        """Central differences at the step whose predicted KL is near `PROBE_KL`, found from the last update's q."""
        epsilon = math.sqrt(PROBE_KL / self._guess) if self._guess else 1.0
        for _ in range(_SEARCHES):
            variance = self._probe.variance_by_difference(measured.batch, measured.before, context.along, epsilon)
            q = self._q(*sum_over_ranks([variance], context.device), measured)
            if not math.isfinite(q) or q < 0:
                return q
            if q == 0:  # too short a step to change a bf16 bit?
                epsilon *= 32
                continue
            self._guess = q
            if 0.5 < epsilon**2 * q / PROBE_KL < 2:
                break
            epsilon = math.sqrt(PROBE_KL / q)
        return q

    def _q(self, variance: float, measured: _Measured) -> float:
        """q = 1 / (2 |P| T^2) * sum of Var over all ranks' positions."""
        return variance / (2 * measured.positions * measured.batch.temperature**2)

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def _decide(self, context: UpdateContext) -> None:
        controller = self.controller
        context.metrics["logra/kl_budget"] = controller.budget(context.version)
        if controller.mismatch is not None:
            context.metrics["logra/mismatch"] = controller.mismatch
        if self._measured is None:
            return context.hold("no generated token to predict its KL on")
        alpha = controller.alpha(self._measured.q, context.version)
        if alpha is None:
            return context.hold(f"its predicted KL is not finite (q = {self._measured.q})")
        context.alpha = alpha
