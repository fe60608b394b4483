"""What must hold of the exact apply at any shape, shard and rounding, and its unbiasedness (docs/bits.md)."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact import bits, make_update, random_weight

from openrlhf_logra.math.exact import ROUNDINGS, Update, apply_block, apply_flat, quantize
from openrlhf_logra.math.projection import Projection


def cut(data, length, most=4):
    """Up to `most` cuts of [0, length) at any places, as pairs (start, end)."""
    ends = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=most))})
    return list(zip(ends, ends[1:]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), d=st.integers(1, 300), k=st.integers(1, 300), r=st.integers(1, 512))
def test_shards_blocks_and_the_reference_agree(data, d, k, r):
    seed, rounding = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from(ROUNDINGS))
    weight, update = random_weight(d, k, seed), make_update(d, k, r, seed, rounding=rounding)
    whole = weight.clone()
    apply_block(whole, update)

    blocks = weight.clone()
    for row0, row1 in cut(data, d):
        for col0, col1 in cut(data, k):  # other cuts for each row of blocks
            apply_block(blocks[row0:row1, col0:col1], update, row0, col0)
    assert torch.equal(bits(blocks), bits(whole))

    shards = weight.clone().flatten()
    for start, end in cut(data, d * k):
        apply_flat(shards[start:end], update, start)
    assert torch.equal(bits(shards.view(d, k)), bits(whole))

    transposed = weight.T.clone()
    apply_block(transposed.T, update)
    assert torch.equal(bits(transposed.T), bits(whole))

    projection_key = reference.key_of("projection", seed, 1, "w")
    dither_key = reference.key_of("dither", seed, 3, "w")
    for j in data.draw(st.lists(st.integers(0, k - 1), min_size=1, max_size=2)):
        signs = reference.column(projection_key, r, j)
        for i in data.draw(st.lists(st.integers(0, d - 1), min_size=1, max_size=4)):
            noise = reference.dither(dither_key, i * k + j) if rounding == "stochastic" else None
            expected = reference.apply_element(
                float(weight[i, j]), update.q[i].tolist(), float(update.s[i]), signs, noise
            )
            assert float(whole[i, j]) == expected, (i, j)


@pytest.mark.parametrize("width", [2**16, 2**16 + 5])
def test_an_element_whose_group_has_more_than_32_bits(width):
    """From element 2**35 the dither's second counter word counts."""
    rows, row0, col0 = 2**19 + 2, 2**19 - 1, width - 9
    update = make_update(rows, width, 2, scale=1.0)
    block = random_weight(3, 9)
    before = block.clone()
    apply_block(block, update, row0, col0)
    dither_key, projection_key = reference.key_of("dither", 0, 3, "w"), reference.key_of("projection", 0, 1, "w")
    for j in range(9):
        signs = reference.column(projection_key, 2, col0 + j)
        for i in range(3):
            q, s = update.q[row0 + i].tolist(), float(update.s[row0 + i])
            noise = reference.dither(dither_key, (row0 + i) * width + col0 + j)
            assert float(block[i, j]) == reference.apply_element(float(before[i, j]), q, s, signs, noise)


def accumulate(rounding, d=32, k=256, r=16, updates=200):
    """Applies 200 small updates, and says how far the sum of their rounding errors is from 0, in standard errors.

    Let y be what an update rounds, between its bf16 neighbours y - f h and y + (1 - f) h. Unbiased rounding goes up
    with probability f: the error has mean 0 whatever came before, and variance f (1 - f) h**2. The dithers of other
    elements and updates are independent, so all errors are uncorrelated, and the sum of them, each with any fixed
    sign, has as its variance the sum of these variances. (The float32 rounding of y is about 2**-17 h.)

    Returns:
        The sum over all elements of the accumulated error, and the same with each element's error taken along the
        element's own step; both divided by their common standard error.
    """
    projection = Projection(0, 0, "w", r, k)
    signs = projection.block(dtype=torch.float64)
    weight = random_weight(d, k)
    start, exact = weight.double(), weight.double()
    variance = 0.0
    for t in range(updates):
        # One direction all the time; a step is about 1/30 of a bf16 spacing at |w| = 1.
        coefficients = torch.full((d, r), 2.0**-14) * torch.rand(d, 1, generator=torch.Generator().manual_seed(t))
        q, s = quantize(coefficients)
        step = s.double()[:, None] * (q.double() @ signs)
        y = (weight.double() - step).float().view(torch.int32)
        fraction = (y & 0xFFFF).double() / 65536
        spacing = ((y & -65536) + 65536).view(torch.float32).double() - (y & -65536).view(torch.float32).double()
        variance += float((fraction * (1 - fraction) * spacing.square()).sum())
        apply_block(weight, Update(projection, t, q, s, rounding))
        exact -= step
    error, direction = weight.double() - exact, torch.sign(exact - start)
    return float(error.sum()) / math.sqrt(variance), float((error * direction).sum()) / math.sqrt(variance)


def test_200_updates_round_without_bias():
    total, along = accumulate("stochastic")
    assert abs(total) < 3 and abs(along) < 3


def test_the_test_of_bias_can_fail():
    """Rounding to nearest loses most of every small step: the error along the step is far from 0."""
    _, along = accumulate("nearest")
    assert along < -30
