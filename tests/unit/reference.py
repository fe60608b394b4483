"""Independent numpy versions of the formulas, element by element, to compare with."""

import hashlib

import numpy as np

MASK64 = (1 << 64) - 1


def key_of(purpose: str, seed: int, update: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\n{update}\n{name}".encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little")


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    x, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(p1 >> 32) ^ x[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ x[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def rademacher(key: int, rank: int, width: int) -> np.ndarray:
    signs = np.empty((rank, width), dtype=np.int64)
    for i in range(rank):
        for group in range(-(-width // 128)):
            words = philox(key, (group, i, 0, 0))
            for lane in range(min(128, width - 128 * group)):
                signs[i, 128 * group + lane] = 1 - 2 * ((words[lane // 32] >> (lane % 32)) & 1)
    return signs


def column(key: int, rank: int, j: int) -> list[int]:
    """R[:, j] alone."""
    words = (philox(key, (j // 128, i, 0, 0))[j % 128 // 32] for i in range(rank))
    return [1 - 2 * ((word >> (j % 32)) & 1) for word in words]


def dither(key: int, index: int) -> int:
    word = philox(key, ((index // 8) & 0xFFFFFFFF, index // 8 >> 32, 0, 0))[index % 8 // 2]
    return word >> 16 if index % 2 else word & 0xFFFF


def to_bits(bf16_as_float32: np.ndarray) -> np.ndarray:
    return (bf16_as_float32.astype(np.float32).view(np.uint32) >> 16).astype(np.uint64)


def apply(weight: np.ndarray, q: np.ndarray, s: np.ndarray, signs: np.ndarray, dither_key: int) -> np.ndarray:
    """W' as float32 values that are bf16 numbers; weight holds bf16 numbers as float32."""
    product = q.astype(np.int64) @ signs
    y = weight.astype(np.float32) - (s[:, None] * product.astype(np.float32)).astype(np.float32)
    rows, cols = weight.shape
    noise = np.array([dither(dither_key, i) for i in range(rows * cols)], dtype=np.uint32).reshape(rows, cols)
    return ((y.view(np.uint32) + noise) & np.uint32(0xFFFF0000)).view(np.float32)


def apply_element(weight: float, q: list[int], s: float, signs: list[int], noise: int | None) -> float:
    """W'_ij from W_ij, q_i, s_i and R[:, j]; noise None rounds to the nearest bf16 number, of two to the even one."""
    product = sum(a * b for a, b in zip(q, signs))
    y = np.float32(weight) - np.float32(s) * np.float32(product)
    bits = int(y.view(np.uint32))
    floor = bits & 0xFFFF0000
    if noise is not None:
        result = (bits + noise) & 0xFFFF0000
    else:
        down, up = (float(np.uint32(b).view(np.float32)) for b in (floor, floor + 0x10000))
        below, above = abs(float(y) - down), abs(up - float(y))
        result = floor if below < above or (below == above and floor >> 16 & 1 == 0) else floor + 0x10000
    return float(np.uint32(result).view(np.float32))


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def digest(weight: np.ndarray, name: str) -> int:
    name_hash = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, person=b"digest").digest(), "little")
    total = 0
    for index, bits in enumerate(to_bits(weight).ravel().tolist()):
        total += mix64((name_hash + index * 0x9E3779B97F4A7C15) & MASK64) * bits
    return total & MASK64
