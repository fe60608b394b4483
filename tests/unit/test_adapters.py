"""LoRA's merged weights against peft's own merge (docs/strategies.md)."""

import copy

import peft
import pytest
import torch
from toy import Toy
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf_logra.config import ConfigError, LograConfig
from openrlhf_logra.strategies import strategy_class
from openrlhf_logra.train import adapters
from openrlhf_logra.train.coverage import render
from openrlhf_logra.train.shards import counted_elements, digest, gathered

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def adapted(**options):
    """A bf16 model with bf16 adapters, as DeepSpeed's engine leaves them, and its base."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    lora = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    )
    model = peft.get_peft_model(copy.deepcopy(base), lora).to(torch.bfloat16)
    return base, model


def trained(model):
    """As after some updates: B is not zero any more."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_the_merge_is_pefts_of_the_saved_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "_ROWS_AT_ONCE", 7)  # several parts of each, the last a short one
    base, model = adapted()
    strategy = strategy_class("lora")(LograConfig(method="lora"), trained(model))
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).merge_and_unload()
    expected = dict(merged.named_parameters())
    parameters = strategy.parameters()
    assert set(parameters) == set(expected) == set(dict(base.named_parameters()))
    for name, parameter in parameters.items():
        with gathered(parameter) as whole:
            assert whole.dtype == torch.bfloat16 and torch.equal(whole, expected[name]), name
        assert torch.equal(counted_elements(parameter)[0], expected[name].flatten())
        assert digest(name, parameter) == digest(name, expected[name])
    projections = [name for name in expected if "_proj" in name]
    assert strategy.trained == strategy.dense == tuple(projections)
    assert not any(torch.equal(expected[name], base.get_parameter(name)) for name in projections)


def test_before_the_first_update_the_merge_is_the_base_to_the_bit():
    base, model = adapted()
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    weight.data[0, :3] = torch.tensor([-0.0, 0.0, 1e-40])
    expected = weight.detach().clone()
    parameters = strategy_class("lora")(LograConfig(method="lora"), model).parameters()
    with gathered(parameters["model.layers.0.mlp.up_proj.weight"]) as whole:
        assert torch.equal(whole.view(torch.int16), expected.view(torch.int16))


def test_the_table_counts_adapters_as_densely_trained_and_the_base_as_frozen():
    base, model = adapted()
    table = strategy_class("lora")(LograConfig(method="lora"), model).coverage()
    assert table.dense == sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    assert table.frozen == sum(p.numel() for p in base.parameters()) and not table.sketched
    assert table.full_sync == 2 * table.frozen
    assert "changed elements" in render(table)


def test_a_model_without_adapters_is_refused():
    with pytest.raises(ConfigError, match="--ds.lora.rank"):
        strategy_class("lora")(LograConfig(method="lora"), Toy())


def test_a_tied_head_is_refused():
    with pytest.raises(ConfigError, match="lm_head shares its weight"):
        strategy_class("lora")(LograConfig(method="lora"), adapted(target_modules=["lm_head"])[1])


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"use_dora": True}])
def test_other_adapters_are_refused(options):
    with pytest.raises(ConfigError, match="only LoRA on nn.Linear"):
        strategy_class("lora")(LograConfig(method="lora"), adapted(**options)[1])
