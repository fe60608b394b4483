"""The additive digest (docs/sync.md)."""

import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_logra.math.digest import digest_block, digest_flat

MASK64 = (1 << 64) - 1


def weight_of(d, k, seed):
    return torch.randn(d, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_equals_the_reference():
    weight = weight_of(7, 13, 0)
    assert digest_block(weight, "a.b", 13) == reference.digest(weight.float().numpy(), "a.b")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_digests_of_any_partition_add_up(data):
    d, k = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    weight = weight_of(d, k, data.draw(st.integers(0, 1000)))
    whole = digest_block(weight, "w", k)
    row, col = data.draw(st.integers(0, d)), data.draw(st.integers(0, k))
    parts = [(slice(0, row), slice(0, col)), (slice(0, row), slice(col, k)), (slice(row, d), slice(0, k))]
    assert sum(digest_block(weight[r, c], "w", k, r.start, c.start) for r, c in parts) & MASK64 == whole
    size = data.draw(st.integers(1, d * k))
    padded = torch.cat((weight.flatten(), torch.ones(size, dtype=torch.bfloat16)))
    flat = sum(digest_flat(padded[i : i + size], "w", i, d * k) for i in range(0, d * k, size))
    assert flat & MASK64 == whole


@settings(max_examples=60, deadline=None)
@given(row=st.integers(0, 15), col=st.integers(0, 30), bit=st.integers(0, 15))
def test_one_flipped_bit_is_seen(row, col, bit):
    weight = weight_of(16, 31, 5)
    changed = weight.clone()
    view = changed.view(torch.int16)
    view[row, col] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert digest_block(changed, "w", 31) != digest_block(weight, "w", 31)


def test_swapped_elements_and_other_names_are_seen():
    weight = weight_of(4, 8, 1)
    swapped = weight.clone()
    swapped[0, 0], swapped[3, 7] = weight[3, 7], weight[0, 0]
    assert digest_block(swapped, "w", 8) != digest_block(weight, "w", 8)
    assert digest_block(weight, "w", 8) != digest_block(weight, "v", 8)
    assert digest_block(torch.zeros(4, 8, dtype=torch.bfloat16), "w", 8) == 0
