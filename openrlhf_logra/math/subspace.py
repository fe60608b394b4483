"""Steps from full gradients, with an optimizer state of low rank: GaLore, and Fira (docs/strategies.md).

Orthonormal P from the SVD of G, on the smaller side of the matrix; every `update_gap` steps a new one. With L = P^T G
(rows < columns) or G P,

    GaLore   step = scale P adam(L)                                    or scale adam(L) P^T
    Fira     step = GaLore's + limited(scaling * (G - P L)),
             scaling_j = |adam(L)_j| / |L_j| for each column j         or for each row

where adam(L) is Adam's bias-corrected quotient of moments and `limited` lets the norm grow by at most
`norm_growth_limit` a step. Moments are kept when P changes. A rule keeps nothing itself: what belongs to one matrix is
a dict of plain tensors and numbers, which the caller keeps and a checkpoint can hold.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .limiter import limited

State = dict[str, Any]


class MatrixRule(Protocol):
    """Turns the gradients of one matrix into steps."""

    def step(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        """The step [d, k] in float32, by which the matrix moves times minus the learning rate.

        Args:
            gradient: G [d, k], float32.
            state: of this matrix; empty before its first step. Changed in place.
        """

    def state_bytes(self, rows: int, cols: int) -> int:
        """Bytes of tensors in the state of a matrix of this shape."""


@dataclass(frozen=True)
class GaLore:
    """Adam on the gradient's projection; nothing outside of the subspace moves.

    Attributes:
        rank: r, at most the smaller side of the matrix.
        update_gap: steps between two bases; 0 keeps the first.
        beta1, beta2, eps: Adam's.
        scale: of the step.

    A basis that cannot be found (the gradient is zero or not finite, or the SVD does not converge) leaves the old one
    in use, and is counted in state["kept"]; before there is any, the step is zero. The next step tries again.
    """

    rank: int
    update_gap: int = 200
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    scale: float = 0.25

    def step(self, gradient: torch.Tensor, state: State) -> torch.Tensor:
        if not state:
            state.update(t=0, age=0, kept=0)
        if "basis" not in state or (self.update_gap and state["age"] >= self.update_gap):
            self._renew(gradient, state)
        if "basis" not in state:
            return torch.zeros_like(gradient)
        project, lift = _maps(state["basis"], gradient.shape)
        low = project(gradient)
        adapted = self._adam(low, state)
        state["age"] += 1
        step = lift(adapted).mul_(self.scale)
        outside = self.outside(gradient, low, adapted, lift, state)
        return step if outside is None else step.add_(outside)

    def outside(
        self,
        gradient: torch.Tensor,
        low: torch.Tensor,
        adapted: torch.Tensor,
        lift: Callable[[torch.Tensor], torch.Tensor],
        state: State,
    ) -> torch.Tensor | None:
        """The step's part outside of the subspace, [d, k]; here there is none."""
        return None

    def state_bytes(self, rows: int, cols: int) -> int:
        return 4 * (self.rank * min(rows, cols) + 2 * math.prod(self.low_shape(rows, cols)))

    def low_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Of L, and so of the moments, for a matrix of this shape."""
        return (self.rank, cols) if _on_left((rows, cols)) else (rows, self.rank)

    def _renew(self, gradient: torch.Tensor, state: State) -> None:
        basis = _leading_basis(gradient, self.rank)
        if basis is None:
            state["kept"] += 1
        else:
            state.update(basis=basis, age=0)

    def _adam(self, low: torch.Tensor, state: State) -> torch.Tensor:
        if "m" not in state:
            state.update(m=torch.zeros_like(low), v=torch.zeros_like(low))
        state["t"] += 1
        m = state["m"].lerp_(low, 1 - self.beta1)
        v = state["v"].mul_(self.beta2).addcmul_(low, low, value=1 - self.beta2)
        root = (v / (1 - self.beta2 ** state["t"])).sqrt_()
        return (m / (1 - self.beta1 ** state["t"])).div_(root.add_(self.eps))


@dataclass(frozen=True)
class Fira(GaLore):
    """GaLore's step, and the rest of the gradient as Adam would have scaled it.

    Attributes:
        norm_growth_limit: of the rest's norm from step to step; infinity does not limit.
    """

    norm_growth_limit: float = 1.01

    def outside(
        self,
        gradient: torch.Tensor,
        low: torch.Tensor,
        adapted: torch.Tensor,
        lift: Callable[[torch.Tensor], torch.Tensor],
        state: State,
    ) -> torch.Tensor:
        rest = gradient - lift(low)
        along = 0 if _on_left(gradient.shape) else 1
        # In float64: a column of L that is nearly zero, while its moments are not, takes the ratio out of float32.
        before, after, outside = (
            torch.linalg.vector_norm(x, dim=along, keepdim=True, dtype=torch.float64) for x in (low, adapted, rest)
        )
        scaling = torch.where(before > 0, after / before, torch.zeros_like(before))
        norm = float(torch.linalg.vector_norm(scaling * outside))
        factor = limited(norm, state.get("rest_norm"), self.norm_growth_limit)
        if 0 < norm < math.inf:
            state["rest_norm"] = norm * factor
        largest = torch.finfo(rest.dtype).max
        return rest.mul_((scaling * factor).clamp_(max=largest).to(rest.dtype))


def _on_left(shape: Sequence[int]) -> bool:
    """Whether P multiplies from the left: it belongs to the smaller side."""
    return shape[0] < shape[1]


def _leading_basis(gradient: torch.Tensor, rank: int) -> torch.Tensor | None:
    """P [min(d, k), r]: singular vectors of the largest singular values; None where they cannot be found."""
    if not torch.isfinite(gradient).all() or not gradient.any():
        return None
    try:
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    except torch.linalg.LinAlgError:
        return None
    basis = left[:, :rank] if _on_left(gradient.shape) else right[:rank].t()
    # (A copy even where a slice is contiguous: it would keep the whole factor alive.)
    return basis.clone(memory_format=torch.contiguous_format) if torch.isfinite(basis).all() else None


def _maps(basis: torch.Tensor, shape: torch.Size) -> tuple[Callable, Callable]:
    """G -> L, and L -> a matrix of G's shape."""
    if _on_left(shape):
        return lambda g: basis.t() @ g, lambda low: basis @ low
    return lambda g: g @ basis, lambda low: low @ basis.t()
