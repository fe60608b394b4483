"""Counter-based random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A draw is a pure function of (key, counter). No generator state is read or moved, and any element can be computed
alone, on any device, in any order, with the same bits.
"""

import hashlib

import torch

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def derive_key(purpose: str, seed: int, update: int, name: str) -> int:
    """64-bit Philox key of one parameter at one update.

    Args:
        purpose: what the bits are for ("projection", "dither", ...); at most 16 ASCII characters. Two purposes never
            share a stream.
        seed: run seed.
        update: index of the update (or of the projection) the bits belong to.
        name: Hugging Face parameter name, without wrapper prefixes.

    Returns:
        An integer in [0, 2**64), the same on every machine (BLAKE2b).
    """
    message = f"{seed}\n{update}\n{name}".encode()
    digest = hashlib.blake2b(message, digest_size=8, person=purpose.encode("ascii")).digest()
    return int.from_bytes(digest, "little")


def philox4x32(
    key: int, c0: torch.Tensor, c1: torch.Tensor | int, c2: int = 0, c3: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit random words for every counter (c0, c1, c2, c3).

    Args:
        key: 64-bit key.
        c0, c1: low counter words, int64 tensors (or an int) with values in [0, 2**32) that broadcast together.
        c2, c3: high counter words.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    k0, k1 = key & MASK32, key >> 32
    # int64 holds a 32 x 32 bit product modulo 2**64, which is all that is needed: the sign bit is masked away below.
    x0, x1, x2, x3 = c0, c1, c2, c3
    for _ in range(_ROUNDS):
        p0 = x0 * _MULTIPLIERS[0]
        p1 = x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((p1 >> 32) & MASK32) ^ x1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ x3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + _WEYL[0]) & MASK32, (k1 + _WEYL[1]) & MASK32
    shape = torch.broadcast_shapes(*(x.shape for x in (x0, x1, x2, x3) if isinstance(x, torch.Tensor)))
    return tuple(torch.as_tensor(x, device=c0.device).expand(shape) for x in (x0, x1, x2, x3))
