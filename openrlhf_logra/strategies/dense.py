"""OpenRLHF's own AdamW on every parameter, with the lossless sync: what LoGRA is compared with (spec section 9)."""

from torch import nn

from ..config import LograConfig
from ..train.coverage import Coverage, measure
from .base import Proposal, StepOutcome, Strategy


class DenseStrategy(Strategy):
    """Changes nothing of the training; counts its updates."""

    exact_updates = False
    sizes_steps = False
    state_bytes = 0

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        self.dense = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self.trained = self.dense

    def coverage(self) -> Coverage:
        return measure(self._model, [], self.config, dense=self.dense)

    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        return Proposal(finite=True)

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        self.version += 1
        return StepOutcome(updates=(), skipped=False, version=self.version)
