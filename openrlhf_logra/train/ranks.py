"""The few collectives of trainer ranks; each also works in a single process without a process group."""

from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element-wise float64 sums, the same on every rank. A collective."""
    return _reduced(values, device, dist.ReduceOp.SUM)


def largest_over_ranks(value: int, device: torch.device) -> int:
    """The largest value of any rank. A collective."""
    return int(_reduced([value], device, dist.ReduceOp.MAX)[0])


def _reduced(values: list[float], device: torch.device, operation) -> list[float]:
    if world_size() == 1:
        return [float(value) for value in values]
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=operation)
    return shared.tolist()


def of_rank_0(values: list[float], device: torch.device) -> list[float]:
    """Rank 0's float64 values on every rank. A collective."""
    if world_size() == 1:
        return values
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(shared, src=0)
    return shared.tolist()


def share_bits(tensor: torch.Tensor, owner: int = 0) -> None:
    """The owner's bits in every rank's contiguous tensor, in place. A collective."""
    # As bytes: neither gloo nor NCCL knows int16, and bytes cannot be rounded.
    if world_size() > 1:
        dist.broadcast(tensor.view(torch.uint8), src=owner)


def gathered_on_rank_0(value: Any) -> list[Any]:
    """Every rank's picklable value, in the order of ranks, on rank 0; nothing elsewhere. A collective."""
    if world_size() == 1:
        return [value]
    everyone: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, everyone, dst=0)
    return everyone or []
