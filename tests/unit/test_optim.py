"""FiraAdamW and GaLoreAdamW in a plain training script (spec section 12)."""

import copy
import math
import warnings

import pytest
import torch
from toy import Toy, batch, loss_of

from openrlhf_logra.math.subspace import Fira, GaLore
from openrlhf_logra.optim import FiraAdamW, GaLoreAdamW, divide_params

RULES = {GaLoreAdamW: GaLore, FiraAdamW: Fira}
NAMES = ["gate_proj", "up_proj", "down_proj"]


def build(optimizer, dtype=torch.float32, names=NAMES, gap=3, **options):
    torch.manual_seed(0)
    model = Toy().to(dtype)
    return model, optimizer(divide_params(model, names, 4, update_gap=gap), **{"lr": 1e-2, **options})


def train(model, optimizer, steps):
    losses = []
    for seed in steps:
        loss = loss_of(model, batch(seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_two_lines_of_the_article():
    model = Toy()
    groups = divide_params(model, target_modules_list=["Linear"], rank=8)
    optimizer = FiraAdamW(groups, lr=0.01)
    matrices = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert len(groups[0]["params"]) == matrices == 7 and groups[0]["rank"] == 8
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    losses = train(model, optimizer, [0] * 30)
    assert losses[-1] < losses[0] - 0.5


def test_a_tied_head_is_left_to_adamw():
    model = Toy()
    model.lm_head.weight = model.embed_tokens.weight
    groups = divide_params(model, "Linear", 8)
    assert len(groups[0]["params"]) == 6
    assert any(parameter is model.embed_tokens.weight for parameter in groups[1]["params"])


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_the_rules(optimizer, weight_decay):
    model, ours = build(optimizer, weight_decay=weight_decay)
    rule, states = RULES[optimizer](4, 3), {}
    for seed in range(5):
        before = copy.deepcopy(dict(model.named_parameters()))
        loss_of(model, batch(seed=seed)).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        ours.step()
        ours.zero_grad()
        for name, parameter in model.named_parameters():
            if any(f"{key}.weight" in name for key in NAMES):
                step = rule.step(gradients[name], states.setdefault(name, {}))
                expected = before[name] * (1 - 1e-2 * weight_decay) - 1e-2 * step
                torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", RULES)
def test_what_has_no_rank_is_torchs_adamw(optimizer):
    torch.manual_seed(0)
    model = Toy()
    oracle = copy.deepcopy(model)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    train(model, optimizer(model.parameters(), **options), range(4))
    train(oracle, torch.optim.AdamW(oracle.parameters(), **options, foreach=False), range(4))
    assert same(model, oracle)


@pytest.mark.parametrize("optimizer", RULES)
def test_layer_by_layer_is_the_same_and_frees_gradients(optimizer):
    (model, ours), (other, whole) = build(optimizer), build(optimizer)
    handles = ours.update_in_backward()
    for seed in range(4):
        loss_of(model, batch(seed=seed)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    train(other, whole, range(4))
    assert same(model, other)
    for handle in handles:
        handle.remove()
    loss_of(model, batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()) and same(model, other)


def test_layer_by_layer_refuses_several_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="use step"):
        build(FiraAdamW)[1].update_in_backward()


def test_layer_by_layer_takes_the_rates_of_a_loaded_state():
    model, optimizer = build(FiraAdamW)
    optimizer.update_in_backward()
    loss_of(model, batch()).backward()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model)
    loss_of(model, batch()).backward()
    assert same(model, before)


@pytest.mark.parametrize(
    "name, value",
    [("rank", 0), ("rank", -1), ("update_gap", -1), ("scale", -1.0), ("scale", math.nan), ("norm_growth_limit", 0.5)],
)
def test_groups_out_of_range_are_named(name, value):
    groups = divide_params(Toy(), NAMES, 4)
    groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        FiraAdamW(groups)


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(optimizer, dtype, tmp_path):
    model, ours = build(optimizer, dtype)
    train(model, ours, range(4))
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other, again = build(optimizer, dtype)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(model, ours, range(4, 8))
    train(other, again, range(4, 8))
    assert same(model, other)
    low_rank = [again.state[parameter] for parameter in again.param_groups[0]["params"]]
    assert all(state["m"].dtype == torch.float32 for state in low_rank)


def test_a_rank_above_a_side_is_that_side():
    model = torch.nn.Linear(3, 50, bias=False)
    optimizer = GaLoreAdamW(divide_params(model, ["Linear"], 16))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["basis"].shape == (3, 3)


def test_a_basis_that_cannot_be_found_is_warned_of():
    model, optimizer = build(GaLoreAdamW, gap=1)
    train(model, optimizer, [0])
    model.layers[0].up_proj.weight.grad = torch.full_like(model.layers[0].up_proj.weight, torch.nan)
    with pytest.warns(UserWarning, match="no new basis for a matrix"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = build(GaLoreAdamW)
        train(model, optimizer, [0])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: divide_params(Toy(), ["q_proj"], 4), "q_proj"),
        (lambda: divide_params(Toy(), ["LayerNorm"], 4), "LayerNorm"),
        (lambda: FiraAdamW(Toy().parameters(), lr=-1), "lr is -1"),
        (lambda: FiraAdamW(Toy().parameters(), betas=(0.9, 1.0)), "betas"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
