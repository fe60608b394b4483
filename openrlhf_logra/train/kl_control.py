"""The predicted-KL controller as a callback: measures what math/kl.py decides on (docs/kl.md)."""

import math
import time
from dataclasses import dataclass, replace

import torch

from ..config import one_line
from ..math.kl import KLController, KLSettings
from .callbacks import Callback, UpdateContext
from .probe import HeadWeights, Probe, ProbeBatch
from .ranks import gathered_on_rank_0, largest_over_ranks, sum_over_ranks
from .shards import is_partitioned

PROBE_KL = 5e-3  # differences: with more the third order shows, with less bf16 does (docs/kl.md)
_SEARCHES = 8
_NEAR = 2.0  # factor within which the KL of the probe step must meet it
_LONGEST_STRIDE = 100.0
_HEAD_TOLERANCE = 0.02  # of the largest logit; bf16 rounds by 0.004
_AGREEMENT = 0.25


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
        self._step: float | None = None  # of the last differences, which cost PROBE_KL
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
        settled = self._kind if self._automatic else "auto"  # what was asked for is not what was found
        return {"controller": self.controller.state_dict(), "step": self._step, "probe": settled}

    def load_state_dict(self, state: dict) -> None:
        self.controller.load_state_dict(state["controller"])
        self._step = state["step"]
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
        variance, reason = math.nan, None
        try:
            variance = self._probe.variance_by_tangent(measured.batch, context.along)
        except (NotImplementedError, RuntimeError) as raised:  # running out of memory included
            if not self._automatic or any(map(is_partitioned, context.model.parameters())):
                # Under ZeRO 3 the pass broke off with parameters gathered, and other ranks may be waiting in theirs.
                hint = "say --logra.kl.probe fd"
                raise RuntimeError(f"LoGRA: forward-mode AD failed ({one_line(raised)}); {hint}") from raised
            reason = one_line(raised)  # not the error, which would keep alive what the pass has allocated
        total, failed = sum_over_ranks([0.0 if reason else variance, bool(reason)], context.device)
        if failed:
            reasons = [text for text in gathered_on_rank_0(reason) if text]
            self._take_differences(f"forward-mode AD failed ({next(iter(reasons), 'on another rank')})")
            return math.nan
        if self._kind == "auto":
            self._kind = "jvp"
        return self._q(total, measured)

    def _compare(self, measured: _Measured, context: UpdateContext) -> None:
        """The first time, by both: an operation without derivative in the model's path loses tangents silently."""
        q = self._by_difference(measured, context)
        if not math.isfinite(q):
            self._kind = "auto"  # nothing to compare with: again with the next update
        elif self._agree(q, measured.q) or (math.isfinite(measured.q) and not self._settled(q, measured, context)):
            self._log("[logra] predicted KL by forward-mode AD, which this model has")
        else:
            self._take_differences(f"forward-mode AD says q = {measured.q:.2e}, they say {q:.2e}")
            measured.q = q

    def _settled(self, q: float, measured: _Measured, context: UpdateContext) -> bool:
        """Whether differences at half the step say the same."""
        return self._step is not None and self._agree(q, self._difference(measured, context, self._step / 2)[0])

    @staticmethod
    def _agree(q: float, other: float) -> bool:
        return abs(q - other) <= _AGREEMENT * max(q, other)

    def _take_differences(self, reason: str) -> None:
        self._log(f"[logra] predicted KL by central differences: {reason}")
        self._kind = "fd"

    def _by_difference(self, measured: _Measured, context: UpdateContext) -> float:
        """Central differences at a step that really costs about `PROBE_KL`, searched from the last update's on: a step
        too long saturates the policy, and its differences are too small. NaN where none was found."""
        epsilon = self._step or 1.0
        moved = False
        for _ in range(_SEARCHES):
            q, divergence = self._difference(measured, context, epsilon)
            if q < 0:
                return q
            cost = divergence / PROBE_KL
            if 1 / _NEAR < cost < _NEAR and math.isfinite(q):
                self._step = epsilon / math.sqrt(cost)
                return q
            moved = moved or not cost <= 0
            if not math.isfinite(cost):  # far too long a step
                stride = 0.0
            else:  # one that costs nothing is too short to change a bf16 bit
                stride = 1 / math.sqrt(cost) if cost > 0 else math.inf
            epsilon *= min(max(stride, 1 / _LONGEST_STRIDE), _LONGEST_STRIDE)
        self._step = epsilon if moved and math.isfinite(cost) else None  # the next update searches on
        return math.nan if moved else 0.0

    def _difference(self, measured: _Measured, context: UpdateContext, epsilon: float) -> tuple[float, float]:
        """q by differences at +-epsilon, and KL per position of a step of epsilon; the same on every rank."""
        own = self._probe.variance_by_difference(measured.batch, measured.before, context.along, epsilon)
        variance, divergence = sum_over_ranks(list(own), context.device)
        return self._q(variance, measured), divergence / measured.positions

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
