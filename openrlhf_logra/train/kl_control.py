"""The predicted-KL controller as a callback: measures what math/kl.py decides on (spec section 6)."""

import math
import time
from dataclasses import dataclass, replace

import torch

from ..config import LograConfig
from ..math.kl import KLController, KLSettings
from ..strategies import strategy_class
from .callbacks import Callback, UpdateContext
from .probe import Probe, ProbeBatch
from .ranks import largest_over_ranks, sum_over_ranks
from .shards import is_partitioned

PROBE_KL = 2.5e-3  # differences: more, and the third order shows (4 times this: 2 to 13%); less, and bf16 noise does
_SEARCHES = 4


def controls_kl(config: LograConfig) -> bool:
    """Whether the flags ask for the controller, and the strategy has a step size for it to set."""
    return not config.kl_disable and strategy_class(config.method).sizes_steps


@dataclass
class _Measured:
    """One update's probe: what realised KL is compared with after the step."""

    batch: ProbeBatch
    positions: float
    before: list[torch.Tensor]
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
        self._kind, self._log = probe, log
        self._guess: float | None = None  # the last q that was found by differences
        self._measured: _Measured | None = None

    def on_update(self, context: UpdateContext) -> None:
        start = time.perf_counter()
        self._measured = self._measure(context)
        self._decide(context)
        context.metrics["timing/logra_probe"] = time.perf_counter() - start

    def on_step_end(self, context: UpdateContext) -> None:
        measured, self._measured = self._measured, None
        if measured is None or context.outcome.skipped:
            return
        start = time.perf_counter()
        predicted = context.outcome.alpha**2 * measured.q
        probe = self._probe(context)
        after = probe.hidden(measured.batch)
        (total,) = sum_over_ranks([probe.divergence(measured.batch, measured.before, after)], context.device)
        realised = total / measured.positions
        self.controller.observe_realised(predicted, realised)
        context.metrics.update({"logra/predicted_kl": predicted, "logra/realized_kl": realised})
        context.metrics["timing/logra_probe"] += time.perf_counter() - start

    def observe_mismatch(self, difference: float) -> None:
        """Mean of rollout minus trainer log-probability over the tokens of the rollouts to come."""
        self.controller.observe_mismatch(difference)

    def state_dict(self) -> dict:
        return {"controller": self.controller.state_dict(), "guess": self._guess}

    def load_state_dict(self, state: dict) -> None:
        self.controller.load_state_dict(state["controller"])
        self._guess = state["guess"]

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _probe(self, context: UpdateContext) -> Probe:
        return Probe(context.model, context.forward, context.along)

    def _measure(self, context: UpdateContext) -> _Measured | None:
        """q, and where the policy stands before the step; None where no rank has a position."""
        passes = len(context.batch.passes())
        batch = replace(context.batch, idle=largest_over_ranks(passes, context.device) - passes)
        (positions,) = sum_over_ranks([batch.count], context.device)
        if not positions:
            return None
        probe = self._probe(context)
        before = probe.hidden(batch)
        measured = _Measured(batch, positions, before, math.nan)
        if self._kind in ("auto", "jvp"):
            measured.q = self._by_tangent(probe, measured, context)
        if self._kind == "fd":
            measured.q = self._by_difference(probe, measured, context)
        return measured

    def _by_tangent(self, probe: Probe, measured: _Measured, context: UpdateContext) -> float:
        try:
            variance = probe.variance_by_tangent(measured.batch)
        except (NotImplementedError, RuntimeError) as error:
            if self._kind == "jvp" or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0]
            if any(map(is_partitioned, context.model.parameters())):
                # The pass broke off with parameters gathered, and the other ranks may be in the middle of it.
                raise RuntimeError(
                    f"LoGRA: this model has no forward-mode AD ({reason}); under ZeRO 3 say --logra.kl.probe fd"
                ) from error
            self._log(f"[logra] predicted KL by central differences: the model has no forward-mode AD ({reason})")
            self._kind = "fd"
            return math.nan
        if self._kind == "auto":
            self._log("[logra] predicted KL by forward-mode AD, which this model has")
            self._kind = "jvp"
        return self._q(variance, measured, context)

    def _by_difference(self, probe: Probe, measured: _Measured, context: UpdateContext) -> float:
        """Central differences at the step whose predicted KL is near `PROBE_KL`, found from the last update's q."""
        epsilon = math.sqrt(PROBE_KL / self._guess) if self._guess else 1.0
        for _ in range(_SEARCHES):
            q = self._q(probe.variance_by_difference(measured.batch, measured.before, epsilon), measured, context)
            if not (q > 0 and math.isfinite(q)):
                return q
            self._guess = q
            if 0.5 < epsilon**2 * q / PROBE_KL < 2:
                break
            epsilon = math.sqrt(PROBE_KL / q)
        return q

    def _q(self, variance: float, measured: _Measured, context: UpdateContext) -> float:
        """q = 1 / (2 |P| T^2) * sum of Var over all ranks' positions."""
        (total,) = sum_over_ranks([variance], context.device)
        return total / (2 * measured.positions * measured.batch.temperature**2)

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
