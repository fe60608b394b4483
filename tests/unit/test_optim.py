"""FiraAdamW and GaLoreAdamW in a plain training script (docs/strategies.md)."""

import copy
import math
import re
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
@pytest.mark.parametrize(
    "constants", [{}, {"scale": 0.5, "betas": (0.8, 0.95), "eps": 1e-3, "norm_growth_limit": 1.5}]
)
def test_steps_are_the_rules(optimizer, weight_decay, constants):
    torch.manual_seed(0)
    model = Toy()
    groups = divide_params(model, NAMES, 4, 3, **({"scale": constants["scale"]} if constants else {}))
    adam = {name: constants[name] for name in ("betas", "eps") if constants}
    beta1, beta2 = adam.get("betas", (0.9, 0.999))
    expected = {"beta1": beta1, "beta2": beta2, "eps": adam.get("eps", 1e-8), "scale": constants.get("scale", 0.25)}
    if constants and optimizer is FiraAdamW:
        groups[0]["norm_growth_limit"] = expected["norm_growth_limit"] = constants["norm_growth_limit"]
    ours = optimizer(groups, lr=1e-2, weight_decay=weight_decay, **adam)
    rule, states = RULES[optimizer](4, 3, **expected), {}
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
    with pytest.warns(UserWarning, match=f"{optimizer.__name__}: no group has a rank, .* divide_params") as caught:
        ours = optimizer(model.parameters(), **options)
    assert caught[0].filename == __file__
    train(model, ours, range(4))
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


def test_layer_by_layer_asked_for_twice_is_once():
    (model, ours), (other, whole) = build(FiraAdamW), build(FiraAdamW)
    ours.update_in_backward()
    ours.update_in_backward()
    loss_of(model, batch()).backward()
    train(other, whole, [0])
    assert same(model, other)


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
    [
        *(("rank", value) for value in (0, -1, 2.5, "8", None)),
        *(("update_gap", value) for value in (-1, 2.5, None)),
        *(("scale", value) for value in (-1.0, math.nan, "x")),
        *(("norm_growth_limit", value) for value in (0.5, math.nan)),
        *(("lr", value) for value in (-1, math.nan, math.inf, None, "1")),
        *(("betas", value) for value in ((0.9, 1.0), (0.9,), 0.9)),
        *((name, value) for name in ("eps", "weight_decay") for value in (-1, math.inf)),
    ],
)
def test_groups_out_of_range_are_named(name, value):
    groups = divide_params(Toy(), NAMES, 4)
    groups[0][name] = value
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}")):
        FiraAdamW(groups)


@pytest.mark.parametrize("shape, dtype", [((8,), None), ((4, 6, 3), None), ((), None), ((4, 6), torch.complex64)])
def test_what_is_no_real_matrix_has_no_rank(shape, dtype):
    _, optimizer = build(FiraAdamW)
    with pytest.raises(ValueError, match=re.escape(f"of shape {shape}; only real matrices")):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(shape, dtype=dtype))], "rank": 2})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rank": 2, "update_proj_gap": 50}, "'update_proj_gap': call it update_gap"),
        ({"rank": 2, "proj_type": "std"}, "'proj_type': the smaller side is projected; drop it"),
        ({"update_gap": 50}, "'update_gap': give the group a rank, or drop it"),
        ({"norm_growth_limit": 1.1}, "'norm_growth_limit': give the group a rank, or drop it"),
    ],
)
def test_values_of_a_group_that_have_no_effect_are_refused(optimizer, changes, words):
    with pytest.raises(ValueError, match=f"{optimizer.__name__} makes no use of a group's {words}"):
        optimizer([{"params": Toy().layers[0].up_proj.weight, **changes}])


def test_a_limit_is_firas_alone():
    groups = divide_params(Toy(), NAMES, 4)
    groups[0]["norm_growth_limit"] = 1.1
    FiraAdamW(groups)
    with pytest.raises(ValueError, match="GaLoreAdamW makes no use of a group's 'norm_growth_limit': drop it"):
        GaLoreAdamW(groups)


