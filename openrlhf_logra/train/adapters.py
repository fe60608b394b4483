"""LoRA adapters as peft attaches them, and the weights that a rollout engine has to hold instead: base and adapter
merged. What peft calls things is known here.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from ..config import ConfigError
from .shards import gathered
from .targets import full_shape

_PREFIX = "base_model.model."  # of a model that peft has wrapped
_BASE = ".base_layer"  # of a module that it has
_ROWS_AT_ONCE = 1024  # bounds the float32 copies


@dataclass(frozen=True)
class MergedWeight:
    """float32(W) + scaling (B A), rounded once to bf16: the bits of peft's own merge of the saved bf16 adapter, but
    that a zero of W to which nothing is added keeps its sign.

    Attributes:
        base: W [d, k]. up, down: B [d, r], A [r, k]. All bf16.
    """

    base: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        return full_shape(self.base)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def whole(self) -> torch.Tensor:
        """[d, k], bf16. A collective under ZeRO 3."""
        with torch.no_grad(), ExitStack() as stack:
            base, up, down = (stack.enter_context(gathered(p)) for p in (self.base, self.up, self.down))
            merged, down = torch.empty_like(base), down.float()
            rows = zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in (base, up, merged)))
            for base_rows, up_rows, merged_rows in rows:
                delta = (up_rows.float() @ down) * self.scaling
                # Where nothing is added, -0 stays what it is: an engine has loaded it like this.
                merged_rows.copy_(torch.where(delta == 0, base_rows, (base_rows.float() + delta).to(base.dtype)))
        return merged


def merged_weights(model: nn.Module) -> dict[str, MergedWeight]:
    """The weights that have an adapter, by the names of the model without.

    Raises:
        ConfigError: an adapter is of another kind than plain LoRA on an nn.Linear, or its weight is shared.
    """
    from peft.tuners.lora import LoraLayer

    merged, names = {}, Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        (adapter,) = module.r
        base = module.base_layer
        if type(base) is not nn.Linear or module.use_dora.get(adapter) or adapter not in module.lora_A:
            raise ConfigError(
                f"--logra.method lora: {_stock_name(path)} is {type(base).__name__}; only LoRA on nn.Linear can be "
                "merged for the rollout engines; leave it out of --ds.lora.target_modules"
            )
        if names[id(base.weight)] > 1:
            raise ConfigError(
                f"--logra.method lora: {_stock_name(path)} shares its weight with another module, which merging would "
                "part; leave it out of --ds.lora.target_modules"
            )
        ends = module.lora_B[adapter].weight, module.lora_A[adapter].weight
        merged[f"{_stock_name(path)}.weight"] = MergedWeight(base.weight, *ends, module.scaling[adapter])
    return merged


def stock_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the model has beside adapters, by the names of the model without."""
    return {_stock_name(name): parameter for name, parameter in model.named_parameters() if ".lora_" not in name}


def _stock_name(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(f"{_BASE}.", ".")
