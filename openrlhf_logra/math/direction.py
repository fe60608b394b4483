"""From the sketch S to the step eta U (paper: Algorithm 1, RowAdam).

All tensors of this module are float32 and of sketch size; nothing of size d x k is formed.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch


class Direction(Protocol):
    """Turns one target's sketches into update directions, and keeps the target's optimizer state."""

    def step(self, sketch: torch.Tensor, projection_index: int) -> torch.Tensor:
        """S [d, r] -> U [d, r]. `projection_index` names the projection that S belongs to."""

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        """Plain tensors and numbers."""

    def load_state_dict(self, state: dict[str, torch.Tensor | int]) -> None:
        """Inverse of `state_dict`."""


class Sgd:
    """U = S."""

    def step(self, sketch: torch.Tensor, projection_index: int) -> torch.Tensor:
        return sketch

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor | int]) -> None:
        if state:
            raise ValueError(f"sgd keeps no state, found {sorted(state)}")


class RowAdam:
    """One second moment per row of W:

        v_i    <- beta2 v_i + (1 - beta2) mean_j S_ij^2          root_i = sqrt(v_i / (1 - beta2^t))
        scale_i = 1 / (root_i + eps mean(root)), scaled to unit RMS over the rows
        U       = scale * S, rescaled so that |U|_F = |S|_F

    An all-zero sketch gives U = 0. State: v [d] and the count t.
    """

    def __init__(self, rows: int, beta2: float, eps: float, device: torch.device | str = "cpu"):
        self.beta2, self.eps = beta2, eps
        self.v = torch.zeros(rows, dtype=torch.float32, device=device)
        self.t = 0

    def step(self, sketch: torch.Tensor, projection_index: int) -> torch.Tensor:
        self.t += 1
        self.v.mul_(self.beta2).add_(sketch.square().mean(1), alpha=1 - self.beta2)
        root = (self.v / (1 - self.beta2**self.t)).sqrt()
        mean = root.mean()
        if not (mean > 0 and sketch.count_nonzero()):
            return torch.zeros_like(sketch)
        # Relative to the mean root, so that neither tiny gradients nor rows without any overflow the squares below.
        scale = 1 / (root / mean + self.eps)
        scale /= scale.square().mean().sqrt()
        update = scale[:, None] * sketch
        # In float64: a sketch of 1e-30 has a norm, its float32 squares have none.
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in (sketch, update)]
        return update * (norms[0] / norms[1]).float()

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        return {"v": self.v, "t": self.t}

    def load_state_dict(self, state: dict[str, torch.Tensor | int]) -> None:
        _restore(self.v, state["v"], "v")
        self.t = int(state["t"])


class SketchAdam:
    """Adam on the elements of the sketch:

        m <- beta1 m + (1 - beta1) S     v <- beta2 v + (1 - beta2) S^2     (bias-corrected by the count t)
        U  = mhat / (sqrt(vhat) + eps RMS(sqrt(vhat)))

    Moments belong to one projection: at a refresh they restart. State: m, v [d, r], t and the projection's index.
    """

    def __init__(
        self, rows: int, rank: int, beta1: float, beta2: float, eps: float, device: torch.device | str = "cpu"
    ):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.m = torch.zeros(rows, rank, dtype=torch.float32, device=device)
        self.v = torch.zeros_like(self.m)
        self.t = 0
        self.projection_index = 0

    def step(self, sketch: torch.Tensor, projection_index: int) -> torch.Tensor:
        if projection_index != self.projection_index:
            self.m.zero_()
            self.v.zero_()
            self.t = 0
            self.projection_index = projection_index
        self.t += 1
        self.m.lerp_(sketch, 1 - self.beta1)
        self.v.mul_(self.beta2).addcmul_(sketch, sketch, value=1 - self.beta2)
        root = (self.v / (1 - self.beta2**self.t)).sqrt_()
        rms = root.square().mean().sqrt()
        if not rms > 0:
            return torch.zeros_like(sketch)
        return (self.m / (1 - self.beta1**self.t)).div_(root.add_(self.eps * rms))

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        return {"m": self.m, "v": self.v, "t": self.t, "projection_index": self.projection_index}

    def load_state_dict(self, state: dict[str, torch.Tensor | int]) -> None:
        _restore(self.m, state["m"], "m")
        _restore(self.v, state["v"], "v")
        self.t = int(state["t"])
        self.projection_index = int(state["projection_index"])


def _restore(held: torch.Tensor, saved: torch.Tensor, name: str) -> None:
    if saved.shape != held.shape or not torch.isfinite(saved).all():
        raise ValueError(f"saved moment {name} is damaged: shape {tuple(saved.shape)}, expected {tuple(held.shape)}")
    held.copy_(saved)


@dataclass(frozen=True)
class DirectionConfig:
    """Which direction, with which constants (flags --logra.optimizer, .beta1, .beta2, .eps)."""

    optimizer: str
    beta1: float
    beta2: float
    eps: float


OPTIMIZERS = ("sgd", "row_adam", "adam")


def make_direction(config: DirectionConfig, rows: int, rank: int, device: torch.device | str = "cpu") -> Direction:
    """The direction of one target [rows, rank].

    Raises:
        ValueError: the optimizer is not one of OPTIMIZERS.
    """
    if config.optimizer == "sgd":
        return Sgd()
    if config.optimizer == "row_adam":
        return RowAdam(rows, config.beta2, config.eps, device)
    if config.optimizer == "adam":
        return SketchAdam(rows, rank, config.beta1, config.beta2, config.eps, device)
    raise ValueError(f"optimizer {config.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")


def move(direction: Direction, device: torch.device | str) -> None:
    """Keep the moments on another device."""
    for name, value in vars(direction).items():
        if isinstance(value, torch.Tensor):
            setattr(direction, name, value.to(device))


def moment_bytes(optimizer: str, rows: int, rank: int) -> int:
    """Bytes of moments that `optimizer` keeps for a target of `rows` rows at rank `rank`."""
    return {"sgd": 0, "row_adam": 4 * rows, "adam": 8 * rows * rank}[optimizer]


def squared_norm_of_product(direction: torch.Tensor, projection: torch.Tensor) -> float:
    """|U A|_F^2 = <U (A A^T), U> by the r x r Gram matrix. direction U [d, r], projection A [r, k]."""
    gram = projection @ projection.t()
    return float(torch.sum((direction @ gram).mul_(direction), dtype=torch.float64))


def step_size(update_ratio: float, squared_weight_norm: float, squared_update_norm: float) -> float:
    """eta with eta sqrt(sum |U A|^2) = update_ratio sqrt(sum |W|^2); 0 when there is no direction."""
    if squared_update_norm <= 0:
        return 0.0
    return update_ratio * math.sqrt(squared_weight_norm / squared_update_norm)
