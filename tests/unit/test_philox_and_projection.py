"""Counter-based bits and the projection made of them (docs/bits.md)."""

import hashlib
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_logra.math.philox import derive_key, philox4x32
from openrlhf_logra.math.projection import Projection, projection_index

# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    words = philox4x32(key[0] | key[1] << 32, *(torch.tensor([c], dtype=torch.int64) for c in counter))
    assert tuple(int(word) for word in words) == answer
    assert tuple(reference.philox(key[0] | key[1] << 32, counter)) == answer


def test_keys_are_stable_and_distinct():
    name = "model.layers.0.self_attn.q_proj.weight"
    assert derive_key("projection", 42, 0, name) == reference.key_of("projection", 42, 0, name)
    keys = {
        derive_key(purpose, seed, update, n)
        for purpose in ("projection", "dither")
        for seed in (-1, 0, 42)
        for update in (0, 1, 10)
        for n in (name, name.replace("0", "1"))
    }
    assert len(keys) == 2 * 3 * 3 * 2


@pytest.mark.parametrize(
    "distribution, golden",
    [
        ("rademacher", "ea14c7f894bdd1ac"),
        ("gaussian", "80a35f28b286e0ef"),
    ],
)
def test_golden_hash(threads, distribution, golden):
    draw = Projection(42, 7, "model.layers.3.mlp.down_proj.weight", 64, 1000, distribution).block()
    assert hashlib.blake2b(draw.numpy().tobytes(), digest_size=8).hexdigest() == golden


def test_rademacher_equals_the_reference():
    draw = Projection(5, 1, "w", 9, 300).block(dtype=torch.int64)
    assert (draw.numpy() == reference.rademacher(reference.key_of("projection", 5, 1, "w"), 9, 300)).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), distribution=st.sampled_from(["rademacher", "gaussian"]))
def test_any_block_is_the_slice_of_the_full_draw(data, distribution):
    rank, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 400))
    rows = slice(*sorted(data.draw(st.tuples(st.integers(0, rank), st.integers(0, rank)))))
    cols = slice(*sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width)))))
    projection = Projection(1, 2, "w", rank, width, distribution)
    assert torch.equal(projection.block(rows, cols), projection.block()[rows, cols])


def test_no_global_random_state_is_read_or_moved():
    torch.manual_seed(3)
    first, state = Projection(1, 0, "w", 8, 64, "gaussian").block(), torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.equal(first, Projection(1, 0, "w", 8, 64, "gaussian").block())
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_second_moment_is_the_identity(distribution):
    """E[A^T A] = I: mean over draws within five standard errors, on and off the diagonal."""
    draws, rank, width = 400, 16, 24
    total = torch.zeros(width, width, dtype=torch.float64)
    for i in range(draws):
        r = Projection(0, i, "w", rank, width, distribution).block(dtype=torch.float64)
        total += r.t() @ r / rank
    error = total / draws - torch.eye(width, dtype=torch.float64)
    variance = torch.full((width, width), 1.0) + torch.eye(width) * (1.0 if distribution == "gaussian" else -1.0)
    bound = 5 * (variance / (rank * draws)).sqrt() + 1e-9
    assert (error.abs() <= bound).all()


def test_gaussian_moments():
    values = Projection(0, 0, "w", 256, 4096, "gaussian").block(dtype=torch.float64).flatten()
    n = values.numel()
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.square().mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)


def test_refresh_index():
    assert [projection_index(t, 1) for t in range(3)] == [0, 1, 2]
    assert [projection_index(t, 20) for t in (0, 19, 20, 40)] == [0, 0, 1, 2]
    assert [projection_index(t, 0) for t in (0, 5, 500)] == [0, 0, 0]


# Qwen2.5-1.5B: (out_features, in_features) of the seven targets; k is 1536 six times and 8960 once.
QWEN_1_5B = {
    "q_proj": (1536, 1536),
    "k_proj": (256, 1536),
    "v_proj": (256, 1536),
    "o_proj": (1536, 1536),
    "gate_proj": (8960, 1536),
    "up_proj": (8960, 1536),
    "down_proj": (1536, 8960),
}


@pytest.mark.parametrize("rank, expected", [(256, 0.348), (4, 0.047)])
def test_reconstruction_cosine_at_qwen_shapes(rank, expected):
    """Mean cos(G, S A) over the seven targets, on gradients of low effective rank as backward makes them."""
    generator = torch.Generator().manual_seed(0)
    cosines = []
    for name, (d, k) in QWEN_1_5B.items():
        rows = min(d, 256)  # the cosine is a mean over rows: a sample of them has the same expectation
        tokens = 512
        gradient = torch.randn(rows, tokens, generator=generator) @ torch.randn(tokens, k, generator=generator)
        trials = 1 if rank == 256 else 32
        values = []
        for trial in range(trials):
            r = Projection(42, trial, name, rank, k).block()
            rebuilt = gradient @ r.t() @ r / rank
            values.append(torch.nn.functional.cosine_similarity(gradient.flatten(), rebuilt.flatten(), dim=0))
        cosines.append(torch.stack(values).mean())
    assert abs(float(torch.stack(cosines).mean()) - expected) < 0.002
