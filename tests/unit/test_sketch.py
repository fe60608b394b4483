"""Sketches accumulated inside backward against autograd's full gradient (docs/training.md)."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy, batch, loss_of

from openrlhf_logra.config import LograConfig
from openrlhf_logra.strategies.logra import LograStrategy

NAMES = ("gate_proj", "up_proj", "down_proj")


def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    toy_options = {
        key: options.pop(key) for key in list(options) if key in ("checkpointing", "shared", "width", "inner")
    }
    model = Toy(**toy_options).to(dtype)
    oracle = copy.deepcopy(model)
    config = {"rank": 8, "target_modules": NAMES, "optimizer": "sgd", **options}
    strategy = LograStrategy(LograConfig(**config), model)
    strategy.attach()
    strategy.bind(torch.device("cpu"))
    return model, oracle, strategy


def sketches(strategy):
    return {target.name: sink.value for target, sink in zip(strategy.targets, strategy._sinks, strict=True)}


def expected_sketches(oracle, strategy):
    gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    device = torch.device("cpu")
    return {t.name: gradients[t.name].float() @ strategy._projection(t, device).t() for t in strategy.targets}


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_float32_equals_the_oracle(checkpointing, shared, distribution):
    model, oracle, strategy = build(checkpointing=checkpointing, shared=shared, distribution=distribution)
    oracle.checkpointing = None
    for seed in range(3):
        loss_of(model, batch(seed=seed)).backward()
        loss_of(oracle, batch(seed=seed)).backward()
    for name, expected in expected_sketches(oracle, strategy).items():
        assert expected.norm() > 0
        torch.testing.assert_close(
            sketches(strategy)[name], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
        )


def test_bf16_over_64_microbatches_is_accumulated_in_float32():
    """The oracle sees the same bf16 activations and output gradients, in float64."""
    model, _, strategy = build(torch.bfloat16)
    reference = {target.name: 0 for target in strategy.targets}
    inputs, handles = {}, []
    for target in strategy.targets:

        def keep_input(module, args, output, name=target.name):
            inputs[name] = args[0].detach()
            output.register_hook(lambda g, name=name: add(name, g))

        handles.append(target.module.register_forward_hook(keep_input))

    def add(name, gradient):
        x = inputs[name].flatten(0, -2).double()
        reference[name] = reference[name] + gradient.flatten(0, -2).double().t() @ x

    for seed in range(64):
        loss_of(model, batch(seed=seed)).backward()
    for target in strategy.targets:
        expected = reference[target.name] @ strategy._projection(target, torch.device("cpu")).double().t()
        error = (sketches(strategy)[target.name].double() - expected).norm() / expected.norm()
        assert error < 1e-3


def test_forward_bits_are_the_stock_ones():
    model, oracle, _ = build(torch.bfloat16)
    assert torch.equal(model(batch()), oracle(batch()))


def test_forwards_without_grad_leave_the_sketch_alone():
    model, _, strategy = build()
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    assert all(not value.any() for value in sketches(strategy).values())
    assert not strategy._projections, "no projection is drawn where no backward follows"


def test_nothing_grows_over_steps():
    model, _, strategy = build(checkpointing="non-reentrant")
    model.to(torch.bfloat16)
    sizes = set()
    for seed in range(5):
        loss_of(model, batch(seed=seed)).backward()
        strategy.step(1.0, 0.0)
        sizes.add((strategy.state_bytes, len(strategy._projections)))
    assert len(sizes) == 1


def test_masked_tokens_contribute_nothing():
    model, _, strategy = build()
    ids = batch(rows=2)
    logits = model(ids).float()
    (logits[0].logsumexp(-1).sum() + 0 * logits[1].sum()).backward()
    masked = {name: value.clone() for name, value in sketches(strategy).items()}
    for sink in strategy._sinks:
        sink.clear()
    model(ids[:1]).float().logsumexp(-1).sum().backward()
    for name, value in sketches(strategy).items():
        torch.testing.assert_close(masked[name], value, rtol=1e-5, atol=1e-6)


def test_a_silent_target_is_an_error_that_names_it():
    model, _, strategy = build()
    model.layers[1].down_proj.forward = model.layers[1].down_proj.__class__.forward.__get__(model.layers[1].down_proj)
    loss_of(model, batch()).backward()
    with pytest.raises(RuntimeError, match=r"layers\.1\.down_proj\.weight"):
        strategy.step(1.0, 0.0)


def test_detached_input_is_an_error():
    model, _, strategy = build()
    model.embed_tokens._forward_hooks.clear()  # nothing upstream of the first block requires grad
    with pytest.raises(RuntimeError):
        loss_of(model, batch()).backward()
        strategy.step(1.0, 0.0)


def test_anchor_has_zero_gradient_and_no_influence():
    model, oracle, _ = build()
    anchor = model.embed_tokens.logra_anchor
    with torch.no_grad():
        anchor.fill_(float("nan"))
    loss = loss_of(model, batch())
    loss.backward()
    assert torch.equal(loss, loss_of(oracle, batch()))
    assert torch.equal(anchor.grad, torch.zeros_like(anchor))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["embed_tokens.logra_anchor"]
    assert model._keys_to_ignore_on_save == ["embed_tokens.logra_anchor"]


class _Watch(TorchDispatchMode):
    """Collects shapes of everything that torch allocates."""

    def __init__(self):
        super().__init__()
        self.shapes = set()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not getattr(function, "is_view", False):
                inputs = [a for a in args if isinstance(a, torch.Tensor)]
                if not any(tensor.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() for a in inputs):
                    self.shapes.add(tuple(tensor.shape))
                    self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("optimizer", ["sgd", "row_adam", "adam"])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_nothing_of_the_size_of_a_weight_is_allocated(optimizer, distribution):
    """Forward, backward and step: every tensor but W itself has fewer than d x k elements."""
    width, inner = 128, 192
    model, _, strategy = build(
        torch.bfloat16, width=width, inner=inner, rank=4, optimizer=optimizer, distribution=distribution
    )
    ids = batch(rows=2, length=6)
    with _Watch() as watch:
        loss_of(model, ids).backward()
        strategy.step(1.0, 1.0)
    assert watch.elements < width * inner
    assert not {(width, inner), (inner, width)} & watch.shapes


def test_the_watch_sees_a_dense_gradient():
    _, oracle, _ = build(torch.bfloat16, width=128, inner=192, rank=4)
    with _Watch() as watch:
        loss_of(oracle, batch(rows=2, length=6)).backward()
    assert watch.elements >= 128 * 192 and {(128, 192), (192, 128)} & watch.shapes


def test_grad_norm_is_unbiased():
    """E|S|_F^2 = |G|_F^2 over projections, within four standard errors."""
    model, oracle, strategy = build()
    loss_of(oracle, batch()).backward()
    names = {target.name for target in strategy.targets}
    exact = sum(float(p.grad.square().sum()) for name, p in oracle.named_parameters() if name in names)
    values = []
    for version in range(200):
        strategy.version = version
        strategy._projections.clear()
        for sink in strategy._sinks:
            sink.clear()
        loss_of(model, batch()).backward()
        values.append(sum(float(value.square().sum()) for value in sketches(strategy).values()))
    values = torch.tensor(values, dtype=torch.float64)
    assert abs(values.mean() - exact) < 4 * values.std() / math.sqrt(len(values))


def test_reported_grad_norm_is_the_norm_of_the_sketches():
    model, _, strategy = build()
    loss_of(model, batch()).backward()
    expected = math.sqrt(sum(float(value.double().square().sum()) for value in sketches(strategy).values()))
    model.to(torch.bfloat16)
    assert strategy.step(1.0, 0.01).grad_norm == pytest.approx(expected)
