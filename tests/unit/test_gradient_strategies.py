"""GaLore, Fira and Flora as strategies: what they do with gradients, weights and states (docs/strategies.md)."""

import math

import pytest
import torch
from test_sketch import NAMES
from toy import Toy, batch, loss_of

from openrlhf_logra.config import ConfigError, LograConfig
from openrlhf_logra.math.exact import FullUpdate, apply_block
from openrlhf_logra.math.flora import Flora
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.math.subspace import Fira, GaLore
from openrlhf_logra.strategies import strategy_class
from openrlhf_logra.strategies.logra import LograStrategy
from openrlhf_logra.train.coverage import render

METHODS = ("galore", "fira", "flora")


def build(method, dtype=torch.bfloat16, toy=None, **options):
    torch.manual_seed(0)
    model = Toy(**(toy or {})).to(dtype)
    config = LograConfig(method=method, **{"rank": 8, "target_modules": NAMES, **options})
    strategy = strategy_class(method)(config, model)
    strategy.attach()
    strategy.bind(torch.device("cpu"))
    return model, strategy


def weights(strategy):
    return [target.weight.detach().clone() for target in strategy.targets]


@pytest.mark.parametrize(
    "toy", [{}, {"checkpointing": "reentrant"}, {"checkpointing": "non-reentrant", "shared": True}]
)
def test_the_gradient_is_autograds(toy):
    model, strategy = build("galore", torch.float32, toy)
    oracle = Toy(**{**toy, "checkpointing": None})
    oracle.load_state_dict(model.state_dict(), strict=False)
    for seed in range(3):
        loss_of(model, batch(seed=seed)).backward()
        loss_of(oracle, batch(seed=seed)).backward()
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    for target, sink in zip(strategy.targets, strategy._sinks, strict=True):
        torch.testing.assert_close(sink.value, expected[target.name], rtol=1e-5, atol=1e-7)


def test_floras_sketch_is_logras():
    """Of one update, for the same seed: LoGRA's S, formed inside backward, and Flora's G A^T."""
    model, strategy = build("flora", torch.float32, beta1=0.0)
    torch.manual_seed(0)
    sketched = Toy()
    config = LograConfig(rank=8, target_modules=NAMES)
    logra = LograStrategy(config, sketched)
    logra.attach()
    logra.bind(torch.device("cpu"))
    loss_of(model, batch()).backward()
    loss_of(sketched, batch()).backward()
    strategy.propose(0.0)
    for index, sink in enumerate(logra._sinks):
        found = strategy._states[index]["m"]
        torch.testing.assert_close(found, sink.value, rtol=1e-5, atol=1e-6 * float(sink.value.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_weights_move_by_the_rules_step_times_the_learning_rate(method, rounding):
    model, strategy = build(method, rounding=rounding)
    before = weights(strategy)
    loss_of(model, batch()).backward()
    gradients = [sink.value.clone() for sink in strategy._sinks]
    outcome = strategy.step(1e-2, 0.0)
    assert outcome.version == strategy.version == 1 and outcome.alpha == 1e-2 and not outcome.updates
    moved = weight = 0.0
    for index, (target, gradient) in enumerate(zip(strategy.targets, gradients, strict=True)):
        step = strategy.make_rule(target).step(gradient, {}) * 1e-2
        apply_block(before[index], FullUpdate(target.name, strategy.config.seed, 0, step, rounding))
        assert torch.equal(before[index], target.weight)
        moved += float(step.square().sum())
        weight += float(weights(strategy)[index].float().square().sum())
    assert outcome.update_ratio == pytest.approx(math.sqrt(moved / weight), rel=1e-2)
    assert outcome.grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in gradients)), rel=1e-6)
    assert not any(sink.value.any() for sink in strategy._sinks)


def test_rules_are_the_flags():
    flags = {"beta1": 0.8, "beta2": 0.7, "eps": 1e-4, "refresh_every": 70, "seed": 5, "rank": 3}
    adam = {"rank": 3, "update_gap": 70, "beta1": 0.8, "beta2": 0.7, "eps": 1e-4}
    _, galore = build("galore", **flags)
    assert set(galore._rules) == {GaLore(**adam)}
    _, fira = build("fira", **flags, norm_growth_limit=2.0)
    assert set(fira._rules) == {Fira(**adam, norm_growth_limit=2.0)}
    _, flora = build("flora", **flags, distribution="gaussian")
    drawn = [Projection(5, 0, target.name, 3, target.width, "gaussian") for target in flora.targets]
    assert flora._rules == [Flora(projection, 70, 0.8) for projection in drawn]


