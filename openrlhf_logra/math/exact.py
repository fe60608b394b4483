"""One update applied exactly: the same bf16 bits on every holder of W, whatever its shard (docs/bits.md).

    C  = alpha eta U / sqrt(r)                    float32 [d, r], the trainer's decision
    q, s: C ~ s_i q_ij                            int16 [d, r] and a power of two per row: what is sent
    D  = q R                                      integers below 2**24 in magnitude: exact in float32, in any order
    y  = float32(W) - s_i D_ij                    one IEEE rounding
    W' = y rounded to bf16, stochastically, with a dither that depends on the element's place in the HF matrix only

No intermediate of the size of W is formed: work proceeds in tiles of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from .philox import derive_key, philox4x32
from .projection import Projection, sixteen_bit_lanes

ROUNDINGS = ("stochastic", "nearest")
_TILE_ELEMENTS = 1 << 18
_MIN_EXPONENT = -126


def max_quantum(rank: int) -> int:
    """Q: the largest |q| for which every |D| stays below 2**24 at this rank."""
    return min(32767, 2 ** (24 - (rank - 1).bit_length()) - 1)


def quantize(coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row int16 quantisation with a power-of-two scale.

    Args:
        coefficients: C, float32 [d, r], finite.

    Returns:
        q int16 [d, r] and s float32 [d]: s_i is the smallest power of two with max_j |C_ij| / s_i <= Q (not below
        2**-126), q_ij = round-half-even(C_ij / s_i). A zero row has s_i = 0.
    """
    quantum = max_quantum(coefficients.shape[1])
    peak = coefficients.abs().amax(1)
    # peak = f 2**e and Q = fq 2**eq with f, fq in [1/2, 1): the smallest power is 2**(e - eq), one more where f > fq.
    fraction, exponent = torch.frexp(peak)
    quantum_fraction, quantum_exponent = torch.frexp(torch.tensor(float(quantum), dtype=torch.float32))
    exponent = exponent - int(quantum_exponent) + (fraction > float(quantum_fraction))
    exponent = exponent.clamp(min=_MIN_EXPONENT)
    scale = torch.ldexp(torch.ones_like(peak), exponent)
    q = torch.round(coefficients / scale[:, None]).to(torch.int16)
    return q, torch.where(peak > 0, scale, torch.zeros_like(scale))


@dataclass(frozen=True)
class Update:
    """One target's update number `update`, as every holder of W receives it.

    Attributes:
        projection: names R.
        update: index of the update, from 0; addresses the dither.
        q: int16 [d, r] (Rademacher), or the float32 coefficients C themselves (Gaussian; the trainer's own rows only).
        s: float32 [d], or None with float32 coefficients.
        rounding: "stochastic" or "nearest".
    """

    projection: Projection
    update: int
    q: torch.Tensor
    s: torch.Tensor | None
    rounding: str = "stochastic"

    @property
    def name(self) -> str:
        return self.projection.name

    @property
    def seed(self) -> int:
        return self.projection.seed

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.projection.width

    def to(self, device: torch.device) -> "Update":
        """The same update with its coefficients on `device`."""
        return replace(self, q=self.q.to(device), s=None if self.s is None else self.s.to(device))

    def steps(self, cols: slice, device: torch.device) -> Callable[[slice], torch.Tensor]:
        """Maps rows to the step on them and `cols`, float32: s_i D_ij (exact), or C R (Gaussian)."""
        here, signs = self.to(device), self.projection.block(cols=cols, device=device)
        return lambda rows: _product(here, rows, signs)


@dataclass(frozen=True)
class FullUpdate:
    """One target's update number `update` where it is no product of factors: the step itself, on the trainer's ranks.

    Attributes:
        name: of the matrix.
        seed, update, rounding: as in `Update`; the first two address the dither.
        step: what is subtracted, float32 [d, k].
    """

    name: str
    seed: int
    update: int
    step: torch.Tensor
    rounding: str = "stochastic"

    @property
    def shape(self) -> tuple[int, int]:
        return self.step.shape[0], self.step.shape[1]

    def steps(self, cols: slice, device: torch.device) -> Callable[[slice], torch.Tensor]:
        """Maps rows to the step on them and `cols`, float32."""
        return lambda rows: self.step[rows, cols].to(device)


def apply_block(weight: torch.Tensor, update: Update | FullUpdate, row0: int = 0, col0: int = 0) -> None:
    """Apply `update` in place to W[row0:row0 + n, col0:col0 + m].

    Args:
        weight: bf16 [n, m], any strides: the block itself. Its storage does not move.
        row0, col0: where the block lies in the Hugging Face matrix [d, k].

    Raises:
        ValueError: the block is not bf16, or does not lie inside the matrix.
    """
    rows, cols = weight.shape
    _check(weight, update, row0, rows, col0, cols)
    if rows == 0 or cols == 0:
        return
    # The same bits in one pass over W, for integer factors. A machine without a GPU neither needs nor imports it.
    integers = isinstance(update, Update) and update.s is not None
    if weight.is_cuda and integers and find_spec("triton") is not None:
        from ..kernels.apply import apply_block as twin

        twin(weight, update, row0, col0)
    else:
        apply_tiles(weight, update, row0, col0)


