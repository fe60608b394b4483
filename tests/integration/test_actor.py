"""OpenRLHF's policy actor on real DeepSpeed: ZeRO 0-3, one and two ranks."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import FULL, run_ranks
from safetensors.torch import load_file
from training import merged_by_peft

SCRIPT = Path(__file__).with_name("actor_steps.py")
FLAGS = ["--logra.rank", "8", "--logra.update_ratio", "1e-2", "--logra.kl.disable"]  # test_kl_control.py has KL
ADAM = [*FLAGS, "--logra.optimizer", "adam"]
GAUSSIAN = [*FLAGS, "--logra.distribution", "gaussian"]
ADAMW = [*FLAGS, "--logra.non_target", "adamw"]
BASE = {"batch": 8, "gas": 1, "flags": FLAGS}
SAVED = {"resume": True, "save": True}

GALORE, FIRA, FLORA = (["--logra.method", name, "--logra.rank", "8"] for name in ("galore", "fira", "flora"))

# name -> configuration; every ZeRO stage with everything else varied at least once. `gas`: micro-batches of a rank.
COVERING = {
    "zero0": {"zero": 0, **SAVED, "checkpointing": "non-reentrant"},
    "zero0-packed": {"zero": 0, "gas": 4, "checkpointing": "reentrant", "packing": True},
    "zero0-adamw": {"zero": 0, "flags": ADAMW, **SAVED, "max_norm": 0},
    "zero1": {"zero": 1, **SAVED, "gas": 4, "flags": ADAM},
    "zero1-packed": {"zero": 1, "checkpointing": "non-reentrant", "packing": True, "sleep": True},
    "zero1-adamw-offload": {"zero": 1, "flags": ADAMW, "gas": 4, "offload": True, "max_norm": 0.1},
    "zero2": {"zero": 2, **SAVED, "checkpointing": "reentrant"},
    "zero2-packed": {"zero": 2, "gas": 4, "packing": True, "sleep": True},
    "zero2-gaussian": {"zero": 2, "flags": GAUSSIAN, **SAVED},
    "zero2-adamw": {"zero": 2, "flags": ADAMW, **SAVED, "packing": True, "sleep": True, "max_norm": 0.1},
    "zero2-adamw-dynamic": {"zero": 2, "flags": ADAMW, "gas": 4, "dynamic": True, "packing": True, "max_norm": 0},
    "zero3": {"zero": 3, **SAVED, "gas": 4, "checkpointing": "non-reentrant"},
    "zero3-packed": {"zero": 3, "checkpointing": "reentrant", "packing": True, "sleep": True},
    "zero3-nothing-persistent": {"zero": 3, "persistence_threshold": 0, "checkpointing": "non-reentrant", **SAVED},
    "zero3-gaussian": {"zero": 3, "flags": GAUSSIAN, **SAVED},
    "zero3-gaussian-nothing-persistent": {"zero": 3, "persistence_threshold": 0, "flags": GAUSSIAN},
    "zero3-sgd-fixed": {"zero": 3, "flags": [*FLAGS, "--logra.optimizer", "sgd", "--logra.refresh_every", "0"]},
    "zero3-poisoned": {"zero": 3, "poison_rank": 1},
    "zero3-adamw": {"zero": 3, "flags": ADAMW, **SAVED, "sleep": True, "max_norm": 0.1},
    "zero3-adamw-nothing-persistent": {"zero": 3, "persistence_threshold": 0, "flags": ADAMW, "max_norm": 0},
}
# Strategies that form full gradients, each target's state on one rank.
COVERING |= {
    "zero0-galore": {"zero": 0, "gas": 4, "flags": [*GALORE, "--logra.refresh_every", "2"], **SAVED},
    "zero1-fira": {"zero": 1, "checkpointing": "reentrant", "packing": True, "flags": FIRA, **SAVED},
    "zero2-flora": {"zero": 2, "gas": 4, "flags": FLORA, **SAVED, "sleep": True},
    "zero2-galore-poisoned": {"zero": 2, "flags": GALORE, "poison_rank": 1},
    "zero3-fira-nothing-persistent": {"zero": 3, "persistence_threshold": 0, "flags": FIRA, **SAVED},
    "zero3-galore-adamw": {"zero": 3, "flags": [*GALORE, "--logra.non_target", "adamw"], **SAVED, "max_norm": 0.1},
}
for zero in (0, 1, 2, 3):
    what = ("sketch", "gradients")[zero % 2]
    COVERING[f"zero{zero}-adamw-poisoned-{what}"] = {"zero": zero, "flags": ADAMW, "poison_rank": 1, "poison": what}
# OpenRLHF without the plugin, with its targets frozen.
STOCK = {f"zero{zero}-stock": {"zero": zero, "stock": True, "max_norm": 0} for zero in (0, 2, 3)}
LORA = {f"zero{zero}-lora": {"zero": zero, "lora": 4, "flags": ["--logra.method", "lora"]} for zero in (0, 1, 2, 3)}
# name -> the configuration whose checkpoint one rank has written, and what continues it on two.
ADOPTED = {
    "zero2-of-one-rank": ("zero2", {"zero": 2}),
    "zero3-of-one-rank": ("zero3", {"zero": 3, "gas": 4}),
    "zero3-of-zero2-adamw": ("zero2-adamw", {"zero": 3, "flags": ADAMW}),
    "zero0-of-zero3": ("zero3", {"zero": 0}),
    "zero2-of-stock": ("zero2-stock", {"zero": 2}),
    "zero3-of-zero0-galore": ("zero0-galore", {"zero": 3, "flags": [*GALORE, "--logra.refresh_every", "2"]}),
    "zero3-of-stock": ("zero3-stock", {"zero": 3, "flags": ADAMW}),
}


def configurations() -> dict[str, dict]:
    chosen = dict(COVERING)
    if FULL:
        kinds = (None, "reentrant", "non-reentrant")
        for zero, gas, checkpointing, packing in itertools.product((0, 1, 2, 3), (1, 4), kinds, (False, True)):
            name = f"full-zero{zero}-gas{gas}-{checkpointing}-{'packed' if packing else 'padded'}"
            chosen[name] = {"zero": zero, "gas": gas, "checkpointing": checkpointing, "packing": packing}
        for zero, optimizer in itertools.product((0, 1, 2, 3), ("sgd", "row_adam", "adam")):
            flags = [*FLAGS, "--logra.optimizer", optimizer]
            chosen[f"full-zero{zero}-{optimizer}"] = {"zero": zero, "flags": flags, **SAVED}
    return chosen


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory):
    """{world size: [per rank: {configuration name: result}]}, and the folders with what was saved."""
    folder = tmp_path_factory.mktemp("actor")
    chosen = {**configurations(), **STOCK, **LORA}
    everything = {}
    for world in (1, 2):
        if world == 2:
            for name, (source, config) in ADOPTED.items():
                chosen[name] = {**config, "adopt": str(everything[1][1][source] / "checkpoint")}
            adopted = str(everything[1][1]["zero0-lora"] / "checkpoint")
            chosen["zero3-of-zero0-lora"] = {**LORA["zero3-lora"], "adopt": adopted}
        path = folder / f"configs{world}.json"
        path.write_text(json.dumps([{**BASE, **config, "model": str(tiny_model)} for config in chosen.values()]))
        out = folder / f"world{world}"
        out.mkdir()
        run_ranks(SCRIPT, [str(path), str(out)], world, timeout=3000 if FULL else 900)
        ranks = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
        everything[world] = [dict(zip(chosen, rank, strict=True)) for rank in ranks], dict(
            zip(chosen, (out / str(i) for i in range(len(chosen))), strict=True)
        )
    return everything


@pytest.fixture(params=[1, 2], ids=["1-rank", "2-ranks"])
def world(request):
    return request.param


@pytest.fixture(params=list(configurations()))
def name(request):
    return request.param


def test_weights_are_loaded_as_they_are_on_disk(results, world, name, tiny_model):
    """Also guards the CPU stand-in for ZeRO-3's gather, which without it corrupts a random parameter."""
    disk = load_file(tiny_model / "model.safetensors")
    for rank in results[world][0]:
        loaded = rank[name]["loaded"]
        assert set(disk) == {key for key in loaded if not key.endswith("logra_anchor")}
        assert all(torch.equal(disk[key], loaded[key]) for key in disk)