@pytest.mark.parametrize("optimizer", RULES)
def test_keys_of_the_users_own_stay(optimizer):
    """As torch leaves them, for schedulers and loggers that read them."""
    groups = [{**group, "name": "mine", "initial_lr": 0.1} for group in divide_params(Toy(), NAMES, 4)]
    assert [group["name"] for group in optimizer(groups).param_groups] == ["mine", "mine"]


def test_groups_of_one_optimizer_make_another():
    groups = divide_params(Toy(), NAMES, 4)
    FiraAdamW(groups)
    assert {group["rule"] for group in GaLoreAdamW(groups).state_dict()["param_groups"]} == {"GaLore"}


@pytest.mark.filterwarnings("ignore:.*no group has a rank")
@pytest.mark.parametrize("group", [{}, {"rank": 2}])
def test_sparse_gradients_are_refused(group):
    table = torch.nn.Embedding(6, 4, sparse=True)
    optimizer = FiraAdamW([{"params": table.parameters(), **group}])
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        optimizer.step()


def test_float64_weights_keep_their_bits_where_nothing_moves():
    model, optimizer = build(FiraAdamW, torch.float64, lr=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 1e-12)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    assert same(model, before)


@pytest.mark.parametrize("other", ["torch", "galore", "rank", "shapes"])
def test_the_state_of_something_else_is_refused(other):
    model, ours = build(FiraAdamW)
    groups = divide_params(model, NAMES, 4)
    others = {
        "torch": lambda: torch.optim.AdamW([{"params": group["params"]} for group in groups]),
        "galore": lambda: GaLoreAdamW(groups),
        "rank": lambda: FiraAdamW(divide_params(model, NAMES, 2)),
        "shapes": lambda: FiraAdamW([{**groups[0], "params": groups[0]["params"][::-1]}, groups[1]]),
    }
    saved = others[other]()
    train(model, saved, [0])
    words = {"torch": "rule of group 0 is None", "galore": "rule of group 0 is GaLore", "rank": "rank of group 0 is 2"}
    with pytest.raises(ValueError, match=words.get(other, "parameter 0 of group 0 has moments")):
        ours.load_state_dict(saved.state_dict())
    assert not ours.state


@pytest.mark.parametrize(
    "saved_of, words",
    [
        (lambda: divide_params(Toy(layers=3), NAMES, 4), "group 0 has 9 parameters in the state and 6 here"),
        (lambda: divide_params(Toy(layers=1), NAMES, 4), "group 0 has 3 parameters in the state and 6 here"),
        (lambda: divide_params(Toy(), NAMES, 4)[:1], "parameter groups are 1 in the state and 2 here"),
    ],
)
def test_the_state_of_another_model_is_refused(saved_of, words):
    ours = build(FiraAdamW)[1]
    with pytest.raises(ValueError, match=f"load_state_dict: {words}"):
        ours.load_state_dict(FiraAdamW(saved_of()).state_dict())


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
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps step
    with pytest.warns(UserWarning, match="no new basis for a matrix") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    optimizer.update_in_backward()
    with pytest.warns(UserWarning, match="no new basis for a matrix") as caught:
        (model.layers[0].up_proj.weight.sum() * 0).backward()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = build(GaLoreAdamW)
        train(model, optimizer, [0])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: divide_params(Toy(), ["q_proj"], 4), "q_proj"),
        (lambda: divide_params(Toy(), ["LayerNorm"], 4), "LayerNorm"),
        (lambda: divide_params(Toy(), "Embedding", 4), "one that an embedding shares does not count"),
        (lambda: divide_params(Toy(), [], 4), "target_modules_list is empty"),
        (lambda: divide_params(Toy(), NAMES, 0), "rank is 0; it must be an integer of at least 1"),
        (lambda: divide_params(Toy(), NAMES, 4, update_gap=-1), "update_gap is -1; it must be 0"),
        (lambda: divide_params(Toy(), NAMES, 4, scale=0), "scale is 0; it must be a positive number"),
        (lambda: FiraAdamW(Toy().parameters(), lr=-1), "lr is -1; it must be a number of at least 0"),
        (lambda: FiraAdamW(Toy().parameters(), betas=(0.9, 1.0)), "betas"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
