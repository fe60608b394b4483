"""Fira: GaLore, with the rest of the gradient scaled as Adam scales the subspace (docs/strategies.md)."""

from ..math.subspace import Fira
from ..train.targets import Target
from . import register_strategy
from .galore import GaLoreStrategy


@register_strategy("fira")
class FiraStrategy(GaLoreStrategy):
    """math/subspace.py's Fira on every target."""

    default_growth_limit = Fira.norm_growth_limit

    def make_rule(self, target: Target) -> Fira:
        return Fira(**self.subspace(), norm_growth_limit=self.config.norm_growth_limit)
