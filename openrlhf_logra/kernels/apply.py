"""The Triton twin of math/exact.py's `apply_block`: one pass over W, the same bits (docs/bits.md).

Neither R nor the dither is ever in memory. A program owns 128 x 128 elements of W, its columns aligned with the
Hugging Face matrix, because one Philox counter holds the signs of 128 columns of one row of R. It walks over the rank
in steps, draws that piece of R and multiplies by it on the tensor cores, so that R is drawn once for every 128 rows of
W. Counted in instructions that is about the work of the dither at r = 256, which each element needs anyway. More rows
in a program would save part of it, but their two accumulators do not fit into an SM's registers.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from ..math.exact import Update, apply_tiles, quantize
from ..math.philox import derive_key
from ..math.projection import Projection

_ROWS = tl.constexpr(128)
_COLS = tl.constexpr(128)  # the signs of one counter
_RANKS = tl.constexpr(64)


def apply_block(weight: torch.Tensor, update: Update, row0: int, col0: int) -> None:
    """Apply a Rademacher `update` in place to W[row0:row0 + n, col0:col0 + m]; see math/exact.py, which calls this.

    Args:
        weight: bf16 [n, m], not empty, any strides, inside of the Hugging Face matrix (the caller has checked).
        update: with integer coefficients q and scales s.
        row0, col0: where the block lies in the Hugging Face matrix.
    """
    _check(weight.device)
    _launch(weight, update.to(weight.device), row0, col0)


@cache
def _check(device: torch.device) -> None:
    """Once per device: the twin against the torch code. A compiler that gets this wrong must not touch weights."""
    generator = torch.Generator().manual_seed(0)
    for width, rounding in ((256, "stochastic"), (203, "nearest")):
        q, s = quantize(torch.randn(150, 70, generator=generator) * 1e-2)
        update = Update(Projection(0, 0, "check", 70, width), 0, q, s, rounding).to(device)
        ours = torch.randn(150, width, generator=generator).bfloat16()[3:, 5:].to(device)
        theirs = ours.clone()
        _launch(ours, update, 3, 5)
        apply_tiles(theirs, update, 3, 5)
        if not torch.equal(ours, theirs):
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(
                f"LoGRA: the Triton kernel does not give the right bits on {name} (Triton {triton.__version__}); "
                "please report this, and uninstall triton to train without it"
            )


def _launch(weight: torch.Tensor, update: Update, row0: int, col0: int) -> None:
    projection = update.projection
    rows, cols = weight.shape
    q, s = update.q.contiguous(), update.s.contiguous()
    grid = (
        triton.cdiv(col0 + cols, _COLS.value) - col0 // _COLS.value,
        triton.cdiv(rows, _ROWS.value),
    )
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _apply[grid](
            weight,
            *weight.stride(),
            q,
            s,
            derive_key("projection", projection.seed, projection.index, projection.name),
            derive_key("dither", projection.seed, update.update, projection.name),
            row0,
            rows,
            col0,
            cols,
            projection.width,
            projection.rank,
            STOCHASTIC=update.rounding == "stochastic",
            WHOLE_GROUPS=projection.width % 8 == 0,
            num_warps=8,
            enable_fp_fusion=False,
        )


# Only what decides how wide loads and stores may be is specialised, so that a new key or row does not compile anew.
@triton.jit(do_not_specialize=["projection_key", "dither_key", "row0", "rows", "width"])
def _apply(
    weight,
    row_stride,
    col_stride,
    q,
    s,
    projection_key: tl.uint64,
    dither_key: tl.uint64,
    row0,
    rows,
    col0,
    cols,
    width,
    rank,
    STOCHASTIC: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
):
    group = col0 // _COLS + tl.program_id(0)
    # int64: a matrix may have more than 2**31 elements, and a block may lie further than that from its base.
    block_row = tl.program_id(1).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    row = row0 + block_row
    col = group.to(tl.int64) * _COLS + tl.arange(0, _COLS)
    row_inside = block_row < rows
    inside = row_inside[:, None] & ((col >= col0) & (col < col0 + cols))[None, :]

    high, low = _integer_product(q, row, row_inside, rank, projection_key, group)
    # Exact: a multiple of 256 and |D| < 2**24.
    product = high * 256 + low
    # s is a power of two, not below 2**-126, or 0, and D an integer below 2**24: s D is exact, so fusing the product
    # with what follows would change no bit. Adding +0 makes -0 to +0, as math/exact.py does.
    product = product * tl.load(s + row, mask=row_inside, other=0)[:, None] + 0.0

    pointers = weight + block_row[:, None] * row_stride + (col - col0)[None, :] * col_stride
    old = tl.load(pointers, mask=inside, other=0).to(tl.uint16, bitcast=True)
    y = (old.to(tl.uint32) << 16).to(tl.float32, bitcast=True) - product
    bits = y.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        bits += _dither(dither_key, row, group, width, WHOLE_GROUPS)
    else:  # truncation after adding this is round-half-even
        bits += 0x7FFF + ((bits >> 16) & 1)
    # A GPU's NaN has every bit of its mantissa set: the sum would have carried it into -0.
    new = tl.where(y == y, bits >> 16, 0x7FC0).to(tl.uint16)
    tl.store(pointers, new.to(tl.bfloat16, bitcast=True), mask=inside)


@triton.jit
def _integer_product(q, row, row_inside, rank, key, group):
    """The two bytes of q times R[:, 128 group:128 group + 128]: float32 [_ROWS, _COLS] each, D = 256 high + low.

    A byte and a sign are exact in float16, and |high| <= 128 r and |low| <= 255 r stay below 2**24 (far below at usual
    ranks), so that float32 accumulators are exact in whatever order and alignment tensor cores add.
    """
    high = tl.zeros((_ROWS, _COLS), tl.float32)
    low = tl.zeros((_ROWS, _COLS), tl.float32)
    for start in range(0, rank, _RANKS):
        ranks = start + tl.arange(0, _RANKS)
        inside = row_inside[:, None] & (ranks < rank)[None, :]
        tile = tl.load(q + row[:, None] * rank + ranks[None, :], mask=inside, other=0)
        signs = _signs(key, ranks, group)
        high = tl.dot((tile >> 8).to(tl.float16), signs, high)
        low = tl.dot((tile & 0xFF).to(tl.float16), signs, low)
    return high, low


@triton.jit
def _signs(key, ranks, group):
    """R[ranks, 128 group:128 group + 128]: float16 [_RANKS, _COLS]."""
    words = _philox(key, group + tl.zeros_like(ranks), ranks)
    signs = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    # 1 or -1 by its float16 bits: 0x3C00 is 1.
    signs = (0x3C00 | (signs << 15)).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(signs, (_RANKS, _COLS))


@triton.jit
def _dither(key, row, group, width, WHOLE_GROUPS: tl.constexpr):
    """16 bits for each element: uint32 [_ROWS, _COLS]. One counter holds eight elements that follow each other."""
    if WHOLE_GROUPS:  # each row starts a group, as the tile does: one counter for eight elements
        groups = row[:, None] * (width // 8) + (group * (_COLS // 8) + tl.arange(0, _COLS // 8))[None, :]
        groups = tl.reshape(groups, (_ROWS * (_COLS // 8),))
        words = _philox(key, groups, groups >> 32)
        halves = words[:, :, None] >> (16 * tl.arange(0, 2))[None, None, :]
        return tl.reshape(halves, (_ROWS, _COLS)) & 0xFFFF
    # A row may start within a group. No matrix of a usual model does: eight times the work, but simple.
    index = row[:, None] * width + (group * _COLS + tl.arange(0, _COLS))[None, :]
    groups, lane = index // 8, index % 8
    w0, w1, w2, w3 = tl.philox(key, groups.to(tl.uint32), (groups >> 32).to(tl.uint32), 0, 0)
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    return (word >> (16 * (lane % 2)).to(tl.uint32)) & 0xFFFF


@triton.jit
def _philox(key, c0, c1):
    """Philox4x32-10 at counters (c0, c1, 0, 0), integers [n] modulo 2**32: uint32 [n, 4]."""
    w0, w1, w2, w3 = tl.philox(key, c0.to(tl.uint32), c1.to(tl.uint32), 0, 0)
    # tl.join makes a last dimension of two: [[w0, w1], [w2, w3]].
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (c0.shape[0], 4))
