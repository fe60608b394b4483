"""The step at an accumulation boundary: update ratio, clipping, skipping, refresh, state."""

import copy
import math

import pytest
import torch
from test_sketch import build, sketches
from toy import batch, loss_of

from openrlhf_logra.config import ConfigError
from openrlhf_logra.math.direction import DirectionConfig, make_direction, squared_norm_of_product
from openrlhf_logra.math.exact import apply_block
from openrlhf_logra.strategies.logra import LograStrategy


def weights(strategy):
    return {target.name: target.weight.detach().clone() for target in strategy.targets}


@pytest.mark.parametrize("optimizer", ["sgd", "row_adam", "adam"])
def test_the_step_has_the_asked_relative_norm(optimizer):
    model, _, strategy = build(optimizer=optimizer, update_ratio=1e-2)
    loss_of(model, batch()).backward()
    model.to(torch.bfloat16)
    before = weights(strategy)
    outcome = strategy.step(0.5, 0.0)
    step, weight = 0.0, 0.0
    for target, update in zip(strategy.targets, outcome.updates, strict=True):
        product = (update.s[:, None] * update.q.float()) @ update.projection.block()
        step += float(product.square().sum())
        weight += float(before[target.name].float().square().sum())
    assert math.sqrt(step / weight) == pytest.approx(0.5e-2, rel=1e-4)
    assert outcome.update_ratio == pytest.approx(0.5e-2, rel=1e-6)


def test_weights_move_by_what_the_updates_say():
    model, _, strategy = build()
    loss_of(model, batch()).backward()
    model.to(torch.bfloat16)
    before = weights(strategy)
    outcome = strategy.step(1.0, 0.0)
    assert outcome.version == strategy.version == 1
    for target, update in zip(strategy.targets, outcome.updates, strict=True):
        apply_block(before[target.name], update)
        assert torch.equal(before[target.name], target.weight)


def test_sgd_follows_the_gradient():
    """Over many projections the mean step is along the gradient: the loss falls."""
    model, _, strategy = build(update_ratio=2e-2)
    model.to(torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = loss_of(model, batch())
        loss.backward()
        losses.append(float(loss))
        strategy.step(1.0, 0.0)
    assert losses[-1] < losses[0] - 0.1


def test_clipping_scales_all_sketches_by_one_factor():
    model, _, strategy = build(optimizer="row_adam")
    loss_of(model, batch()).backward()
    before = {name: value.clone() for name, value in sketches(strategy).items()}
    norm = math.sqrt(sum(float(v.double().square().sum()) for v in before.values()))
    seen = []
    for direction in strategy._directions:
        step = direction.step
        direction.step = lambda sketch, index, step=step: (seen.append(sketch.clone()), step(sketch, index))[1]
    model.to(torch.bfloat16)
    strategy.step(1.0, norm / 4)
    for clipped, original in zip(seen, before.values(), strict=True):
        torch.testing.assert_close(clipped, original / 4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e25])
def test_a_non_finite_sketch_skips_the_update(poison):
    model, _, strategy = build(optimizer="adam")
    model.to(torch.bfloat16)
    loss_of(model, batch()).backward()
    strategy.step(1.0, 0.0)
    state, before = copy.deepcopy(strategy.state_dict()), weights(strategy)
    loss_of(model, batch(seed=1)).backward()
    strategy._sinks[2].value[1, 1] = poison
    outcome = strategy.step(1.0, 1.0)
    assert outcome.skipped and outcome.updates == () and outcome.version == 1 and outcome.alpha == 0
    assert all(torch.equal(before[name], weight) for name, weight in weights(strategy).items())
    for name, direction in strategy.state_dict()["directions"].items():
        assert all(
            torch.equal(torch.as_tensor(direction[k]), torch.as_tensor(v))
            for k, v in state["directions"][name].items()
        )
    loss_of(model, batch(seed=2)).backward()
    assert not strategy.step(1.0, 1.0).skipped, "training goes on"


def test_alpha_zero_changes_no_bit():
    model, _, strategy = build()
    model.to(torch.bfloat16)
    before = weights(strategy)
    loss_of(model, batch()).backward()
    outcome = strategy.step(0.0, 0.0)
    assert outcome.version == 1 and all(torch.equal(before[n], w) for n, w in weights(strategy).items())


@pytest.mark.parametrize(
    "optimizer, refresh_every, expected", [("adam", None, 20), ("sgd", None, 1), ("row_adam", 3, 3), ("sgd", 0, 0)]
)
def test_refresh(optimizer, refresh_every, expected):
    model, _, strategy = build(optimizer=optimizer, refresh_every=refresh_every)
    assert strategy.config.refresh_every == expected
    model.to(torch.bfloat16)
    indices = []
    for seed in range(4):
        loss_of(model, batch(seed=seed)).backward()
        indices.append(strategy.step(1.0, 0.0).updates[0].projection.index)
    assert indices == [t // expected if expected else 0 for t in range(4)]


@pytest.mark.parametrize("optimizer", ["sgd", "row_adam", "adam"])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_resume_is_bit_exact(optimizer, distribution, tmp_path):
    def fresh():
        model, _, strategy = build(torch.bfloat16, optimizer=optimizer, distribution=distribution, refresh_every=2)
        return model, strategy

    def train(model, strategy, seeds):
        for seed in seeds:
            loss_of(model, batch(seed=seed)).backward()
            strategy.step(0.7, 1.0)

    model, strategy = fresh()
    train(model, strategy, range(3))
    torch.save({"model": model.state_dict(), "logra": strategy.state_dict()}, tmp_path / "checkpoint.pt")
    train(model, strategy, range(3, 6))

    resumed, again = fresh()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["logra"])
    train(resumed, again, range(3, 6))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_resume_with_another_configuration_names_the_flags():
    _, _, strategy = build()
    _, _, other = build(rank=4, seed=7)
    with pytest.raises(ConfigError, match=r"rank: 8 -> 4.*seed: 42 -> 7|seed: 42 -> 7.*rank: 8 -> 4"):
        other.load_state_dict(strategy.state_dict())
    _, _, free = build(sync_mode="dense", sync_verify_every=1)
    free.load_state_dict(strategy.state_dict())