def test_rotary_frequencies_are_the_models_own(results, world, name, tiny_model):
    """ZeRO-3 rounds them to bf16, which no rollout engine does (train/buffers.py)."""
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_buffers())
    assert any("inv_freq" in key for key in expected)
    for rank in results[world][0]:
        for key, buffer in rank[name]["buffers"].items():
            assert buffer.dtype == torch.float32 and torch.equal(buffer, expected[key]), key


def test_every_rank_holds_the_same_bits_and_they_moved(results, world, name):
    ranks = [rank[name] for rank in results[world][0]]
    for key, weight in ranks[0]["weights"].items():
        assert all(torch.equal(weight, rank["weights"][key]) for rank in ranks), key
        moved = not torch.equal(weight, ranks[0]["loaded"][key])
        trained = "_proj.weight" in key or ("adamw" in name and "anchor" not in key)
        assert moved == trained, f"{key} {'moved' if moved else 'did not move'}"
    assert all(torch.equal(ranks[0]["log_probs"], rank["log_probs"]) for rank in ranks)


def test_the_trainer_holds_what_it_sends(results, world, name):
    """The checkpoint and the updates, applied apart from the trainer, give its weights bit for bit."""
    for rank in results[world][0]:
        expected = rank[name]["as_sent"]
        assert (expected is None) == ("gaussian" in name)
        assert expected != {} or any(key in name for key in ("galore", "fira", "flora"))
        for key, weight in (expected or {}).items():
            assert torch.equal(weight, rank[name]["weights"][key]), key


