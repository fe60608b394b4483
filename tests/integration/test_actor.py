"""OpenRLHF's policy actor on real DeepSpeed: ZeRO 0-3, one and two ranks (cases.md, Training)."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import FULL, run_ranks
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("actor_steps.py")
FLAGS = ["--logra.rank", "8", "--logra.update_ratio", "1e-2", "--logra.kl.disable"]  # test_kl_control.py has KL
BASE = {"batch": 8, "micro": 4, "flags": FLAGS}

# name -> configuration; every ZeRO stage with everything else varied at least once.
COVERING = {
    "zero0": {"zero": 0, "resume": True, "save": True, "checkpointing": "non-reentrant"},
    "zero1": {"zero": 1, "resume": True, "save": True, "flags": [*FLAGS, "--logra.optimizer", "adam"]},
    "zero2": {"zero": 2, "resume": True, "save": True, "checkpointing": "reentrant"},
    "zero3": {"zero": 3, "resume": True, "save": True},
    "zero3-nothing-persistent": {
        "zero": 3,
        "persistence_threshold": 0,
        "checkpointing": "non-reentrant",
        "resume": True,
        "save": True,
    },
    "zero3-gaussian-nothing-persistent": {
        "zero": 3,
        "persistence_threshold": 0,
        "flags": [*FLAGS, "--logra.distribution", "gaussian"],
    },
    "zero2-gaussian": {"zero": 2, "flags": [*FLAGS, "--logra.distribution", "gaussian"], "resume": True, "save": True},
    "zero3-gaussian": {"zero": 3, "flags": [*FLAGS, "--logra.distribution", "gaussian"], "resume": True, "save": True},
    "zero3-sgd-fixed": {"zero": 3, "flags": [*FLAGS, "--logra.optimizer", "sgd", "--logra.refresh_every", "0"]},
    "zero2-micro-batches-of-2": {"zero": 2, "micro": 2},
    "zero3-poisoned": {"zero": 3, "poison_rank": 1},
}


def configurations() -> dict[str, dict]:
    chosen = dict(COVERING)
    if FULL:
        product = itertools.product((0, 1, 2, 3), (None, "reentrant", "non-reentrant"), ("sgd", "row_adam", "adam"))
        for zero, checkpointing, optimizer in product:
            name = f"full-zero{zero}-{checkpointing}-{optimizer}"
            flags = [*FLAGS, "--logra.optimizer", optimizer]
            chosen[name] = {"zero": zero, "checkpointing": checkpointing, "flags": flags, "resume": True, "save": True}
    return chosen


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory):
    """{world size: [per rank: {configuration name: result}]}, and the folders with what was saved."""
    folder = tmp_path_factory.mktemp("actor")
    chosen = configurations()
    path = folder / "configs.json"
    path.write_text(json.dumps([{**BASE, **config, "model": str(tiny_model)} for config in chosen.values()]))
    everything = {}
    for world in (1, 2):
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
        assert moved == ("_proj.weight" in key), f"{key} {'moved' if moved else 'did not move'}"
    assert all(torch.equal(ranks[0]["log_probs"], rank["log_probs"]) for rank in ranks)


def test_the_trainer_holds_what_it_sends(results, world, name):
    """The checkpoint and the updates, applied apart from the trainer, give its weights bit for bit."""
    for rank in results[world][0]:
        expected = rank[name]["as_sent"]
        assert (expected is None) == ("gaussian" in name)
        for key, weight in (expected or {}).items():
            assert torch.equal(weight, rank[name]["weights"][key]), key


def test_digests_of_shards_add_up(results, world, name):
    ranks = [rank[name] for rank in results[world][0]]
    for key, value in ranks[0]["digests"].items():
        assert sum(rank["shard_digests"][key] for rank in ranks) % 2**64 == value, key


def test_sketches_of_one_and_two_ranks_agree(results, name):
    """The same micro-batches, one after the other or side by side: equal up to the order of float32 sums."""
    (one, _), (two, _) = results[1], results[2]
    ours, theirs = two[0][name]["sketches"][0], one[0][name]["sketches"][0]
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert two[0][name]["grad_norms"][0] == pytest.approx(one[0][name]["grad_norms"][0], rel=1e-5)


@pytest.mark.parametrize("other", ["zero1", "zero2", "zero2-micro-batches-of-2"])
def test_sketches_of_stages_and_accumulation_agree(results, world, other):
    """bf16 activations in other micro-batches round differently, no more than that. (Adam shares the first sketch.)"""
    ranks, _ = results[world]
    reference, sketch = ranks[0]["zero0"]["sketches"][0], ranks[0][other]["sketches"][0]
    assert (sketch - reference).norm() < 2e-2 * reference.norm()


def test_updates_and_gradient_norms_are_counted(results, world, name):
    for rank in results[world][0]:
        assert rank[name]["versions"] == 2
        assert len(rank[name]["grad_norms"]) == 2 and all(norm > 0 for norm in rank[name]["grad_norms"])


def test_a_sketch_that_is_not_finite_on_one_rank_skips_on_all(results, world):
    for rank in results[world][0]:
        assert rank["zero3-poisoned"]["poisoned"] == {"skipped": True, "unchanged": True, "version": 2, "next": 3}


def test_state_bytes_equal_the_coverage_table(results, world, name):
    rank0 = results[world][0][0][name]
    assert rank0["state_bytes"] == pytest.approx(rank0["table_bytes"], rel=0.02)


@pytest.mark.parametrize("name", [name for name, config in configurations().items() if config.get("resume")])
def test_resume_is_bit_exact(results, world, name):
    for rank in results[world][0]:
        uninterrupted, resumed = rank[name]["resumed"]
        for key, weight in uninterrupted.items():
            assert torch.equal(weight, resumed[key]), key


@pytest.mark.parametrize("name", [name for name, config in configurations().items() if config.get("save")])
def test_the_saved_checkpoint_holds_the_weights_and_nothing_of_ours(results, world, name, tiny_model):
    ranks, folders = results[world]
    saved, stock = load_file(folders[name] / "hf" / "model.safetensors"), load_file(tiny_model / "model.safetensors")
    assert set(saved) - {"lm_head.weight"} == set(stock)
    expected = ranks[0][name]["resumed"][0] if "resumed" in ranks[0][name] else ranks[0][name]["weights"]
    assert all(torch.equal(saved[key], expected[key]) for key in stock)
