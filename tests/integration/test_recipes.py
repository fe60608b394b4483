"""The recipes that OpenRLHF ships, scaled down, with --logra.enable: accepted, and run to bit-identical weights."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import FULL
from raylets import Raylets
from recipe_runs import check_run, places_of
from training import LOGRA_FLAGS, Finished, check_flags, run

from recipes import (
    CORRECTIONS,
    OVERRIDABLE,
    RECIPES,
    SHIPPED,
    command,
    overrides_of,
    parse,
    translate,
    updates_per_sync,
)

# Beside the one that test_cluster.py runs on two nodes.
STANDARD = ("train_ppo_ray_hybrid_engine", "train_reinforce_baseline_ray_agent_async")


@pytest.mark.parametrize("name", SHIPPED)
def test_only_sizes_places_and_counts_are_overridden(name, tmp_path):
    shipped, overridden = parse(SHIPPED[name]), overrides_of(name, {})
    assert overridden.keys() | places_of(name, tmp_path).keys() <= OVERRIDABLE
    assert RECIPES[name].overrides.keys() <= shipped.keys()
    assert updates_per_sync({**shipped, **overridden}) == updates_per_sync(shipped)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_installed_release_accepts_what_is_shipped(name, parser, tmp_path):
    """As it is, but for places, and as the tests run it."""
    places = places_of(name, tmp_path)
    shipped = translate(parse(SHIPPED[name]))
    whole = {**shipped, **{flag: (str(place),) for flag, place in places.items() if flag in shipped}}
    flags = [word for flag, values in whole.items() for word in (flag, *values)]
    for accepted in (flags + list(RECIPES[name].added), command(name, places)):
        check_flags(parser, [*accepted, *LOGRA_FLAGS])


@pytest.mark.usefixtures("parser")  # with whose stand-ins OpenRLHF's models can be imported
def test_corrections_mean_what_they_meant():
    """0.11.0 weighted each token's loss by the ratio w of trainer and rollout probability: clamped to the thresholds
    (tis), left out outside of them (icepop), or left out with its sequence where the geometric mean is outside."""
    from openrlhf.models import PolicyLoss

    generator = torch.Generator().manual_seed(0)
    old, rollout = -torch.rand(2, 4, 6, generator=generator) * 4
    mask = torch.ones(4, 6)
    ratio = (old - rollout).exp()
    mean = (old - rollout).mean(-1, keepdim=True).exp()
    low, high = 0.8, 1.25
    weights = {
        "tis": ratio.clamp(low, high),
        "icepop": ratio * ((ratio >= low) & (ratio <= high)),
        "seq-mask-tis": ratio * ((mean >= low) & (mean <= high)),
    }
    assert weights.keys() == CORRECTIONS.keys()
    for kind, (level, mode, gating) in CORRECTIONS.items():
        correction = dict(zip(("level", "mode", "gating"), (level, mode, gating)), threshold=[low, high])
        loss = PolicyLoss(**{f"is_correction_{key}": value for key, value in correction.items()})
        found, *_ = loss(old, old, torch.ones(4, 6), action_mask=mask, rollout_log_probs=rollout)
        torch.testing.assert_close(found, -weights[kind].mean())


def run_as_job(flags: list[str], folder: Path, working_dir: bool) -> Finished:
    """Run by `ray job submit`, on one node."""
    options = [f"--runtime-env-json={json.dumps({'working_dir': str(folder)})}"] if working_dir else []
    with tempfile.TemporaryDirectory(prefix="logra-") as short:  # sockets need short names
        raylets = Raylets(Path(short))
        try:
            raylets.start_head("only", gpus=8, cpus=10)
            program = raylets.submit(*options) + ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
            return run(flags, folder, timeout=900, program=program)
        finally:
            raylets.stop()


@pytest.mark.parametrize("name", SHIPPED if FULL else STANDARD)
def test_two_rollouts(name, tmp_path, monkeypatch):
    recipe = RECIPES[name]
    flags = [*command(name, places_of(name, tmp_path)), *LOGRA_FLAGS]
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    if recipe.launch == "python":
        finished = run(flags, run_folder, timeout=900)
    else:
        finished = run_as_job(flags, run_folder, recipe.working_dir)
    check_run(name, finished, tmp_path)
