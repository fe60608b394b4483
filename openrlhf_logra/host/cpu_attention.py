"""CPU stand-in for flash attention: packed sequences, whole or spread over a ring of ranks, under its names.

transformers makes a block-diagonal mask for its sdpa attention where position ids start again within a row; all that
flash attention's names need is that function. A ring of ranks (ring_flash_attn) gathers keys and values instead of
passing them around.
"""

import re
import sys
import types
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a Ray worker that needs none of this should not wait for it
    import torch

_ring = None  # the group that shares a row, once the host has set one up
_bounds: "torch.Tensor | None" = None  # int32, where the sequences of the row begin, and its end


def gather_differentiably(values: "torch.Tensor", group) -> "torch.Tensor":
    """Values [L, ...] of all ranks of a group, one after the other; gradients are summed back to their owners."""
    import torch
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(values.contiguous(), group=group))


def install() -> None:
    """Let models of transformers be built and run with flash attention's names."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    names = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if re.fullmatch(r"flash_attention_\d", name)]
    for name in names:
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(check)
    def without_a_gpu(self, attn_implementation, *args, **kwargs):
        if attn_implementation in names and self._supports_flash_attn:
            return attn_implementation
        return check(self, attn_implementation, *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = without_a_gpu
    sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn", "CPU stand-in of openrlhf_logra")
    sys.modules["ring_flash_attn"].__dict__.update(
        substitute_hf_flash_attn=_use_ring, update_ring_flash_attn_params=_use_bounds
    )


def attention(module, query, key, value, attention_mask, softcap=None, s_aux=None, sliding_window=None, **options):
    """As transformers calls it: query, key, value [B, H, L, D]; the output is [B, L, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is not None or s_aux is not None:
        raise NotImplementedError("capped scores and attention sinks have no CPU stand-in; use eager attention")
    if _ring is not None:
        key, value = (gather_differentiably(x.transpose(0, 2), _ring).transpose(0, 2) for x in (key, value))
        attention_mask = _mask_of_ring(query.shape[2], key.shape[2], sliding_window)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _mask_of_ring(own: int, total: int, window: int | None) -> "torch.Tensor":
    """bool [1, 1, own, total]: which tokens of the row each of this rank's may look at."""
    import torch

    columns = torch.arange(total)
    rows = columns.split(own)[torch.distributed.get_rank(_ring)][:, None]
    sequence = torch.bucketize(columns, _bounds[1:].long(), right=True)
    seen = (sequence[rows] == sequence) & (columns <= rows)
    return (seen if window is None else seen & (rows - columns < window))[None, None]


def _use_ring(group, heads_at_once: int) -> None:
    global _ring
    _ring = group


def _use_bounds(bounds: "torch.Tensor", group) -> None:
    global _bounds
    _bounds = bounds
