"""Flora: momentum kept as a random sketch (spec section 12)."""

from torch import nn

from ..config import LograConfig
from ..math.flora import Flora
from ..math.projection import Projection
from ..train.targets import Target, check_rank
from . import register_strategy
from .gradient import GradientStrategy


@register_strategy("flora")
class FloraStrategy(GradientStrategy):
    """math/flora.py's rule on every target, with LoGRA's projections."""

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        check_rank(config.rank, self.targets)

    def make_rule(self, target: Target) -> Flora:
        c = self.config
        drawn = Projection(c.seed, 0, target.name, c.rank, target.width, c.distribution)
        return Flora(drawn, c.refresh_every, c.beta1)