# ---- directions against the formulas


def reference_row_adam(sketches, beta2, eps):
    v = torch.zeros(sketches[0].shape[0], dtype=torch.float64)
    for t, s in enumerate(sketches, 1):
        s = s.double()
        v = beta2 * v + (1 - beta2) * s.square().mean(1)
        root = (v / (1 - beta2**t)).sqrt()
        scale = 1 / (root + eps * root.mean())
        scale = scale / scale.square().mean().sqrt()
        update = scale[:, None] * s
        update = update * s.norm() / update.norm()
    return update


def reference_adam(sketches, beta1, beta2, eps):
    m = v = torch.zeros_like(sketches[0], dtype=torch.float64)
    for t, s in enumerate(sketches, 1):
        s = s.double()
        m = beta1 * m + (1 - beta1) * s
        v = beta2 * v + (1 - beta2) * s.square()
        root = (v / (1 - beta2**t)).sqrt()
        update = m / (1 - beta1**t) / (root + eps * root.square().mean().sqrt())
    return update


@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e8])
def test_directions_equal_their_formulas(magnitude):
    draws = [torch.randn(12, 8, generator=torch.Generator().manual_seed(i)) * magnitude for i in range(5)]
    row_adam = make_direction(DirectionConfig("row_adam", 0.9, 0.95, 1e-8), 12, 8)
    adam = make_direction(DirectionConfig("adam", 0.9, 0.95, 1e-8), 12, 8)
    for draw in draws:
        by_row, by_element = row_adam.step(draw, 0), adam.step(draw, 0)
    torch.testing.assert_close(by_row.double(), reference_row_adam(draws, 0.95, 1e-8), rtol=1e-4, atol=0)
    torch.testing.assert_close(by_element.double(), reference_adam(draws, 0.9, 0.95, 1e-8), rtol=1e-3, atol=1e-4)
    assert by_row.norm() == pytest.approx(float(draws[-1].norm()), rel=1e-5)


@pytest.mark.parametrize("magnitude", [1e-12, 1.0])
def test_row_adam_with_rows_that_never_had_a_gradient(magnitude):
    direction = make_direction(DirectionConfig("row_adam", 0.9, 0.95, 1e-8), 6, 4)
    sketch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * magnitude
    sketch[2:5] = 0
    update = direction.step(sketch, 0)
    assert torch.isfinite(update).all() and not update[2:5].any()
    assert update.norm() == pytest.approx(float(sketch.norm()), rel=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "row_adam", "adam"])
def test_an_all_zero_sketch_gives_no_update(optimizer):
    direction = make_direction(DirectionConfig(optimizer, 0.9, 0.95, 1e-8), 5, 4)
    assert not direction.step(torch.zeros(5, 4), 0).any()


def test_adam_restarts_with_a_new_projection():
    config = DirectionConfig("adam", 0.9, 0.95, 1e-8)
    used, fresh = make_direction(config, 5, 4), make_direction(config, 5, 4)
    used.step(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), 0)
    sketch = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(used.step(sketch, 1), fresh.step(sketch, 0))


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="sgd, row_adam, adam"):
        make_direction(DirectionConfig("lion", 0.9, 0.95, 1e-8), 5, 4)


def test_gram_norm_equals_the_dense_norm():
    u = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    a = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    assert squared_norm_of_product(u, a) == pytest.approx(float((u @ a).square().sum()), rel=1e-5)


def test_a_weight_that_is_not_finite_skips_the_update():
    model, _, strategy = build(torch.bfloat16)
    with torch.no_grad():
        strategy.targets[1].weight[0, 0] = float("inf")
    loss_of(model, batch()).backward()
    for sink in strategy._sinks:
        sink.value.nan_to_num_(0.0, 0.0, 0.0)
    assert strategy.step(1.0, 1.0).skipped and strategy.version == 0


def test_damaged_moments_are_refused():
    _, _, strategy = build(optimizer="row_adam")
    state = copy.deepcopy(strategy.state_dict())
    name = strategy.targets[0].name
    for damaged in (torch.full_like(state["directions"][name]["v"], float("nan")), torch.ones(1)):
        state["directions"][name]["v"] = damaged
        with pytest.raises(ValueError, match="moment v is damaged"):
            strategy.load_state_dict(state)


def test_zero_gradients_step_nowhere():
    model, _, strategy = build(torch.bfloat16)
    before = weights(strategy)
    (0 * loss_of(model, batch())).backward()
    outcome = strategy.step(1.0, 1.0)
    assert not outcome.skipped and outcome.grad_norm == 0 and outcome.update_ratio == 0
    assert all(torch.equal(before[n], w) for n, w in weights(strategy).items())


def test_state_bytes_equal_the_coverage_table():
    for optimizer in ("sgd", "row_adam", "adam"):
        model, oracle, strategy = build(torch.bfloat16, optimizer=optimizer)
        table = LograStrategy(strategy.config, oracle).coverage()
        loss_of(model, batch()).backward()
        assert strategy.state_bytes == table.state
