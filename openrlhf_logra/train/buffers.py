"""Computed buffers (rotary frequencies) in the precision that the model's own initialisation gives them.

Under ZeRO 3 Hugging Face builds the model inside a context that rounds every new tensor to bf16, rotary frequencies
included; rollout engines keep them in float32, so that trainer and engine would drift apart with the position.
"""

import torch
from torch import nn


def restore_computed_buffers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Recompute every non-persistent floating-point buffer of modules that are built from their `config` alone.

    Returns:
        Names of the buffers that were not what the model's own initialisation makes, and are now; and names of bf16
        buffers of modules that cannot be built again, which may have been rounded.
    """
    restored, unclear = [], []
    for path, module in model.named_modules():
        held = {n: getattr(module, n) for n in module._non_persistent_buffers_set}
        names = [n for n, buffer in held.items() if buffer is not None and buffer.is_floating_point()]
        config = getattr(module, "config", None)
        if not names or config is None or any(True for _ in module.parameters()):
            continue
        try:
            fresh = type(module)(config)
        except Exception:  # built from more than its config
            unclear += [f"{path}.{n}" for n in names if held[n].dtype is torch.bfloat16]
            continue
        for name in names:
            made = getattr(fresh, name)
            if held[name].dtype != made.dtype or not torch.equal(held[name].cpu(), made):
                setattr(module, name, made.to(held[name].device))
                restored.append(f"{path}.{name}")
    return restored, unclear