@pytest.mark.parametrize("method", METHODS)
def test_the_step_size_is_the_learning_rate(method):
    assert build(method)[1].scheduled(2e-3, 1e-2) == 2e-3


def test_flora_refuses_draws_at_which_momentum_would_grow():
    with pytest.raises(ConfigError, match="--logra.refresh_every 1: the momentum of layers.* take at least 8, 0"):
        build("flora", refresh_every=1)
    assert [build("flora", refresh_every=every)[1].config.refresh_every for every in (0, 8)] == [0, 8]


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls(method):
    model, strategy = build(method, refresh_every=8)
    rate = 0.5 if method == "flora" else 1e-2
    losses = []
    for _ in range(30):
        loss = loss_of(model, batch())
        loss.backward()
        losses.append(float(loss))
        strategy.step(rate, 0.0)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("method", METHODS)
def test_clipping_scales_all_gradients_by_one_factor(method):
    given = []
    for max_norm in (0.0, 0.01):
        model, strategy = build(method, torch.float32)
        loss_of(model, batch()).backward()
        proposal = strategy.propose(max_norm, dense_norm=3.0)
        given.append([state["m"].clone() for state in strategy._states.values()])
    for free, clipped in zip(*given, strict=True):
        torch.testing.assert_close(clipped, free * (0.01 / proposal.grad_norm), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(method, value):
    model, strategy = build(method)
    loss_of(model, batch()).backward()
    strategy.step(1e-2, 0.0)
    before, state = weights(strategy), strategy.state_dict()["rules"][strategy.targets[0].name]["m"].clone()
    loss_of(model, batch()).backward()
    strategy._sinks[1].value[0, 0] = value
    outcome = strategy.step(1e-2, 0.0)
    assert outcome.skipped and outcome.version == strategy.version == 1
    assert all(torch.equal(old, new) for old, new in zip(before, weights(strategy), strict=True))
    assert torch.equal(strategy._states[0]["m"], state)
    assert not any(sink.value.any() or sink.contributions for sink in strategy._sinks)


@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_exact(method, tmp_path):
    model, strategy = build(method, refresh_every=3, beta1=0.5)
    for seed in range(4):
        loss_of(model, batch(seed=seed)).backward()
        strategy.step(1e-2, 0.0)
    torch.save({"ours": strategy.state_dict(), "model": model.state_dict()}, tmp_path / "checkpoint.pt")
    resumed, again = build(method, refresh_every=3, beta1=0.5)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["ours"])
    for seed in range(4, 8):
        for one, its in ((model, strategy), (resumed, again)):
            loss_of(one, batch(seed=seed)).backward()
            its.step(1e-2, 0.0)
    assert again.version == strategy.version == 8
    assert all(torch.equal(a, b) for a, b in zip(weights(strategy), weights(again), strict=True))


@pytest.mark.parametrize("damage", ["nan", "nan number", "missing"])
def test_a_damaged_state_is_refused(damage):
    model, strategy = build("fira")
    loss_of(model, batch()).backward()
    strategy.step(1e-2, 0.0)
    saved, name = strategy.state_dict(), strategy.targets[1].name
    if damage == "nan":
        saved["rules"][name]["m"][0, 0] = math.nan
    elif damage == "nan number":
        saved["rules"][name]["rest_norm"] = math.nan
    else:
        del saved["rules"][name]
    with pytest.raises(ConfigError, match=name):
        build("fira")[1].load_state_dict(saved)


class Odd:
    """A rule of somebody else's whose steps are what it is told."""

    def __init__(self, step):
        self.step = lambda gradient, state: step(gradient)

    def state_bytes(self, rows, cols):
        return 0


