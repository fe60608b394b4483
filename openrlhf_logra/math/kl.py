"""Step control by predicted KL (docs/kl.md; paper section on predicted-KL control).

For logits z, temperature T and a direction in weight space along which they change at the rate zdot,

    q = 1 / (2 |P| T^2) * sum over positions s in P of Var_{v ~ p(s)} [zdot_v(s)],     p = softmax(z / T)

and KL(pi(theta) || pi(theta + alpha D)) = alpha^2 q up to the third order.
"""

import math
from dataclasses import asdict, dataclass

import torch

FEEDBACK_WEIGHT = 0.2
FEEDBACK_LIMIT = 8.0
_LARGEST_RATIO = 2 * math.log(FEEDBACK_LIMIT)


def rate_variance(logits: torch.Tensor, rates: torch.Tensor, temperature: float) -> torch.Tensor:
    """Var_{v ~ softmax(z / T)} [zdot_v] at each position.

    Args:
        logits, rates: z and zdot, [n, V], any float dtype.

    Returns:
        float64 [n].
    """
    p = torch.softmax(logits.float() / temperature, dim=-1)
    rates = rates.float()
    mean = (p * rates).sum(-1, keepdim=True)
    return (p * (rates - mean).square()).sum(-1, dtype=torch.float64)


def kl_divergence(before: torch.Tensor, after: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(softmax(before / T) || softmax(after / T)) at each position, over the full vocabulary.

    Args:
        before, after: logits [n, V], any float dtype.

    Returns:
        float64 [n], never negative.
    """
    change = (after.float() - before.float()) / temperature
    if (change.abs() > 30).any():  # no step should make one, and e**change would leave float32
        log_p, log_q = (torch.log_softmax(z.double() / temperature, dim=-1) for z in (before, after))
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    # d = log q - log p, from the change alone: nothing of the size of log p is subtracted from its like.
    p = torch.softmax(before.float() / temperature, dim=-1)
    d = change - torch.log1p((p * torch.expm1(change)).sum(-1, keepdim=True))
    # Both distributions sum to 1, so that sum p (e^d - 1) = 0: added, it leaves terms of one sign. Where d is small,
    # by their series, since e^d - 1 - d would be all rounding there.
    small = d.square() * (0.5 + d / 6 + d.square() / 24)
    terms = torch.where(d.abs() < 0.05, small, torch.expm1(d) - d)
    return (p * terms).sum(-1, dtype=torch.float64)


@dataclass(frozen=True)
class KLSettings:
    """Constants of the controller.

    Attributes:
        budget, final_budget: d0 and d1, KL per update at the first update and from update `horizon` on (d1 <= d0).
        horizon: H, updates over which the budget falls.
        alpha_max: largest step size.
        subtract_mismatch: whether the mismatch of trainer and rollout is taken off the budget.
        mismatch_ema: weight of a new observation of it.
        mismatch_floor: the share of the budget that it leaves at least.
        feedback: whether the budget is corrected by realised over predicted KL.
    """

    budget: float = 2e-4
    final_budget: float = 2e-5
    horizon: int = 300
    alpha_max: float = 3.0
    subtract_mismatch: bool = True
    mismatch_ema: float = 0.3
    mismatch_floor: float = 0.5
    feedback: bool = False

    def scheduled(self, update: int) -> float:
        """delta_t = d1 + (d0 - d1) (1 + cos(pi min(t / (H - 1), 1))) / 2, t from 0."""
        share = min(update / max(self.horizon - 1, 1), 1.0)
        return self.final_budget + (self.budget - self.final_budget) * (1 + math.cos(math.pi * share)) / 2


@dataclass
class KLController:
    """alpha = min(alpha_max, sqrt(delta / q)), with everything that enters delta. Its state is what it has observed;
    t, the index of the update, is the caller's.

    Attributes:
        settings: constants.
        mismatch: m, the moving average of rollout minus trainer log-probability per token; None before the first
            observation.
        log_ratio: moving average of log(realised / predicted).
    """

    settings: KLSettings
    mismatch: float | None = None
    log_ratio: float = 0.0

    def budget(self, update: int) -> float:
        """delta_t of update t: scheduled, less the mismatch, corrected by feedback."""
        settings = self.settings
        scheduled = settings.scheduled(update)
        delta = scheduled
        if settings.subtract_mismatch and self.mismatch is not None:
            delta = max(scheduled - self.mismatch, settings.mismatch_floor * scheduled)
        if settings.feedback:
            delta /= min(max(math.exp(self.log_ratio), 1 / FEEDBACK_LIMIT), FEEDBACK_LIMIT)
        return delta

    def alpha(self, q: float, update: int) -> float | None:
        """Step size of update t along a direction with this q: 1 where q = 0, None where q is not finite."""
        if not math.isfinite(q) or q < 0:
            return None
        if q == 0:
            return min(1.0, self.settings.alpha_max)
        return min(self.settings.alpha_max, math.sqrt(self.budget(update) / q))

    def observe_mismatch(self, difference: float) -> None:
        """Mean over generated tokens of rollout minus trainer log-probability; not finite is no observation."""
        if not math.isfinite(difference):
            return
        observed = max(0.0, difference)
        weight = self.settings.mismatch_ema
        self.mismatch = observed if self.mismatch is None else (1 - weight) * self.mismatch + weight * observed

    def observe_realised(self, predicted: float, realised: float) -> None:
        """Realised KL of the last update beside its prediction; what is not positive is no observation."""
        if predicted > 0 and realised > 0 and math.isfinite(predicted) and math.isfinite(realised):
            ratio = math.log(realised) - math.log(predicted)
            ratio = min(max(ratio, -_LARGEST_RATIO), _LARGEST_RATIO)  # one odd update must not rule the average
            self.log_ratio += FEEDBACK_WEIGHT * (ratio - self.log_ratio)

    def state_dict(self) -> dict:
        """Numbers only."""
        return {key: value for key, value in asdict(self).items() if key != "settings"}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`."""
        self.mismatch, self.log_ratio = state["mismatch"], state["log_ratio"]
