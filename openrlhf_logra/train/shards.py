"""Where a parameter's elements live on this rank: whole (ZeRO 0-2), as one flat row-major partition (ZeRO 3), or, of a
weight that is computed from others (`Computed`), nowhere.

What DeepSpeed attaches to a partitioned parameter is known here (and its `ds_shape` in targets.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from ..math.digest import digest_flat
from ..math.exact import Update, apply_block, apply_flat
from .ranks import share_bits, world_size
from .targets import full_shape

_TILE_ELEMENTS = 1 << 20


class Computed(Protocol):
    """A weight that no rank stores. Like a parameter it can be read: whole, by rank 0's elements, as digests."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def whole(self) -> torch.Tensor:
        """Its value now. A collective under ZeRO 3."""


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 shards this parameter."""
    return hasattr(parameter, "ds_tensor")


def apply_update(parameter: torch.Tensor, update: Update) -> None:
    """W <- W - step on the elements that this rank holds, in place (docs/bits.md)."""
    with torch.no_grad():
        if is_partitioned(parameter):
            apply_flat(parameter.ds_tensor.data, update, _partition_start(parameter))
            if not _is_gathered(parameter) or _is_its_partition(parameter):
                return
            # Small parameters stay gathered beside their partition (stage3_param_persistence_threshold).
        apply_block(parameter.data, update)


def share_owned_bits(parameter: torch.Tensor) -> None:
    """Make every rank's copy of W the owner's: rank 0's where ranks hold it whole; a partition has one owner already.
    A collective."""
    if world_size() == 1:
        return
    if not is_partitioned(parameter):
        dist.broadcast(parameter.data.view(torch.uint8), src=0)
    elif _is_gathered(parameter):
        partitions = [torch.empty_like(parameter.ds_tensor.data) for _ in range(world_size())]
        dist.all_gather(partitions, parameter.ds_tensor.data, group=parameter.ds_process_group)
        parameter.data.copy_(torch.cat(partitions)[: parameter.ds_numel].view(parameter.ds_shape))


def counted_elements(parameter: torch.Tensor | Computed) -> tuple[torch.Tensor, int]:
    """The elements that this rank counts, so that every element is counted by one rank: its partition without padding;
    of a whole or computed parameter all of them on rank 0 and none elsewhere. A collective for computed ones.

    Returns:
        A flat view of them, and the flat index of the first in the whole parameter.
    """
    if is_partitioned(parameter):
        start = _partition_start(parameter)
        return parameter.ds_tensor.data[: max(0, parameter.ds_numel - start)], start
    values = (parameter.data if isinstance(parameter, torch.Tensor) else parameter.whole()).flatten()
    return (values[:0] if dist.is_initialized() and dist.get_rank() != 0 else values), 0


def squared_norm(parameter: torch.Tensor) -> float:
    """Sum of squares of the elements that this rank counts."""
    values, _ = counted_elements(parameter)
    # In float32 tile by tile, at most half of it at once: no temporary has the size of the weight.
    tiles = values.split(max(1, min(_TILE_ELEMENTS, -(-values.numel() // 2))))
    return sum(float(torch.linalg.vector_norm(tile.float(), dtype=torch.float64)) ** 2 for tile in tiles)


def digest(name: str, parameter: torch.Tensor | Computed) -> int:
    """Digest of the elements that this rank counts; adds up over ranks, modulo 2**64, to the parameter's digest."""
    values, start = counted_elements(parameter)
    return digest_flat(values, name, start, start + values.numel())


@contextmanager
def gathered(parameter: torch.Tensor | Computed) -> Iterator[torch.Tensor]:
    """The whole parameter on every rank, for reading. A collective under ZeRO 3: every rank must enter."""
    if not isinstance(parameter, torch.Tensor):
        yield parameter.whole()
        return
    if not is_partitioned(parameter):
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.data


@contextmanager
def written_by_rank_0(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The whole parameter, for rank 0 to write; afterwards every rank holds its bits. A collective."""
    if is_partitioned(parameter):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            yield parameter.data
    else:
        yield parameter.data
        share_bits(parameter.data)


def _is_gathered(parameter: torch.Tensor) -> bool:
    return parameter.data.numel() == parameter.ds_numel and tuple(parameter.data.shape) == full_shape(parameter)


def _is_its_partition(parameter: torch.Tensor) -> bool:
    """Of a single rank the gathered parameter and its partition are one memory."""
    return parameter.data.data_ptr() == parameter.ds_tensor.data_ptr()


def _partition_start(parameter: torch.Tensor) -> int:
    return dist.get_rank(group=parameter.ds_process_group) * parameter.ds_tensor.numel()