def test_digests_of_shards_add_up(results, world, name):
    ranks = [rank[name] for rank in results[world][0]]
    for key, value in ranks[0]["digests"].items():
        assert sum(rank["shard_digests"][key] for rank in ranks) % 2**64 == value, key


def test_sketches_agree_with_one_rank_and_no_accumulation(results, world, name):
    """Ranks, stages, accumulation, checkpointing, packing: bf16 activations in other batches round differently, no
    more than that. (Every direction shares the first sketch, but not the Gaussian projection.)"""
    ours = results[world][0][0][name]
    alike = [key for key in ("galore", "fira", "flora") if key in name] and "zero0-galore"
    reference = results[1][0][0][alike or ("zero2-gaussian" if "gaussian" in name else "zero0")]
    sketch, expected = ours["sketches"][0], reference["sketches"][0]
    assert (sketch - expected).norm() < 1e-2 * expected.norm()
    if "adamw" in name:
        dense = results[1][0][0]["zero0-adamw"]["dense_norms"][0]
        assert dense > 0 and ours["dense_norms"][0] == pytest.approx(dense, rel=1e-2)


@pytest.mark.parametrize("name", [name for name in COVERING if "adamw" in name])
def test_the_gradient_norm_is_that_of_sketches_and_dense_gradients(results, world, name):
    """Both are clipped by the factor that follows from it."""
    ranks = [rank[name] for rank in results[world][0]]
    sketch, dense = float(ranks[0]["sketches"][0].norm()), ranks[0]["dense_norms"][0]
    total = (sketch**2 + dense**2) ** 0.5
    assert ranks[0]["grad_norms"][0] == pytest.approx(total, rel=1e-5)
    limit = COVERING[name].get("max_norm", 1.0)
    assert limit != 0.1 or total > 0.1
    factor = limit / total if 0 < limit < total else 1
    ranks_with_a_part = ranks if COVERING[name]["zero"] else ranks[:1]
    moments = sum(rank["first_moments"] for rank in ranks_with_a_part) ** 0.5
    assert moments == pytest.approx(0.1 * dense * factor, rel=1e-4)


@pytest.mark.parametrize("name", ["zero0-adamw", "zero2-adamw-dynamic", "zero3-adamw-nothing-persistent"])
def test_the_dense_part_is_stock_openrlhfs(results, world, name):
    """Where nothing is clipped. Not to the bit: products in another order round some gradients the other way, and
    where a gradient is nothing but rounding (biases of keys), AdamW goes the other way."""
    ours, stock = (results[world][0][0][key] for key in (name, f"{name[:5]}-stock"))
    for key, weight in stock["first"].items():
        if "_proj.weight" not in key and "k_proj.bias" not in key:
            assert (weight == ours["first"][key]).float().mean() > 0.9, key


def test_updates_and_gradient_norms_are_counted(results, world, name):
    for rank in results[world][0]:
        assert rank[name]["versions"] == 2
        assert len(rank[name]["grad_norms"]) == 2 and all(norm > 0 for norm in rank[name]["grad_norms"])


@pytest.mark.parametrize("name", [name for name in COVERING if "poisoned" in name])
def test_what_is_not_finite_on_one_rank_skips_on_all(results, world, name):
    """Neither weights nor moments move; the next update is taken."""
    for rank in results[world][0]:
        assert rank[name]["poisoned"] == {"skipped": True, "unchanged": True, "version": 2, "next": 3, "moves": True}


def test_state_bytes_equal_the_coverage_table(results, world, name):
    ranks = [rank[name] for rank in results[world][0]]
    kept = ranks[0]["state_bytes"]
    if any(key in name for key in ("galore", "fira", "flora")):  # spread over the ranks
        kept += sum(rank["state_bytes"] - rank["table_sink_bytes"] for rank in ranks[1:])
    assert kept == pytest.approx(ranks[0]["table_bytes"], rel=0.02)
    sharded = sum(rank["all_state_bytes"] - rank["state_bytes"] for rank in ranks)
    copies = 1 if configurations()[name]["zero"] else world
    assert sharded == pytest.approx(copies * ranks[0]["table_dense_bytes"], rel=0.02)


