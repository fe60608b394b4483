"""An additive checksum of weights: independent of order and sharding, so that shards add up (docs/bits.md).

digest(W) = sum over elements of mix64(name hash + index) * bits(W_index) modulo 2**64
"""

import hashlib

import torch

MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # fits a core's cache; fills a GPU


def name_hash(name: str) -> int:
    """64-bit BLAKE2b hash of a parameter name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"digest").digest(), "little")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) under which the elements of a tensor of `shape` are addressed: leading dimensions joined, a
    vector as one column."""
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return (rows, shape[-1]) if len(shape) > 1 else (rows if not shape else shape[0], 1)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor under the two dimensions of `matrix_shape`, as a view."""
    return tensor.view(matrix_shape(tuple(tensor.shape)))


def digest_block(block: torch.Tensor, name: str, width: int, row0: int = 0, col0: int = 0) -> int:
    """Digest of W[row0:row0 + n, col0:col0 + m], addressed within the Hugging Face matrix of `width` columns.

    Args:
        block: bf16 [n, m], any strides.
        name: Hugging Face parameter name.
        width: columns of the whole matrix (1 for a vector, whose elements are its rows).

    Returns:
        An integer in [0, 2**64). Digests of blocks that partition a matrix add up to the matrix's, modulo 2**64.
    """
    rows, cols = block.shape
    step = max(1, _TILE_ELEMENTS.get(block.device.type, 1 << 24) // max(cols, 1))
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    for start in range(0, rows, step):
        tile = block[start : start + step]
        row = torch.arange(row0 + start, row0 + start + tile.shape[0], dtype=torch.int64, device=block.device)
        index = row[:, None] * width + torch.arange(col0, col0 + cols, dtype=torch.int64, device=block.device)
        total += _weighted_sum(tile, index, name)
    return int(total) & MASK64


def total_digest(digests: dict[str, int]) -> int:
    """Digest of a model from those of its parameters."""
    return sum(digests.values()) & MASK64


def digest_flat(shard: torch.Tensor, name: str, start: int, size: int) -> int:
    """Digest of the row-major flat elements [start, start + n) of a matrix of `size` elements; padding is ignored.

    Args:
        shard: bf16 [n], contiguous.
        start: flat index of its first element.
        size: number of elements of the whole matrix.
    """
    count = max(0, min(shard.numel(), size - start))
    return digest_block(shard[:count].view(-1, 1), name, 1, row0=start) if count else 0


def _weighted_sum(tile: torch.Tensor, index: torch.Tensor, name: str) -> torch.Tensor:
    # int64 arithmetic wraps modulo 2**64, which is the arithmetic of the formula.
    weights = _mix64(index * signed64(_GOLDEN) + signed64(name_hash(name)))
    bits = tile.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    return weights.mul_(bits).sum()


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ _shift_right(x, 30)) * signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * signed64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed64(value: int) -> int:
    """The int64 with the same bits as a 64-bit unsigned value."""
    return value - (1 << 64) if value >> 63 else value
