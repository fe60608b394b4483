"""Changed elements: the lossless form of a change that is no product of factors (docs/sync.md, `sparse`).

The elements of a matrix whose bf16 bits differ, by flat index, with their new bits. On the wire both are byte planes
under zlib: gaps between indices are small, so that their upper planes are nearly all zero.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch

_LEVEL = 1  # on real updates higher levels take three times as long for a few percent


@dataclass(frozen=True)
class Elements:
    """New bits of some elements of one checkpoint tensor.

    Attributes:
        indices: int64 [n], strictly increasing flat indices into the row-major tensor.
        bits: int16 [n], the bf16 bits there now.
    """

    indices: torch.Tensor
    bits: torch.Tensor

    def write(self, block: torch.Tensor, row0: int, col0: int, width: int) -> None:
        """Write what lies in W[row0:row0 + n, col0:col0 + m] into that block.

        Args:
            block: bf16 [n, m], any strides; its storage does not move.
            width: columns of the whole matrix (1 for a vector).
        """
        rows, cols = block.shape
        # Sorted indices: the rows of the block are one range of them.
        bounds = torch.tensor([row0 * width, (row0 + rows) * width])
        first, last = torch.searchsorted(self.indices, bounds).tolist()
        row, col = self.indices[first:last] // width, self.indices[first:last] % width
        bits = self.bits[first:last]
        if cols != width:
            inside = (col >= col0) & (col < col0 + cols)
            row, col, bits = row[inside], col[inside], bits[inside]
        place = (row - row0).to(block.device), (col - col0).to(block.device)
        block[place] = bits.to(block.device).view(torch.bfloat16)


def changed_elements(old: torch.Tensor, new: torch.Tensor, start: int = 0) -> Elements:
    """Where `new` differs from `old` in its bits.

    Args:
        old, new: bf16 [n], contiguous: elements [start, start + n) of the flat tensor.
    """
    old, new = old.view(torch.int16), new.view(torch.int16)
    places = torch.nonzero(old != new).flatten()
    return Elements(places + start, new[places])


def join(parts: list[Elements]) -> Elements:
    """Elements of consecutive ranges of one tensor, in order."""
    return Elements(torch.cat([part.indices for part in parts]), torch.cat([part.bits for part in parts]))


def compress(elements: Elements) -> dict[str, torch.Tensor]:
    """Wire form: {"gaps", "bits"}, uint8 tensors of zlib-compressed byte planes (uint32 gaps, uint16 bits).

    Raises:
        ValueError: a gap does not fit.
    """
    gaps = np.diff(elements.indices.numpy(), prepend=0)
    if (gaps >> 32).any():
        raise ValueError(f"a gap of {gaps.max()} elements between changes does not fit into 32 bits")
    bits = elements.bits.numpy().view(np.uint16)
    return {"gaps": _deflate(gaps.astype("<u4")), "bits": _deflate(bits.astype("<u2"))}


def decompress(gaps: torch.Tensor, bits: torch.Tensor, size: int) -> Elements:
    """Inverse of `compress`, for a tensor of `size` elements.

    Raises:
        ValueError: damaged data, or indices that do not fit.
    """
    gap_values = _inflate(gaps, "<u4", size)
    bit_values = _inflate(bits, "<u2", size)
    if len(gap_values) != len(bit_values):
        raise ValueError(f"{len(gap_values)} indices and {len(bit_values)} values")
    indices = np.cumsum(gap_values, dtype=np.int64)
    if len(indices) and (indices[-1] >= size or (gap_values[1:] == 0).any()):
        raise ValueError(f"indices do not increase within {size} elements")
    return Elements(torch.from_numpy(indices), torch.from_numpy(bit_values.view(np.int16).copy()))


def _deflate(values: np.ndarray) -> torch.Tensor:
    planes = values.view(np.uint8).reshape(-1, values.itemsize).T
    data = zlib.compress(np.ascontiguousarray(planes).tobytes(), _LEVEL)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _inflate(data: torch.Tensor, dtype: str, most: int) -> np.ndarray:
    if data.dtype is not torch.uint8:
        raise ValueError(f"deflated data is {data.dtype}, expected uint8")
    width = np.dtype(dtype).itemsize
    decoder = zlib.decompressobj()
    try:
        # Bounded: a damaged length must not ask for more memory than the tensor has elements.
        planes = decoder.decompress(data.numpy().tobytes(), most * width + 1)
    except zlib.error as error:
        raise ValueError(f"damaged data: {error}") from error
    if len(planes) % width or len(planes) > most * width or not decoder.eof or decoder.unused_data:
        raise ValueError(f"{len(planes)} bytes for at most {most} elements")
    return np.frombuffer(planes, np.uint8).reshape(width, -1).T.copy().view(dtype).ravel()