@pytest.mark.parametrize("name", [name for name, config in configurations().items() if config.get("resume")])
def test_resume_is_bit_exact(results, world, name):
    for rank in results[world][0]:
        uninterrupted, resumed, _ = rank[name]["resumed"]
        for key, weight in uninterrupted.items():
            assert torch.equal(weight, resumed[key]), key


@pytest.mark.parametrize("name", ADOPTED)
def test_a_checkpoint_that_deepspeed_cannot_continue_is_adopted(results, name):
    """Another number of ranks, another ZeRO stage, stock OpenRLHF's: the weights, and what there is of our state."""
    source = results[1][0][0][ADOPTED[name][0]]
    state = source["resumed"][2] if "resumed" in source else None
    for rank, found in enumerate(rank[name] for rank in results[2][0]):
        for key, weight in source["weights"].items():
            assert "anchor" in key or torch.equal(weight, found["weights"][key]), key
        assert found["global_step"] == 7 and found["resumed"]
        version = state["version"] if state else 0
        assert found["state"]["version"] == version and found["next"] == version + 1
        if state and rank == 0:
            kind = "rules" if "rules" in state else "directions"
            for target, moments in state[kind].items():
                for key, value in moments.items():
                    ours = found["state"][kind][target][key]
                    assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value
        moved = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(found["after"][moved], found["weights"][moved])


@pytest.mark.parametrize("name", [name for name, config in configurations().items() if config.get("save")])
def test_the_saved_checkpoint_holds_the_weights_and_nothing_of_ours(results, world, name, tiny_model):
    ranks, folders = results[world]
    saved, stock = load_file(folders[name] / "hf" / "model.safetensors"), load_file(tiny_model / "model.safetensors")
    assert set(saved) - {"lm_head.weight"} == set(stock)
    expected = ranks[0][name]["resumed"][0] if "resumed" in ranks[0][name] else ranks[0][name]["weights"]
    assert all(torch.equal(saved[key], expected[key]) for key in stock)


@pytest.mark.parametrize("name", LORA)
def test_lora_is_merged_as_peft_merges_the_saved_adapter(results, world, name, tiny_model):
    ranks, folders = results[world]
    expected, base = merged_by_peft(tiny_model, folders[name] / "hf"), load_file(tiny_model / "model.safetensors")
    for rank in ranks:
        assert set(rank[name]["merged"]) == set(expected) == set(base)
        for key, weight in rank[name]["merged"].items():
            assert torch.equal(weight, expected[key]), key
            assert torch.equal(weight, base[key]) == ("_proj.weight" not in key), key
        uninterrupted, resumed, state = rank[name]["resumed"]
        assert all(torch.equal(weight, resumed[key]) for key, weight in uninterrupted.items())
        assert state["version"] == 2
    kept = sum(rank[name]["state_bytes"] for rank in ranks[: world if LORA[name]["zero"] else 1])
    assert kept == pytest.approx(ranks[0][name]["table_bytes"], rel=0.02)


def test_a_lora_checkpoint_of_another_shape_is_adopted(results):
    source = results[1][0][0]["zero0-lora"]["merged"]
    for rank in results[2][0]:
        assert all(torch.equal(weight, rank["zero3-of-zero0-lora"]["merged"][key]) for key, weight in source.items())


def test_the_strategy_of_another_package_trains(tiny_model, tmp_path, monkeypatch):
    """The example of docs/strategies.md, found by its entry point, on two ranks with partitioned weights."""
    document = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", document, re.S) if "@register_strategy" in code)
    (point,) = re.findall(r"```toml\n\[.*?\]\nsign = \"(\S+)\"", document)
    package, _, module = point.partition(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{module}.py").write_text(source)
    information = tmp_path / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[openrlhf_logra.strategies]\nsign = {point}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    config = {**BASE, "zero": 3, "persistence_threshold": 0, "flags": ["--logra.method", "sign"], "resume": True}
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps([{**config, "model": str(tiny_model)}]))
    run_ranks(SCRIPT, [str(configs), str(tmp_path)], 2, timeout=300)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)[0] for rank in range(2))
    for key, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][key]), key
        assert torch.equal(weight, first["loaded"][key]) == ("_proj.weight" not in key), key
    uninterrupted, resumed, state = first["resumed"]
    assert all(torch.equal(weight, resumed[key]) for key, weight in uninterrupted.items()) and state["version"] == 2
