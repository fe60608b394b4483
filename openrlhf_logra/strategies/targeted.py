"""What strategies share that train the weights of some linear modules by themselves."""

from abc import abstractmethod
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..config import LograConfig
from ..math.sketch import SketchSink, grad_anchor
from ..train.ranks import world_size
from ..train.targets import Target, find_targets
from .base import Strategy

ANCHOR = "logra_anchor"
_LARGEST_NORM = 1e19  # beyond, squares overflow float32 and would poison the moments: as good as not finite


class TargetedStrategy(Strategy):
    """Trains the weights of `config.target_modules`, which DeepSpeed sees frozen: their backward adds to sinks of
    ours. Other parameters are frozen, or the host's optimizer trains those that the model lets it (`--logra.non_target
    adamw`).

    Attributes:
        targets: in the model's order; a sink for each.
    """

    sizes_steps = True

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        self.targets = find_targets(model, config.target_modules)
        ours = tuple(target.name for target in self.targets)
        others = [name for name, p in model.named_parameters() if p.requires_grad and name not in ours]
        self.dense = tuple(others) if config.non_target == "adamw" else ()
        self.trained = ours + self.dense

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in super().parameters().items() if not name.endswith(ANCHOR)}

    def attach(self) -> None:
        """Lead the targets' forward through `forward`, freeze them and what is not trained, and give autograd its
        anchor."""
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in self.dense)
        self._sinks = [SketchSink(torch.empty(0)) for _ in self.targets]
        for index, target in enumerate(self.targets):
            target.module.forward = partial(self.forward, index)
        self._add_anchor()

    @abstractmethod
    def forward(self, index: int, input: torch.Tensor) -> torch.Tensor:
        """Target number `index` applied to `input`; a backward pass adds to its sink."""

    def _add_anchor(self) -> None:
        # Where all else is frozen, DeepSpeed would not start, and nothing would flow back to the first target.
        embeddings = self._model.get_input_embeddings()
        weight = embeddings.weight
        anchor = nn.Parameter(torch.zeros(8, dtype=weight.dtype, device=weight.device))
        embeddings.register_parameter(ANCHOR, anchor)
        embeddings.register_forward_hook(lambda module, _, output: grad_anchor(output, getattr(module, ANCHOR)))
        ignored = [name for name, parameter in self._model.named_parameters() if parameter is anchor]
        self._model._keys_to_ignore_on_save = [*(self._model._keys_to_ignore_on_save or ()), *ignored]

    @abstractmethod
    def columns(self, target: Target) -> int:
        """Columns of the target's sink."""

    def bind(self, device: torch.device) -> None:
        """Allocate the sinks: parts of one float32 buffer, on the trainer's device."""
        self._sizes = [target.rows * self.columns(target) for target in self.targets]
        self._hold(torch.zeros(sum(self._sizes), dtype=torch.float32, device=device))

    def move(self, device: torch.device) -> None:
        self._hold(self._flat.to(device))

    def _hold(self, flat: torch.Tensor) -> None:
        self._flat = flat
        for sink, value in zip(self._sinks, self._by_target()):
            sink.value = value

    def _by_target(self) -> tuple[torch.Tensor, ...]:
        """Views of each target's part of the buffer, [d, columns]."""
        return tuple(part.view(t.rows, -1) for t, part in zip(self.targets, self._flat.split(self._sizes)))

    def _close(self) -> None:
        """Take no more gradients until the sinks are cleared. A target is silent when no rank's backward reached it;
        then every rank raises."""
        for sink in self._sinks:
            sink.closed = True
        counts = torch.tensor([sink.contributions for sink in self._sinks], device=self._flat.device)
        if world_size() > 1:
            dist.all_reduce(counts)
        silent = [t.name for t, count in zip(self.targets, counts.tolist()) if count == 0]
        if silent:
            raise RuntimeError(
                f"LoGRA: no gradient reached {silent[0]} ({len(silent)} of {len(self.targets)} targets) since the "
                "last update; is the module unused, or its input detached from the loss?"
            )


def usable(norm: float) -> bool:
    """Whether a norm or a factor is one that float32 can work with; NaN is not."""
    return abs(norm) < _LARGEST_NORM
