"""Predicted KL against the truth, and the controller (docs/kl.md)."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from openrlhf_logra.config import LograConfig
from openrlhf_logra.math.kl import KLController, KLSettings, kl_divergence, rate_variance
from openrlhf_logra.math.projection import Projection
from openrlhf_logra.math.sketch import side_linear, side_rate
from openrlhf_logra.strategies.logra import LograStrategy
from openrlhf_logra.train.kl_control import PROBE_KL
from openrlhf_logra.train.probe import Probe, ProbeBatch

TEMPERATURE = 0.7
COMMON = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,
}
FAMILIES = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    "Llama": {"attention_bias": True},
    "Gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
}


class Policy:
    """A random model whose targets follow a random low-rank direction, and its probe."""

    def __init__(self, family: str, dtype: torch.dtype, attention: str = "sdpa"):
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]})
        model_class = getattr(transformers, f"{family}ForCausalLM")
        self.model = model_class._from_config(config, attn_implementation=attention, dtype=dtype).eval()
        self.direction = None
        self.targets = [m for n, m in self.model.named_modules() if n.endswith("_proj")]
        for index, module in enumerate(self.targets):
            rows, width = module.weight.shape
            projection = Projection(0, 0, str(index), 8, width).block() / math.sqrt(8)
            coefficients = torch.randn(rows, 8, generator=torch.Generator().manual_seed(index)) * 1e-3
            module.forward = self.linear(module, projection, coefficients)
            module.step = -(coefficients @ projection)
        self.probe = Probe(self.model, lambda ids: self.model(input_ids=ids, use_cache=False))
        generator = torch.Generator().manual_seed(1)
        sequences = tuple(torch.randint(3, 99, (length,), generator=generator) for length in (30, 41))
        self.batch = ProbeBatch(sequences, (torch.arange(8, 29), torch.arange(3, 40)), TEMPERATURE)

    @contextmanager
    def along(self, direction):
        self.direction = direction
        yield
        self.direction = None

    def linear(self, module, projection, coefficients):
        def forward(x):
            if self.direction is None:
                return nn.functional.linear(x, module.weight, module.bias)
            if self.direction == "jvp":
                return side_rate(x, module.weight, module.bias, projection, coefficients)
            return side_linear(x, module.weight, module.bias, projection, coefficients, self.direction)

        return forward

    def by_tangent(self) -> float:
        return self.q(self.probe.variance_by_tangent(self.batch, self.along))

    def by_difference(self, epsilon: float) -> float:
        base = self.probe.hidden(self.batch)
        variance, divergence = self.probe.variance_by_difference(self.batch, base, self.along, epsilon)
        assert divergence >= 0
        return self.q(variance)

    def q(self, variance: float) -> float:
        return variance / (2 * self.batch.count * TEMPERATURE**2)

    def realised(self, alpha: float) -> float:
        """After the step has really been taken (and taken back)."""
        before = self.probe.hidden(self.batch)
        held = [module.weight.data.clone() for module in self.targets]
        for module in self.targets:
            module.weight.data += (alpha * module.step).to(module.weight.dtype)
        after = self.probe.hidden(self.batch)
        for module, weight in zip(self.targets, held):
            module.weight.data.copy_(weight)
        return self.probe.divergence(self.batch, before, after) / self.batch.count


@pytest.mark.parametrize("family", FAMILIES)
def test_prediction_is_what_happens(family):
    policy = Policy(family, torch.float32)
    q = policy.by_tangent()
    for kl in (1e-3, 1e-4, 1e-5):
        assert abs(kl / policy.realised(math.sqrt(kl / q)) - 1) < 0.03
    alpha = math.sqrt(1e-3 / q)
    assert abs(policy.realised(alpha) / policy.realised(alpha / 2) / 4 - 1) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimators_agree(family):
    policy = Policy(family, torch.float32)
    q = policy.by_tangent()
    assert abs(policy.by_difference(math.sqrt(PROBE_KL / q)) / q - 1) < 0.05
    assert abs(policy.by_difference(math.sqrt(1e-4 / q)) / q - 1) < 0.005


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_in_bf16(family):
    exact, policy = Policy(family, torch.float32), Policy(family, torch.bfloat16)
    q = exact.by_tangent()
    assert abs(policy.by_tangent() / q - 1) < 0.15
    assert abs(policy.by_difference(math.sqrt(PROBE_KL / q)) / q - 1) < 0.15


def test_eager_attention_and_chunks_change_nothing(monkeypatch):
    import openrlhf_logra.train.probe as module

    q = Policy("Qwen2", torch.float32).by_tangent()
    monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 7)
    eager = Policy("Qwen2", torch.float32, "eager")
    assert abs(eager.by_tangent() / q - 1) < 1e-4
    assert eager.model.config._attn_implementation == "eager"


def test_a_probe_changes_nothing():
    policy = Policy("Qwen2", torch.bfloat16)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    state, linear = torch.get_rng_state(), nn.functional.linear
    policy.by_tangent()
    policy.by_difference(1.0)
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and nn.functional.linear is linear
    assert policy.direction is None and "forward" not in vars(policy.model.get_output_embeddings())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize("kl", [1e-3, 3e-3])
def test_the_strategys_own_step(kl):
    """From a backward pass to the rounded update: the KL that was asked for."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**COMMON, **FAMILIES["Qwen2"]})).to(torch.bfloat16)
    strategy = LograStrategy(LograConfig(rank=8, update_ratio=1e-3), model)
    strategy.attach()
    strategy.bind(torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    sequences = tuple(torch.randint(3, 99, (60,), generator=generator) for _ in range(4))
    batch = ProbeBatch(sequences, (torch.arange(10, 59),) * 4, 1.0)
    ids = torch.stack(sequences)
    model(input_ids=ids, labels=ids).loss.backward()
    proposal = strategy.propose(max_norm=1.0)
    probe, along = Probe(model, lambda ids: model(input_ids=ids, use_cache=False)), partial(strategy.along, proposal)
    weights = {name: parameter.clone() for name, parameter in strategy.parameters().items()}
    before = probe.hidden(batch)
    q = probe.variance_by_tangent(batch, along) / (2 * batch.count)
    alpha = math.sqrt(kl / q)
    variance, divergence = probe.variance_by_difference(batch, before, along, math.sqrt(PROBE_KL / q))
    assert abs(variance / (2 * batch.count) / q - 1) < 0.15
    assert abs(divergence / batch.count / PROBE_KL - 1) < 0.15
    assert all(torch.equal(parameter, weights[name]) for name, parameter in strategy.parameters().items())
    outcome = strategy.commit(proposal, alpha)
    realised = probe.divergence(batch, before, probe.hidden(batch)) / batch.count
    assert not outcome.skipped and outcome.alpha == alpha
    assert abs(realised / kl - 1) < 0.15


def test_variance_and_divergence_of_small_distributions():
    z = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    rate = torch.tensor([[1.0, 0.0, 2.0]])
    assert rate_variance(z, rate, 1.0).item() == pytest.approx(0.5 * 1 + 0.25 * 4 - 1.0)
    other = torch.log(torch.tensor([[0.25, 0.5, 0.25]]))
    assert kl_divergence(z, other, 1.0).item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert kl_divergence(z, z + 3, 1.0).item() == pytest.approx(0, abs=1e-15)


def test_a_tiny_divergence_is_not_lost():
    generator = torch.Generator().manual_seed(0)
    z, rate = torch.randn(50, 1000, generator=generator) * 5, torch.randn(50, 1000, generator=generator)
    predicted = rate_variance(z, rate, 2.0) / (2 * 2.0**2) * 1e-8
    found = kl_divergence(z.double(), z.double() + 1e-4 * rate.double(), 2.0)
    assert torch.allclose(found, predicted, rtol=1e-3)


@pytest.mark.parametrize("size", [99, 50_000])
@pytest.mark.parametrize("change", [1e-4, 1e-2, 0.1, 1.0, 10.0])
def test_divergence_in_float32_is_the_true_one(size, change):
    generator = torch.Generator().manual_seed(size)
    z = torch.randn(20, size, generator=generator) * 4
    after = z + change * torch.randn(20, size, generator=generator)
    log_p, log_q = (torch.log_softmax(logits.double() / 0.7, -1) for logits in (z, after))
    d = log_q - log_p
    assert torch.allclose(kl_divergence(z, after, 0.7), (log_p.exp() * (torch.expm1(d) - d)).sum(-1), rtol=1e-4)


def test_divergence_of_extreme_logits():
    z = torch.tensor([[1e4, 0.0, -1e4], [80.0, -80.0, 0.0]])
    assert torch.allclose(kl_divergence(z, z.flip(-1), 1.0), torch.tensor([2e4, 80.0], dtype=torch.float64), rtol=1e-5)


def test_the_schedule():
    settings = KLSettings()
    assert settings.scheduled(0) == 2e-4
    assert settings.scheduled(299) == settings.scheduled(10**6) == pytest.approx(2e-5)
    assert settings.scheduled(149) + settings.scheduled(150) == pytest.approx(2.2e-4)
    assert KLSettings(horizon=1).scheduled(0) == 2e-4 and KLSettings(horizon=1).scheduled(1) == pytest.approx(2e-5)


def test_alpha():
    controller = KLController(KLSettings(alpha_max=3.0))
    assert controller.alpha(2e-4, 0) == pytest.approx(1.0)
    assert controller.alpha(8e-4, 0) == pytest.approx(0.5)
    assert controller.alpha(1e-12, 0) == 3.0 and controller.alpha(0.0, 0) == 1.0
    assert all(controller.alpha(q, 0) is None for q in (math.nan, math.inf, -1.0))
    assert controller.alpha(2e-5, 300) == pytest.approx(1.0)


def test_the_mismatch_takes_at_most_half():
    controller = KLController(KLSettings())
    controller.observe_mismatch(5e-5)
    assert controller.budget(0) == pytest.approx(1.5e-4)
    controller.observe_mismatch(1.0)
    assert controller.mismatch == pytest.approx(0.7 * 5e-5 + 0.3) and controller.budget(0) == pytest.approx(1e-4)
    for difference in (-1.0, math.nan, math.inf):
        before = controller.mismatch
        controller.observe_mismatch(difference)
        assert controller.mismatch == (before if not math.isfinite(difference) else pytest.approx(0.7 * before))
    off = KLController(KLSettings(subtract_mismatch=False))
    off.observe_mismatch(1.0)
    assert off.budget(0) == 2e-4


@pytest.mark.parametrize("wrong_by", [0.25, 5.0])
def test_feedback_finds_the_budget_again(wrong_by):
    """The probe's q is wrong by a factor: realised KL returns to within a fifth of the budget in twenty updates."""
    controller = KLController(KLSettings(budget=1e-3, final_budget=1e-3, alpha_max=100.0, feedback=True))
    true_q = 7e-4
    for _ in range(20):
        predicted = controller.alpha(wrong_by * true_q, 0) ** 2 * wrong_by * true_q
        realised = controller.alpha(wrong_by * true_q, 0) ** 2 * true_q
        controller.observe_realised(predicted, realised)
    assert abs(realised / 1e-3 - 1) < 0.2


def test_feedback_is_clamped_and_ignores_what_is_no_number():
    controller = KLController(KLSettings(feedback=True))
    for predicted, realised in ((0.0, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, 0.0)):
        controller.observe_realised(predicted, realised)
    assert controller.log_ratio == 0
    for _ in range(100):
        controller.observe_realised(1e-9, 1.0)
    assert controller.budget(0) == pytest.approx(2e-4 / 8)


def test_state_goes_on():
    controller = KLController(KLSettings(feedback=True))
    controller.observe_mismatch(1e-5)
    controller.observe_realised(1e-4, 2e-4)
    again = KLController(KLSettings(feedback=True))
    again.load_state_dict(controller.state_dict())
    assert again == controller


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_in_one_pass_are_the_responses_one_by_one(family, monkeypatch):
    """And ranks that have nothing more to look at make further passes that count for nothing."""
    import openrlhf_logra.train.probe as module

    policy = Policy(family, torch.float32)
    assert len(policy.batch.passes()) == 1
    together = policy.by_tangent(), policy.by_difference(10.0), policy.realised(10.0)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 1)
    assert len(policy.batch.passes()) == 2
    policy.batch = replace(policy.batch, idle=2)
    apart = policy.by_tangent(), policy.by_difference(10.0), policy.realised(10.0)
    assert together == pytest.approx(apart, rel=1e-4)


