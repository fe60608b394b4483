"""OpenRLHF's own AdamW on every parameter, with the lossless sync: what LoGRA is compared with."""

from torch import nn

from ..config import LograConfig
from ..train.coverage import Coverage, measure
from . import register_strategy
from .base import HostTrained


@register_strategy("dense")
class DenseStrategy(HostTrained):
    """Changes nothing of the training."""

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        self.trained = self.dense = tuple(name for name, p in model.named_parameters() if p.requires_grad)

    def coverage(self) -> Coverage:
        return measure(self, self._model)
