"""OpenRLHF's own LoRA (`--ds.lora.rank`), with merged weights for the rollout engines (docs/strategies.md)."""

import torch
from torch import nn

from ..config import ConfigError, LograConfig
from ..train.adapters import merged_weights, stock_parameters
from ..train.coverage import Coverage, measure
from ..train.shards import Computed
from . import register_strategy
from .base import HostTrained


@register_strategy("lora")
class LoraStrategy(HostTrained):
    """DeepSpeed trains the adapters as it does without us; what is synchronised is base and adapter merged."""

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        self._merged = merged_weights(model)
        if not self._merged:
            raise ConfigError(
                "--logra.method lora: the model has no adapters; they come with --ds.lora.rank of the training command"
            )
        self.trained = self.dense = tuple(self._merged)

    def parameters(self) -> dict[str, torch.Tensor | Computed]:
        return {**stock_parameters(self._model), **self._merged}

    def stored(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def coverage(self) -> Coverage:
        adapters = tuple(name for name, parameter in self._model.named_parameters() if parameter.requires_grad)
        return measure(self, self._model, dense=adapters)