SCALED = {
    "Cohere": {"logit_scale": 0.0625, "tie_word_embeddings": True},
    "Granite": {"logits_scaling": 8.0},
    "Llama": {},
    "Gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "Phi": {},  # a head with a bias
}


@pytest.mark.parametrize("family", SCALED)
def test_logits_are_the_models_own(family):
    """Scaled, capped, with a bias: the step has the KL that the model's own logits say."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, "pad_token_id": 0, **SCALED[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    probe = Probe(model, lambda ids: model(input_ids=ids, use_cache=False))
    ids = torch.randint(3, 99, (20,), generator=torch.Generator().manual_seed(1))
    batch = ProbeBatch((ids,), (torch.arange(5, 19),), TEMPERATURE)
    assert probe.learn_head(batch) < 1e-4
    before, own = probe.hidden(batch), model(input_ids=ids[None]).logits[0, 5:19]
    weight = model.model.layers[0].mlp.fc1.weight if family == "Phi" else model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    realised = probe.divergence(batch, before, probe.hidden(batch))
    expected = kl_divergence(own, model(input_ids=ids[None]).logits[0, 5:19], TEMPERATURE).sum().item()
    assert realised == pytest.approx(expected, rel=1e-3)


def test_a_head_that_computes_something_else_is_noticed():
    policy = Policy("Llama", torch.float32)
    head = policy.model.lm_head
    assert policy.probe.learn_head(policy.batch) < 1e-4
    head.forward = lambda x: nn.functional.linear(x, nn.functional.normalize(head.weight))
    assert policy.probe.learn_head(policy.batch) > 0.02
    del head.forward
    policy.probe._forward = lambda ids: SimpleNamespace(logits=torch.zeros(1, ids.shape[1], 99))
    assert policy.probe.learn_head(policy.batch) == math.inf


def test_modules_keep_their_own_mode():
    policy = Policy("Qwen2", torch.float32)
    policy.model.train()
    policy.model.model.layers[0].eval()
    modes = [module.training for module in policy.model.modules()]
    policy.by_tangent()
    assert [module.training for module in policy.model.modules()] == modes


def test_one_odd_update_does_not_rule_the_feedback():
    controller = KLController(KLSettings(feedback=True))
    controller.observe_realised(1e-310, 1e300)
    assert math.isfinite(controller.log_ratio) and controller.budget(0) > 2e-4 / 8
