"""Predicted-KL control on real DeepSpeed: ZeRO 0-3, one and two ranks, three families (docs/kl.md)."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from conftest import run_ranks
from models import make_architecture

SCRIPT = Path(__file__).with_name("kl_steps.py")
FAMILIES = ("qwen2", "qwen3", "llama")
BUDGET = 1e-3
FLAGS = ["--logra.rank", "8", "--logra.update_ratio", "2e-3", "--logra.kl.alpha_max", "1000"]
FLAGS += ["--logra.kl.budget", str(BUDGET), "--logra.kl.final_budget", str(BUDGET)]
BASE = {"batch": 8, "micro": 4, "zero": 0, "steps": 2, "flags": FLAGS, "model": "qwen2"}
CHECKPOINTING = {0: None, 1: "reentrant", 2: "non-reentrant", 3: "reentrant"}

STAGES = {
    f"{family}-zero{zero}": {"model": family, "zero": zero, "checkpointing": CHECKPOINTING[zero]}
    for family in FAMILIES
    for zero in range(4)
}
STAGES["qwen2-zero3-nothing-persistent"] = {"model": "qwen2", "zero": 3, "persistence_threshold": 0}
# On all responses: what alpha^2 q leaves out differs in sign from token to token, and on few it is no mean.
MEASURED = {
    f"measure-{name}": {**one, "float32": True, "measure": True, "flags": [*FLAGS, "--logra.kl.probe_responses", "8"]}
    for name, one in STAGES.items()
}
RESUMED = {
    f"resume-zero{zero}": {
        "zero": zero,
        "resume": True,
        "mismatch": 1e-5,
        "flags": [*FLAGS, "--logra.kl.feedback", "--logra.kl.probe", probe],
    }
    for zero, probe in ((0, "fd"), (2, "jvp"), (3, "fd"))
}
ODD = {
    "no-responses": {"no_responses": True},
    "nan": {"scale_q": math.nan},
    "temperature": {"temperature": 0.7},
    "fd": {"zero": 3, "flags": [*FLAGS, "--logra.kl.probe", "fd"]},
    "few-tokens": {"flags": [*FLAGS, "--logra.kl.probe_max_tokens", "2", "--logra.kl.probe_responses", "3"]},
}
ADAMW = [*FLAGS, "--logra.non_target", "adamw"]
DENSE = {
    f"adamw-zero{zero}": {"zero": zero, "exact": True, "flags": ADAMW, "model": ("qwen2", "llama")[zero // 2]}
    for zero in range(4)
}
WITHOUT = {
    f"no-kl-{name}": {**one, "flags": [*ADAMW, "--logra.kl.disable", "--logra.kl.probe_responses", "2"]}
    for name, one in DENSE.items()
}
LONG = {
    "controlled": {"steps": 100, "batches": 20},
    "feedback": {"steps": 30, "batches": 20, "scale_q": 0.25, "flags": [*FLAGS, "--logra.kl.feedback"]},
    "no-feedback": {"steps": 30, "batches": 20, "scale_q": 0.25},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: str(make_architecture(tmp_path_factory.mktemp(name), name)) for name in FAMILIES}


def run_all(chosen: dict, world: int, models, folder: Path, timeout: float = 900) -> list[dict]:
    """Per rank: {configuration name: result}."""
    folder.mkdir()
    path = folder / "configs.json"
    configs = [{**BASE, **config} for config in chosen.values()]
    path.write_text(json.dumps([{**config, "model": models[config["model"]]} for config in configs]))
    run_ranks(SCRIPT, [str(path), str(folder)], world, timeout=timeout)
    return [
        dict(zip(chosen, torch.load(folder / f"rank{rank}.pt", weights_only=False), strict=True))
        for rank in range(world)
    ]


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """{world size: [per rank: {configuration name: result}]}"""
    folder = tmp_path_factory.mktemp("kl")
    chosen = STAGES | MEASURED | RESUMED | ODD | DENSE | WITHOUT
    return {world: run_all(chosen, world, models, folder / f"world{world}") for world in (1, 2)}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kl-long")
    (found,) = run_all(LONG, 1, models, folder / "first")
    tenfold = 10 * statistics.median(one["alpha"] for one in found["controlled"]["updates"])
    (fixed,) = run_all({"fixed": {"steps": 100, "batches": 20, "alpha": tenfold}}, 1, models, folder / "second")
    return found | fixed


@pytest.fixture(params=[1, 2], ids=["1-rank", "2-ranks"])
def world(request):
    return request.param


@pytest.mark.parametrize("name", MEASURED)
def test_prediction_and_estimators_in_float32(results, world, name):
    for one in results[world][0][name]["found"]:
        assert abs(one["fd"] / one["jvp"] - 1) < 0.05
        for kl, (realised, halved) in one["realised"].items():
            assert abs(kl / realised - 1) < 0.03
            assert abs(realised / halved / 4 - 1) < 0.05
    assert not results[world][0][name]["moved"]


@pytest.mark.parametrize("name", STAGES)
def test_the_step_taken_costs_what_was_predicted_in_bf16(results, world, name):
    ranks = results[world]
    for update in ranks[0][name]["updates"]:
        assert update["kl_budget"] == BUDGET and update["held"] is None
        assert update["predicted_kl"] == pytest.approx(BUDGET, rel=1e-6)
        assert abs(update["predicted_kl"] / update["realized_kl"] - 1) < 0.15
        assert update["timing/logra_probe"] > 0
    assert ranks[0][name]["version"] == 2 and ranks[0][name]["moved"]


def test_all_ranks_decide_alike_and_no_random_state_moves(results, world):
    for name in STAGES | RESUMED | ODD:
        keys = ("alpha", "own", "held", "predicted_kl", "realized_kl", "kl_budget")  # own: before rank 0's was shared
        decided = [[[update.get(key) for key in keys] for update in rank[name]["updates"]] for rank in results[world]]
        assert all(one == decided[0] for one in decided), name
        assert not any(rank[name]["rng_moved"] for rank in results[world]), name


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bit_exact(results, world, name):
    for rank in results[world]:
        (weights, figures, state), (again, figures_again, state_again) = rank[name]["resumed"]
        assert figures == figures_again and state == state_again
        assert state["controller"]["mismatch"] > 0 and state["controller"]["log_ratio"] != 0
        for key, weight in weights.items():
            assert torch.equal(weight, again[key]), key


@pytest.mark.parametrize("name", ["no-responses", "nan"])
def test_a_probe_without_a_number_holds_the_step(results, world, name):
    for rank in results[world]:
        assert rank[name]["version"] == 0 and not rank[name]["moved"]
        assert all(update["held"] for update in rank[name]["updates"])


@pytest.mark.parametrize("name", ["temperature", "fd", "few-tokens"])
def test_other_settings(results, world, name):
    for update in results[world][0][name]["updates"]:
        assert abs(update["predicted_kl"] / update["realized_kl"] - 1) < 0.15


@pytest.mark.parametrize("name", DENSE)
def test_realised_kl_is_that_of_the_whole_update(results, world, name):
    """Embeddings, norms and a head that DeepSpeed trains included; the probes leave their gradients alone."""
    ours = results[world][0][name]
    for realised, exact in ours["exact"]:
        assert realised > 3 * BUDGET  # most of it is AdamW's
        assert realised == pytest.approx(exact, rel=0.1)
    for key, weight in results[world][0][f"no-kl-{name}"]["first"].items():
        assert torch.equal(weight, ours["first"][key]), key


def test_control_keeps_the_budget_and_a_fixed_step_does_not(runs):
    controlled = [one["realized_kl"] for one in runs["controlled"]["updates"]]
    fixed = [one["realized_kl"] for one in runs["fixed"]["updates"]]
    assert len(controlled) == len(fixed) == 100
    within = sum(kl <= 1.3 * BUDGET for kl in controlled)
    assert within >= 95, within
    assert sum(kl <= 1.3 * BUDGET for kl in fixed) < 95


def test_feedback_corrects_a_probe_that_is_wrong(runs):
    realised = [one["realized_kl"] for one in runs["feedback"]["updates"]]
    assert realised[0] > 3 * BUDGET
    assert all(abs(kl / BUDGET - 1) < 0.2 for kl in realised[20:])
    assert all(one["realized_kl"] > 3 * BUDGET for one in runs["no-feedback"]["updates"])
