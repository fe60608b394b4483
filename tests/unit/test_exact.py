"""Exact application of an update (docs/bits.md)."""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_logra.math.exact import Update, apply_block, apply_flat, integer_product, max_quantum, quantize
from openrlhf_logra.math.projection import Projection


def make_update(d, k, r, seed=0, scale=1e-3, update=3, rounding="stochastic", name="w"):
    coefficients = torch.randn(d, r, generator=torch.Generator().manual_seed(seed)) * scale
    return Update(Projection(seed, 1, name, r, k), update, *quantize(coefficients), rounding)


def random_weight(d, k, seed=0):
    return torch.randn(d, k, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


# ---- quantisation


@pytest.mark.parametrize("rank", [1, 2, 3, 16, 256, 512, 513, 1000, 4096])
def test_the_product_fits_24_bits(rank):
    quantum = max_quantum(rank)
    assert quantum <= 32767 and rank * quantum < 2**24
    assert quantum == 32767 or 2 * (quantum + 1) * 2 ** math.ceil(math.log2(rank)) > 2**24


@settings(max_examples=80, deadline=None)
@given(
    d=st.integers(1, 20),
    r=st.integers(1, 520),
    exponent=st.integers(-100, 30),
    seed=st.integers(0, 10**6),
)
def test_scales_are_the_smallest_powers_of_two(d, r, exponent, seed):
    coefficients = torch.randn(d, r, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    coefficients[0] *= 0
    q, s = quantize(coefficients)
    quantum = max_quantum(r)
    assert s[0] == 0 and not q[0].any()
    for row in range(1, d):
        peak = float(coefficients[row].abs().max())
        scale = float(s[row])
        assert math.frexp(scale)[0] == 0.5
        assert peak / scale <= quantum and peak / (scale / 2) > quantum
        expected = np.rint(coefficients[row].double().numpy() / scale)
        assert (q[row].numpy() == expected).all()


def test_a_peak_on_the_boundary():
    quantum = max_quantum(16)
    q, s = quantize(torch.tensor([[quantum * 0.25] + [0.0] * 15]))
    assert float(s) == 0.25 and int(q[0, 0]) == quantum
    q, s = quantize(torch.tensor([[math.nextafter(quantum * 0.25, math.inf) + 0.01] + [0.0] * 15]))
    assert float(s) == 0.5


def test_half_goes_to_even():
    q, _ = quantize(torch.tensor([[32767.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert q.tolist() == [[32767, 0, 2, 2, 0, -2]]


def test_tiny_coefficients_do_not_underflow_into_nonsense():
    q, s = quantize(torch.tensor([[1e-40, -1e-44], [0.0, 0.0]]))
    assert torch.isfinite(s).all() and s[0] >= 2.0**-126 and s[1] == 0 and not q.any()


# ---- the apply


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 12), k=st.integers(1, 60), r=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_equals_the_numpy_reference(d, k, r, seed):
    weight, update = random_weight(d, k, seed), make_update(d, k, r, seed)
    signs = reference.rademacher(reference.key_of("projection", seed, 1, "w"), r, k)
    expected = reference.apply(
        weight.float().numpy(), update.q.numpy(), update.s.numpy(), signs, reference.key_of("dither", seed, 3, "w")
    )
    apply_block(weight, update)
    assert (weight.float().numpy() == expected).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_partition_equals_the_whole(data):
    d, k, r = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300)), data.draw(st.integers(1, 512))
    seed = data.draw(st.integers(0, 10**6))
    weight, update = random_weight(d, k, seed), make_update(d, k, r, seed)
    whole = weight.clone()
    apply_block(whole, update)

    blocks = weight.clone()
    rows = sorted({0, d, *data.draw(st.lists(st.integers(0, d), max_size=3))})
    cols = sorted({0, k, *data.draw(st.lists(st.integers(0, k), max_size=3))})
    for row0, row1 in zip(rows, rows[1:], strict=False):
        for col0, col1 in zip(cols, cols[1:], strict=False):
            apply_block(blocks[row0:row1, col0:col1], update, row0, col0)
    assert torch.equal(bits(blocks), bits(whole))

    ranks = data.draw(st.integers(1, 5))
    length = -(-d * k // ranks)
    flat = torch.cat((weight.flatten(), torch.full((length * ranks - d * k,), 7.0, dtype=torch.bfloat16)))
    for rank in range(ranks):
        apply_flat(flat[rank * length : (rank + 1) * length], update, rank * length)
    assert torch.equal(bits(flat[: d * k].view(d, k)), bits(whole))
    assert (flat[d * k :] == 7).all(), "padding of the last partition must stay as it is"


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_threads_and_matmul_precision_do_not_matter(threads, precision):
    weight, update = random_weight(200, 260), make_update(200, 260, 256)
    expected = weight.clone()
    apply_block(expected, update)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        apply_block(weight, update)
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
    assert torch.equal(bits(weight), bits(expected))


@pytest.mark.parametrize("setting", ["tf32", "bf16"])
def test_precision_set_through_the_newer_interface(setting):
    """torch then refuses to name one precision; the product takes the safe path."""
    weight, update = random_weight(60, 80), make_update(60, 80, 256)
    expected = weight.clone()
    apply_block(expected, update)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = setting
        apply_block(weight, update)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert torch.equal(bits(weight), bits(expected))


def test_integer_product_at_its_extremes():
    for rank in (1, 256, 512, 1024):
        q = torch.full((2, rank), max_quantum(rank), dtype=torch.int16)
        q[1] = -q[1]
        signs = torch.ones(rank, 3)
        expected = q.long() @ signs.long()
        assert (integer_product(q, signs).long() == expected).all()


def test_storage_does_not_move_and_strides_are_kept():
    base = random_weight(64, 96)
    view = base[8:40, 16:80]
    pointer, update = base.data_ptr(), make_update(32, 64, 8)
    expected = view.clone()
    apply_block(expected, update)
    apply_block(view, update)
    assert base.data_ptr() == pointer and torch.equal(bits(base[8:40, 16:80]), bits(expected))


@pytest.mark.parametrize("r", [1, 2])
def test_zero_and_minus_zero_do_not_depend_on_the_sharding(r):
    weight = torch.zeros(48, 10, dtype=torch.bfloat16)
    weight[::2] = -0.0
    update = make_update(48, 10, r)
    update.q.zero_()
    whole, parts = weight.clone(), weight.clone()
    apply_block(whole, update)
    for row in range(48):
        apply_block(parts[row : row + 1, :3], update, row, 0)
        apply_block(parts[row : row + 1, 3:], update, row, 3)
    assert torch.equal(bits(whole), bits(parts))


def test_a_zero_row_keeps_its_bits():
    coefficients = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) * 1e-2
    coefficients[4] = 0
    weight = random_weight(6, 40)
    before = weight.clone()
    apply_block(weight, Update(Projection(0, 0, "w", 8, 40), 0, *quantize(coefficients)))
    changed = (bits(weight) != bits(before)).any(1).tolist()
    assert changed == [True, True, True, True, False, True]


def test_bad_blocks_are_refused():
    update = make_update(8, 16, 4)
    with pytest.raises(ValueError, match="bfloat16"):
        apply_block(torch.zeros(8, 16), update)
    with pytest.raises(ValueError, match="outside"):
        apply_block(torch.zeros(8, 16, dtype=torch.bfloat16), update, row0=1)


def test_rounding_is_unbiased_over_200_updates():
    """Accumulated error against float64 has mean 0 within three standard errors; nearest rounding drifts."""
    d, k, r, updates = 64, 256, 16, 200
    start = random_weight(d, k)
    weight, nearest, exact = start.clone(), start.clone(), start.double()
    for t in range(updates):
        # A step in one direction all the time, 1/30 of a bf16 spacing at |w| = 1.
        coefficients = torch.full((d, r), 2.0**-14) * torch.rand(d, 1, generator=torch.Generator().manual_seed(t))
        projection = Projection(0, 0, "w", r, k)
        q, s = quantize(coefficients)
        apply_block(weight, Update(projection, t, q, s))
        apply_block(nearest, Update(projection, t, q, s, "nearest"))
        exact -= s.double()[:, None] * (q.double() @ projection.block(dtype=torch.float64))
    error = (weight.double() - exact).flatten()
    spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2**-10))) - 7).flatten()
    relative = error / spacing
    assert abs(relative.mean()) < 3 * relative.std() / math.sqrt(relative.numel())
    moved = (exact - start.double()).norm()
    assert (nearest.double() - exact).norm() > 2 * (weight.double() - exact).norm() > 0
    assert moved > (weight.double() - exact).norm()


def test_the_callers_autocast_and_default_dtype_change_nothing():
    generator = torch.Generator().manual_seed(3)
    coefficients = torch.randn(16, 8, generator=generator) * 1e-3
    weight = torch.randn(16, 40, generator=generator).bfloat16()
    projection = Projection(0, 0, "w", 8, 40)
    plain, cast = weight.clone(), weight.clone()
    apply_block(plain, Update(projection, 0, *quantize(coefficients)))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            apply_block(cast, Update(projection, 0, *quantize(coefficients)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(plain, cast) and not torch.equal(plain, weight)
