"""GaLore: Adam in the gradients' leading subspaces (docs/strategies.md)."""

from dataclasses import replace
from typing import Any

from torch import nn

from ..config import LograConfig
from ..math.subspace import GaLore
from ..train.ranks import sum_over_ranks
from ..train.step import Proposal, StepOutcome
from ..train.targets import Target, check_rank
from . import register_strategy
from .gradient import GradientStrategy


@register_strategy("galore")
class GaLoreStrategy(GradientStrategy):
    """math/subspace.py's GaLore on every target. Bases that could not be renewed, so that old ones stay in use, are
    counted in `logra/kept_bases`; the first ones are told of."""

    unused_flags = ("distribution", "optimizer", "update_ratio")

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        check_rank(config.rank, self.targets, both_sides=True)
        self.rank = config.rank
        self._kept = 0

    def make_rule(self, target: Target) -> GaLore:
        return GaLore(**self.subspace())

    def subspace(self) -> dict[str, Any]:
        """The rule's constants, from the flags."""
        c = self.config
        return {"rank": c.rank, "update_gap": c.refresh_every, "beta1": c.beta1, "beta2": c.beta2, "eps": c.eps}

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        outcome = super().commit(proposal, alpha)
        before, self._kept = self._kept, self._count_kept()
        notice = None
        if self._kept and not before:
            notice = f"{self._kept:.0f} bases could not be found anew (logra/kept_bases): old ones stay in use"
        return replace(outcome, metrics={"logra/kept_bases": self._kept - before}, notice=notice)

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self._kept = self._count_kept()

    def _count_kept(self) -> float:
        """How often a basis could not be renewed so far, of all targets. A collective."""
        kept = sum(state.get("kept", 0) for state in self._states.values())
        return sum_over_ranks([kept], self._flat.device)[0]