@pytest.mark.parametrize(
    "step",
    [
        lambda g: g.sum(0),
        lambda g: g.sum(1, keepdim=True),
        lambda g: 1.0,
        lambda g: g > 0,
        lambda g: g.to(torch.complex64),
        lambda g: g.t(),
        lambda g: None,
    ],
)
def test_a_rule_that_gives_no_step_is_named(step):
    model, strategy = build("galore")
    strategy._rules = [Odd(step)] * len(strategy.targets)
    loss_of(model, batch()).backward()
    with pytest.raises(TypeError, match="layers.0.up_proj.weight must be floating-point"):
        strategy.step(1e-2, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rules_step_that_is_not_finite_is_not_taken(value):
    model, strategy = build("galore")
    good = Odd(lambda g: g)
    strategy._rules = [good, Odd(lambda g: g * value), *[good] * (len(strategy.targets) - 2)]
    before = weights(strategy)
    loss_of(model, batch()).backward()
    assert strategy.step(1e-2, 0.0).skipped and strategy.version == 0
    assert all(torch.equal(old, new) for old, new in zip(before, weights(strategy), strict=True))
    strategy._rules = [good] * len(strategy.targets)
    loss_of(model, batch()).backward()
    assert not strategy.step(1e-2, 0.0).skipped


def test_a_rule_may_keep_its_gradient():
    model, strategy = build("galore")
    kept = []
    strategy._rules = [Odd(lambda g: kept.append((g, g.clone())) or g)] * len(strategy.targets)
    loss_of(model, batch()).backward()
    strategy.step(1e-2, 0.0)
    assert kept and all(torch.equal(given, copied) for given, copied in kept)


@pytest.mark.parametrize("method", ["logra", *METHODS])
def test_no_backward_pass_between_proposal_and_step(method):
    model, strategy = build(method)
    loss_of(model, batch()).backward()
    proposal = strategy.propose(0.0)
    with pytest.raises(RuntimeError, match="while an update is being decided"):
        loss_of(model, batch(seed=9)).backward()
    strategy.commit(proposal, 1e-3)
    loss_of(model, batch(seed=9)).backward()
    assert not strategy.step(1e-3, 0.0).skipped


@pytest.mark.parametrize("method", ["logra", *METHODS])
@pytest.mark.parametrize("alpha", [1e43, math.inf, math.nan])
def test_a_size_beyond_float32_is_not_taken(method, alpha):
    model, strategy = build(method)
    before = weights(strategy)
    loss_of(model, batch()).backward()
    outcome = strategy.step(alpha, 0.0)
    assert outcome.skipped and outcome.version == 0
    assert all(torch.equal(old, new) for old, new in zip(before, weights(strategy), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_the_table_says_what_is_kept(method):
    model, strategy = build(method)
    loss_of(model, batch()).backward()
    strategy.step(1e-2, 0.0)
    table = strategy.coverage()
    assert strategy.state_bytes == table.state == table.sink + table.moments
    assert table.sink == 4 * table.sketched
    assert "gradient" in render(table) and "changed elements" in render(table)


def test_a_failed_svd_is_counted_and_told_once(monkeypatch):
    model, strategy = build("galore", refresh_every=1)
    loss_of(model, batch()).backward()
    assert strategy.step(1e-3, 0.0).metrics == {"logra/kept_bases": 0}

    def failing(*_, **__):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", failing)
    notices = []
    for _ in range(2):
        loss_of(model, batch()).backward()
        outcome = strategy.step(1e-3, 0.0)
        assert outcome.metrics == {"logra/kept_bases": len(strategy.targets)}
        notices.append(outcome.notice)
    assert "logra/kept_bases" in notices[0] and notices[1] is None
    saved = strategy.state_dict()
    monkeypatch.undo()
    model, resumed = build("galore", refresh_every=1)
    resumed.load_state_dict(saved)
    loss_of(model, batch()).backward()
    outcome = resumed.step(1e-3, 0.0)
    assert outcome.metrics == {"logra/kept_bases": 0} and outcome.notice is None


@pytest.mark.parametrize("method", ["galore", "fira"])
def test_a_rank_above_the_smaller_side_is_refused(method):
    with pytest.raises(ConfigError, match="--logra.rank 25 is above the smaller side 24 .* 24"):
        build(method, rank=25)


def test_logras_norm_growth_limit():
    """Each update's norm at most 1.01 times the last one's, however alpha jumps; unlimited, it jumps with alpha."""
    for limit, most in ((1.01, 1.01), (math.inf, 8.0)):
        model, strategy = build("logra", norm_growth_limit=limit)
        ratios = []
        for alpha in (1.0, 0.5, 0.0, 4.0, 4.0, 1.0):
            loss_of(model, batch()).backward()
            outcome = strategy.step(alpha, 0.0)
            ratios.append(outcome.update_ratio)
            assert outcome.alpha <= alpha
        taken = [ratio for ratio in ratios if ratio]
        growth = [after / before for before, after in zip(taken, taken[1:], strict=False)]
        assert len(taken) == 5 and max(growth) == pytest.approx(most, rel=1e-4)
    again = build("logra", norm_growth_limit=1.01)[1]
    again.load_state_dict({**strategy.state_dict(), "config": again.state_dict()["config"]})
    assert again._last_ratio == strategy._last_ratio