def apply_tiles(weight: torch.Tensor, update: Update | FullUpdate, row0: int, col0: int) -> None:
    """What `apply_block` does, in torch operations on tiles of rows: on any device, and the twin's reference."""
    rows, cols = weight.shape
    step_on = update.steps(slice(col0, col0 + cols), weight.device)
    for start in range(0, rows, count := _tile_rows(rows, cols)):
        tile = weight[start : start + count]
        step = step_on(slice(row0 + start, row0 + start + tile.shape[0]))
        _write(tile, step, update, row0 + start, col0)


def apply_flat(shard: torch.Tensor, update: Update | FullUpdate, start: int) -> None:
    """Apply `update` in place to the row-major flat elements [start, start + n) of W (a ZeRO-3 partition).

    Args:
        shard: bf16 [n], contiguous; elements beyond the end of the matrix (padding of the partition) are left alone.
        start: flat index of its first element in the Hugging Face matrix.
    """
    rows, width = update.shape
    end = min(start + shard.numel(), rows * width)
    position = start
    while position < end:
        row, col = divmod(position, width)
        if col == 0 and end - position >= width:  # whole rows
            count = (end - position) // width
            block = shard[position - start : position - start + count * width].view(count, width)
        else:  # the piece of a row at either end of the partition
            stop = min(end, (row + 1) * width)
            block = shard[position - start : stop - start].view(1, stop - position)
        apply_block(block, update, row, col)
        position += block.numel()


def _tile_rows(rows: int, cols: int) -> int:
    # At most half of the block, so that no temporary has the size of the matrix, however small it is.
    return max(1, min(_TILE_ELEMENTS // cols, -(-rows // 2)))


def _check(weight: torch.Tensor, update: Update | FullUpdate, row0: int, rows: int, col0: int, cols: int) -> None:
    matrix = update.shape
    if weight.dtype is not torch.bfloat16:
        raise ValueError(f"{update.name}: updates apply to bfloat16 weights, not {weight.dtype}")
    if row0 < 0 or col0 < 0 or row0 + rows > matrix[0] or col0 + cols > matrix[1]:
        raise ValueError(f"{update.name}: block [{row0}:{row0 + rows}, {col0}:{col0 + cols}] lies outside of {matrix}")


def _product(update: Update, rows: slice, signs: torch.Tensor) -> torch.Tensor:
    """s_i D_ij of these rows (Rademacher: exact), or C R (Gaussian), float32."""
    q = update.q[rows]
    if update.s is None:
        return q @ signs
    product = integer_product(q, signs).mul_(update.s[rows][:, None])
    return product.add_(0.0)  # -0 becomes +0: with rank 1, kernels differ in the sign of 0 times -1


def integer_product(q: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """D = q R exactly, as float32. q int16 [n, r], signs float32 of +-1 [r, m]; |D| < 2**24 by the choice of Q.

    Where float32 products may run at reduced precision (TF32, oneDNN's bf16 mode), q is split into two bytes, which
    those modes represent exactly.
    """
    with torch.autocast(q.device.type, enabled=False):  # a caller's, which would compute in bf16
        if _float32_products_are_exact():
            return q.float() @ signs
        low = q & 0xFF
        high = (q - low) >> 8
        return (high.float() @ signs).mul_(256).add_(low.float() @ signs)


def _float32_products_are_exact() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set per backend, through torch's newer interface: assume the worst
        return False


def _write(tile: torch.Tensor, step: torch.Tensor, update: Update | FullUpdate, row0: int, col0: int) -> None:
    y = tile.float().sub_(step)
    if update.rounding == "stochastic":
        key = derive_key("dither", update.seed, update.update, update.name)
        dither = dither_block(key, row0, tile.shape[0], col0, tile.shape[1], update.shape[1], tile.device)
        bits = y.view(torch.int32).add_(dither).bitwise_and_(-65536)
        y = bits.view(torch.float32)
    tile.copy_(y)


def dither_block(
    key: int, row0: int, rows: int, col0: int, cols: int, width: int, device: torch.device | str
) -> torch.Tensor:
    """16-bit dither of the elements [row0:row0 + rows, col0:col0 + cols] of a matrix with `width` columns.

    The element with flat index e = row width + col takes lane e % 8 of the Philox output at counter e // 8.

    Returns:
        int32 [rows, cols] with values in [0, 65536).
    """
    first = torch.arange(row0, row0 + rows, dtype=torch.int64, device=device)[:, None] * width + col0
    offset = first % 8
    groups = first // 8 + torch.arange(-(-(cols + 7) // 8), dtype=torch.int64, device=device)
    words = philox4x32(key, groups & 0xFFFFFFFF, groups >> 32)
    lanes = sixteen_bit_lanes(words)
    if width % 8 == 0:  # every row starts at the same lane
        start = col0 % 8
        return lanes[:, start : start + cols].to(torch.int32)
    return lanes.gather(1, offset + torch.arange(cols, device=device)).to(torch.int32)
