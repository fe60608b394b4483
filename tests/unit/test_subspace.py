"""GaLore, Fira and Flora against numpy references written from the formulas (docs/strategies.md)."""

import math

import numpy as np
import pytest
import torch

from openrlhf_logra.math.flora import Flora
from openrlhf_logra.math.limiter import limited
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.math.subspace import Fira, GaLore

SHAPES = [(12, 20), (20, 12), (16, 16), (1, 9), (9, 1)]
B1, B2, EPS = 0.9, 0.999, 1e-8


def gradients(shape, steps, growth=0.0):
    random = np.random.default_rng(0)
    return [(1 + growth * i) * random.standard_normal(shape) for i in range(steps)]


def single(g):
    return torch.tensor(g, dtype=torch.float32)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def leading(g, rank):
    u, _, vt = np.linalg.svd(g)
    return u[:, :rank] if g.shape[0] < g.shape[1] else vt[:rank].T


def assert_close(found, expected, dtype=torch.float32):
    assert np.linalg.norm(found.double().numpy() - expected) <= TOLERANCES[dtype] * np.linalg.norm(expected)


def basis_for(dtype, state):
    """The reference's own in float64; in float32 the rule's, whose SVD alone is off by more than a step may be (it is
    held against the reference's below)."""
    return leading if dtype == torch.float64 else lambda g, rank: state["basis"].double().numpy()


