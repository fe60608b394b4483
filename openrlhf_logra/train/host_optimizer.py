"""DeepSpeed's own optimizer, which trains what is not sketched: its gradients before a step, and what it keeps.

Written against DeepSpeed 0.19: ZeRO 1 and 2 (`DeepSpeedZeroOptimizer`), ZeRO 3 (`DeepSpeedZeroOptimizer_Stage3`), and
without ZeRO the two optimizers that hold a float32 copy of a bf16 model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .ranks import sum_over_ranks


def gradient_norm(engine) -> float:
    """Norm over all ranks of the gradients that the engine's next step would take, before clipping; NaN or infinite
    where one of them is. A collective; to be called at an accumulation boundary, before the step."""
    total = sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in _gradients(engine))
    if engine.zero_optimization():  # each rank holds a part; otherwise all of them
        (total,) = sum_over_ranks([total], engine.device)
    return math.sqrt(total)


def _gradients(engine) -> Iterator[torch.Tensor]:
    """Averaged gradients, those that this rank steps with."""
    optimizer = engine.optimizer
    if not engine.zero_optimization():
        yield from (p.grad for p in engine.module.parameters() if p.grad is not None)
    elif engine.zero_cpu_offload():
        stage3 = engine.zero_optimization_partition_weights()
        masters = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
        yield from (master.grad for master in masters if master.grad is not None)
    else:
        for parts in optimizer.averaged_gradients.values():
            yield from parts or ()


@contextmanager
def clipping_at(engine, norm: float) -> Iterator[None]:
    """For a while the engine clips its gradients at this norm; 0 does not clip."""
    optimizer = engine.optimizer
    configured, optimizer.clip_grad = optimizer.clip_grad, norm
    try:
        yield
    finally:
        optimizer.clip_grad = configured


@contextmanager
def dropping(engine) -> Iterator[None]:
    """For a while the engine's step drops its gradients, as one whose fp16 gradients overflow does: no weight, no
    moment and no schedule moves."""
    optimizer = engine.optimizer
    checks = getattr(optimizer, "check_grad_overflow", None)  # ZeRO 1 and 2 look again, otherwise
    if checks is not None:
        optimizer.check_grad_overflow = False
    if not engine.zero_optimization():  # these always look again; the engine itself clears the gradients afterwards
        optimizer.step = lambda: None
    optimizer.overflow = True
    try:
        yield
    finally:
        optimizer.overflow = False
        if checks is not None:
            optimizer.check_grad_overflow = checks
        if not engine.zero_optimization():
            del optimizer.step


def state_bytes(engine) -> int:
    """Bytes of master weights and moments that this rank's optimizer keeps; 0 before its first step without ZeRO."""
    kept = engine.optimizer.optimizer.state.items()  # torch's: moments by master weight
    return sum(tensor.nbytes for master, of in kept for tensor in (master, of["exp_avg"], of["exp_avg_sq"]))
