"""Flora: momentum kept as a random sketch (docs/strategies.md)."""

from torch import nn

from ..config import ConfigError, LograConfig
from ..math.flora import Flora
from ..math.projection import Projection
from ..train.targets import Target, check_rank
from . import register_strategy
from .gradient import GradientStrategy


@register_strategy("flora")
class FloraStrategy(GradientStrategy):
    """math/flora.py's rule on every target, with LoGRA's projections."""

    unused_flags = ("optimizer", "beta2", "eps", "update_ratio")

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        check_rank(config.rank, self.targets)
        self.rank = config.rank
        gap, name = max((rule.shortest_gap, target.name) for rule, target in zip(self._rules, self.targets))
        if 0 < config.refresh_every < gap:
            raise ConfigError(
                f"--logra.refresh_every {config.refresh_every}: the momentum of {name} would grow from draw to draw "
                f"(by beta1^K sqrt(width / rank), K updates apart); take at least {gap}, 0, or a larger --logra.rank"
            )

    def make_rule(self, target: Target) -> Flora:
        c = self.config
        drawn = Projection(c.seed, 0, target.name, c.rank, target.width, c.distribution)
        return Flora(drawn, c.refresh_every, c.beta1)