class Reference:
    """One matrix in float64. `limit` None is GaLore; `basis` finds P at each step that is due for one."""

    def __init__(self, rank, gap=100, scale=0.25, limit=None, basis=leading):
        self.rank, self.gap, self.scale, self.limit, self.basis = rank, gap, scale, limit, basis
        self.t, self.m, self.v, self.norm = 0, 0.0, 0.0, None

    def step(self, g):
        left = g.shape[0] < g.shape[1]
        if self.t % self.gap == 0:
            self.p = self.basis(g, self.rank)
        self.t += 1
        low = self.p.T @ g if left else g @ self.p
        self.m = B1 * self.m + (1 - B1) * low
        self.v = B2 * self.v + (1 - B2) * low**2
        adam = (self.m / (1 - B1**self.t)) / (np.sqrt(self.v / (1 - B2**self.t)) + EPS)
        step = self.scale * (self.p @ adam if left else adam @ self.p.T)
        if self.limit is None:
            return step
        rest = g - (self.p @ low if left else low @ self.p.T)
        if left:
            for j in range(g.shape[1]):
                rest[:, j] *= np.linalg.norm(adam[:, j]) / np.linalg.norm(low[:, j])
        else:
            for i in range(g.shape[0]):
                rest[i] *= np.linalg.norm(adam[i]) / np.linalg.norm(low[i])
        norm = np.linalg.norm(rest)
        if self.norm and norm / self.norm > self.limit:
            rest *= self.limit * self.norm / norm
        self.norm = np.linalg.norm(rest)
        return step + rest


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_galore_is_the_formula(shape, scale, dtype):
    rank = min(4, *shape)
    rule, state = GaLore(rank, 100, B1, B2, EPS, scale), {}
    reference = Reference(rank, scale=scale, basis=basis_for(dtype, state))
    for g in gradients(shape, 6):
        assert_close(rule.step(torch.tensor(g, dtype=dtype), state), reference.step(g), dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [1.01, np.inf])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fira_is_the_formula(shape, limit, dtype):
    rank = min(4, *shape)
    rule, state = Fira(rank, 100, B1, B2, EPS, norm_growth_limit=limit), {}
    reference = Reference(rank, limit=limit, basis=basis_for(dtype, state))
    for g in gradients(shape, 6, growth=0.5):  # which gives the limiter something to do
        assert_close(rule.step(torch.tensor(g, dtype=dtype), state), reference.step(g), dtype)


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("limit", [None, 1.01])
def test_a_new_basis_comes_every_gap_steps_and_moments_stay(shape, limit):
    rule = GaLore(3, 2, B1, B2, EPS) if limit is None else Fira(3, 2, B1, B2, EPS, norm_growth_limit=limit)
    state, found = {}, []
    # The signs of singular vectors are nobody's convention: the reference takes the rule's, once they are checked.
    reference = Reference(3, gap=2, limit=limit, basis=lambda g, rank: state["basis"].double().numpy())
    for g in gradients(shape, 6):
        step = rule.step(single(g), state)
        assert_close(step, reference.step(g))
        found.append(state["basis"].clone())
    for index, basis in enumerate(found):
        due = gradients(shape, 6)[index - index % 2]
        overlap = np.abs(leading(due, 3).T @ basis.double().numpy())
        np.testing.assert_allclose(overlap, np.eye(3), atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_fira_adds_to_galore_what_lies_outside_of_the_subspace(shape):
    """So that without the residual it is GaLore."""
    rank, states = min(3, *shape), ({}, {})
    for g in gradients(shape, 5):
        galore, fira = (
            rule(rank, 2).step(torch.tensor(g), state) for rule, state in zip((GaLore, Fira), states, strict=True)
        )
        assert torch.equal(states[0]["basis"], states[1]["basis"])
        added, p = fira - galore, states[1]["basis"]
        inside = p.t() @ added if shape[0] < shape[1] else added @ p
        torch.testing.assert_close(inside, torch.zeros_like(inside), rtol=0, atol=1e-12 * float(fira.norm()))
        assert added.any() or rank == min(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_fira_with_full_rank_and_no_limiter_is_adam_in_a_rotated_basis(shape):
    """With P = I it is Adam itself."""
    rule = Fira(min(shape), 0, B1, B2, EPS, scale=1.0, norm_growth_limit=np.inf)
    state = {"t": 0, "age": 0, "kept": 0, "basis": torch.eye(min(shape))}
    weight = torch.nn.Parameter(torch.zeros(shape))
    adam = torch.optim.Adam([weight], lr=1.0, betas=(B1, B2), eps=EPS)
    for g in gradients(shape, 6):
        before = weight.detach().clone()
        weight.grad = single(g)
        adam.step()
        torch.testing.assert_close(rule.step(single(g), state), before - weight.detach(), rtol=1e-5, atol=1e-5)


def test_the_limiter_holds_the_growth_of_the_rest_at_its_limit():
    rule, state, norms = Fira(2, 0), {}, []
    for index, g in enumerate(gradients((8, 12), 40)):
        rule.step(single(1e6 * g if index == 20 else g), state)
        norms.append(state["rest_norm"])
    growth = [after / before for before, after in zip(norms, norms[1:], strict=False)]
    assert max(growth) == pytest.approx(1.01, rel=1e-6)
    unlimited, free = Fira(2, 0, norm_growth_limit=np.inf), {}
    norms = []
    for index, g in enumerate(gradients((8, 12), 40)):
        unlimited.step(single(1e6 * g if index == 20 else g), free)
        norms.append(free["rest_norm"])
    assert max(after / before for before, after in zip(norms, norms[1:], strict=False)) > 1.1


@pytest.mark.parametrize("tiny", [1e-18, 1e-21, 1e-30, 1e-45])
@pytest.mark.parametrize("turned", [False, True])
def test_a_column_that_is_nearly_zero_does_not_end_training(tiny, turned):
    """Its moments are not, so that the scaling factor is beyond float32; the limiter brings the step back."""
    given = [[[1, 1, 1], [0, 0, 0]], [[1, 1, 1], [0.1, 0.1, 0.1]], [[tiny, 1, 1], [0.1, 0.1, 0.1]]]
    rule, state, norms = Fira(1, 0), {}, []
    for g in (*given, *given[1:2] * 3):
        g = torch.tensor(g, dtype=torch.float32)
        step = rule.step(g.t().contiguous() if turned else g, state)
        assert torch.isfinite(step).all()
        norms.append(state.get("rest_norm"))
    assert norms[2] == pytest.approx(1.01 * norms[1]) and norms[-1] < 1.02 * norms[2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [GaLore(1), Fira(1)])
def test_a_state_holds_no_more_than_it_says(shape, rule):
    state = {}
    rule.step(single(gradients(shape, 1)[0]), state)
    held = sum(value.untyped_storage().nbytes() for value in state.values() if isinstance(value, torch.Tensor))
    assert held == rule.state_bytes(*shape)


def test_a_step_of_zero_does_not_lift_the_limit():
    rule, state = Fira(2, 0), {}
    given = [single(g) for g in gradients((8, 12), 4)]
    rule.step(given[0], state)
    before = state["rest_norm"]
    rule.step(torch.zeros(8, 12), state)
    rule.step(1e3 * given[1], state)
    assert state["rest_norm"] == pytest.approx(1.01 * before)


@pytest.mark.parametrize("norm, last, limit, factor", [(5, None, 1.01, 1), (4, 4, 1.01, 1), (9, 1, torch.inf, 1)])
def test_nothing_to_limit(norm, last, limit, factor):
    assert limited(norm, last, limit) == factor


def test_the_limit_is_the_ratio():
    assert limited(8.0, 4.0, 1.01) * 8.0 == pytest.approx(1.01 * 4.0)


@pytest.mark.parametrize("damage", ["nan", "zero", "svd"])
def test_a_basis_that_cannot_be_found_leaves_the_old_one(damage, monkeypatch):
    rule, state = GaLore(2, 1), {}
    first, second, third = map(single, gradients((6, 9), 3))
    rule.step(first, state)
    basis = state["basis"].clone()
    if damage == "svd":

        def failing(*_, **__):
            raise torch.linalg.LinAlgError("did not converge")

        with monkeypatch.context() as patched:
            patched.setattr(torch.linalg, "svd", failing)
            step = rule.step(second, state)
        assert torch.isfinite(step).all() and step.any()
    else:
        rule.step(torch.full_like(second, torch.nan if damage == "nan" else 0.0), state)
    assert torch.equal(state["basis"], basis) and state["kept"] == 1
    rule.step(third, state)
    assert not torch.equal(state["basis"], basis) and state["kept"] == 1


@pytest.mark.parametrize("value", [torch.inf, 0.0])
def test_without_any_basis_the_step_is_zero(value):
    state = {}
    assert not GaLore(2).step(torch.full((6, 9), value), state).any()
    assert "basis" not in state and state["kept"] == 1
    assert GaLore(2).step(single(gradients((6, 9), 1)[0]), state).any() and state["t"] == 1


@pytest.mark.parametrize("rule", [GaLore(3), Fira(3), Flora(Projection(0, 0, "w", 3, 9), 2)])
def test_a_state_saved_and_loaded_goes_on_bit_for_bit(rule, tmp_path):
    given = [single(g) for g in gradients((6, 9), 8)]
    state = {}
    for g in given[:4]:
        rule.step(g, state)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for g in given[4:]:
        assert torch.equal(rule.step(g, state), rule.step(g, loaded))
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == rule.state_bytes(6, 9)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_flora_is_the_formula(distribution):
    rule, state = Flora(Projection(7, 0, "w", 4, 20, distribution), 3, B1), {}
    momentum = 0.0
    for t, g in enumerate(gradients((12, 20), 8)):
        a = Projection(7, t // 3, "w", 4, 20, distribution).block().double().numpy() / 2
        if t and t % 3 == 0:
            old = Projection(7, t // 3 - 1, "w", 4, 20, distribution).block().double().numpy() / 2
            momentum = momentum @ old @ a.T
        momentum = B1 * momentum + (1 - B1) * g @ a.T
        assert_close(rule.step(single(g), state), momentum @ a)


@pytest.mark.parametrize(
    "width, rank, beta1", [(1536, 256, 0.9), (1536, 8, 0.9), (1536, 8, 0.99), (9, 9, 0.9), (9, 3, 0.0)]
)
def test_floras_momentum_falls_from_the_shortest_gap_on(width, rank, beta1):
    gap = Flora(Projection(0, 0, "w", rank, width), beta1=beta1).shortest_gap
    assert gap >= 1 and beta1**gap * math.sqrt(width / rank) < 1
    assert gap == 1 or beta1 ** (gap - 1) * math.sqrt(width / rank) >= 1


@pytest.mark.parametrize("shorter", [0, 1])
def test_below_it_momentum_grows_without_end(shorter):
    gap = Flora(Projection(0, 0, "w", 4, 400)).shortest_gap - 15 * shorter
    rule, state = Flora(Projection(0, 0, "w", 4, 400), gap), {}
    for g in gradients((6, 400), 20 * gap):
        rule.step(single(g), state)
    assert (float(state["m"].norm()) > 1e3 * np.linalg.norm(g)) == bool(shorter)
