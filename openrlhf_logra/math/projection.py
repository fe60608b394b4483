"""The random projection A = R / sqrt(r), r x k, as a function of its key (docs/bits.md; paper section on sketches).

Rademacher: element (i, j) is bit j % 128 of the Philox output at counter (j // 128, i): 0 -> +1, 1 -> -1.
Gaussian: element (i, j) is the standard normal quantile of 16 bits, lane j % 8 of the output at counter (j // 8, i).
The quantile comes from a table of the 2**16 midpoints (scaled to unit variance), so that no device's log or cosine
decides a bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch

from .philox import derive_key, philox4x32

DISTRIBUTIONS = ("rademacher", "gaussian")
_COUNTER_DOMAIN = {"rademacher": 0, "gaussian": 1}


@dataclass(frozen=True)
class Projection:
    """Names one draw of A; holds no numbers.

    Attributes:
        seed: run seed.
        index: index of the draw (update // refresh_every, or 0 when the projection is fixed).
        name: Hugging Face parameter name of the target.
        rank: r, number of rows of A.
        width: k, in_features of the target.
        distribution: "rademacher" or "gaussian".
    """

    seed: int
    index: int
    name: str
    rank: int
    width: int
    distribution: str = "rademacher"

    def block(
        self,
        rows: slice | None = None,
        cols: slice | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """R[rows, cols], the unscaled matrix (A = R / sqrt(rank)); equal to that slice of the full draw.

        Args:
            rows, cols: contiguous slices within [0, rank) and [0, width); None is all.
            device, dtype: of the result; the bits do not depend on either (Rademacher fits any dtype).

        Returns:
            Tensor of the block's shape.
        """
        row0, row1, _ = (rows or slice(None)).indices(self.rank)
        col0, col1, _ = (cols or slice(None)).indices(self.width)
        key = derive_key("projection", self.seed, self.index, self.name)
        draw = _rademacher if self.distribution == "rademacher" else _gaussian
        return draw(key, row0, row1, col0, col1, torch.device(device)).to(dtype)


def projection_index(update: int, refresh_every: int) -> int:
    """Index of the projection that update number `update` (from 0) uses; refresh_every 0 keeps the first for ever."""
    return update // refresh_every if refresh_every else 0


def _counters(row0: int, row1: int, group0: int, group1: int, device: torch.device):
    rows = torch.arange(row0, row1, dtype=torch.int64, device=device)[:, None]
    groups = torch.arange(group0, group1, dtype=torch.int64, device=device)[None, :]
    return groups, rows


def _rademacher(key: int, row0: int, row1: int, col0: int, col1: int, device: torch.device) -> torch.Tensor:
    group0, group1 = col0 // 128, -(-col1 // 128)
    words = philox4x32(key, *_counters(row0, row1, group0, group1, device), _COUNTER_DOMAIN["rademacher"])
    words = torch.stack(words, dim=-1).flatten(1)  # [rows, groups * 4], 32 signs a word
    shifts = torch.arange(32, dtype=torch.int64, device=device)
    bits = ((words[:, :, None] >> shifts) & 1).to(torch.int8).flatten(1)
    return 1 - 2 * bits[:, col0 - group0 * 128 : col1 - group0 * 128]


def _gaussian(key: int, row0: int, row1: int, col0: int, col1: int, device: torch.device) -> torch.Tensor:
    group0, group1 = col0 // 8, -(-col1 // 8)
    words = philox4x32(key, *_counters(row0, row1, group0, group1, device), _COUNTER_DOMAIN["gaussian"])
    lanes = sixteen_bit_lanes(words)
    return _normal_quantiles(device)[lanes[:, col0 - group0 * 8 : col1 - group0 * 8]]


def sixteen_bit_lanes(words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The eight 16-bit halves (low half first) of four 32-bit words: [..., g] each -> [..., 8 g], int64."""
    words = torch.stack(words, dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.flatten(-3)


@lru_cache(maxsize=4)
def _normal_quantiles(device: torch.device) -> torch.Tensor:
    half = 1 << 15
    inverse = NormalDist().inv_cdf
    upper = torch.tensor([inverse(0.5 + (i + 0.5) / (2 * half)) for i in range(half)], dtype=torch.float64)
    upper /= upper.square().mean().sqrt()
    return torch.cat((-upper.flip(0), upper)).to(torch.float32).to(device)
