"""The recipes that OpenRLHF ships, scaled down, with --logra.enable: accepted, and run to bit-identical weights."""

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import FULL
from models import make_architecture, make_reward_model, make_vision_language_model
from raylets import Raylets
from training import LOGRA_FLAGS, Finished, check_flags, digest_of_checkpoint, run

from openrlhf_logra.host.models import load_model, weights_of
from openrlhf_logra.math.digest import as_matrix, digest_block, total_digest
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

STANDARD = (
    "train_dapo_ray_hybrid_engine",
    "train_ppo_ray_hybrid_engine",
    "train_reinforce_baseline_ray_agent_async",
)
ENVIRONMENT = Path(__file__).with_name("recipe_environment.py")
ROLLOUTS = 2


def write_prompts(path: Path, count: int, easy: int, image: Path | None = None) -> Path:
    """`count` prompts in every form that a recipe reads, and `easy` ones in front that filtering leaves out."""
    lines = []
    for i in range(easy + count):
        prompt = f"{'easy' if i < easy else 'say'} {i:02d} "
        line = {"context_messages": [{"role": "user", "content": prompt}], "prompt": prompt, "label": "-"}
        if image is not None:
            line.update(prompt=f"<image>{prompt}", images=[str(image)])
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))
    return path


def places_of(name: str, folder: Path) -> dict[str, object]:
    """Model, data and folders of one recipe; they are made in `folder`."""
    from PIL import Image

    recipe, image = RECIPES[name], None
    if recipe.architecture == "llava":
        image, model = folder / "image.png", make_vision_language_model(folder / "base")
        Image.new("RGB", (40, 30), (200, 40, 10)).save(image)
    else:
        model = make_architecture(folder / "base", recipe.architecture)
    places = {
        "--actor.model_name_or_path": model,
        "--data.prompt_dataset": write_prompts(
            folder / "prompts.jsonl",
            ROLLOUTS * int(recipe.overrides["--rollout.batch_size"]),
            easy=3 if "--algo.dynamic_filtering_enable" in parse(SHIPPED[name]) else 0,
            image=image,
        ),
        "--eval.dataset": folder / "prompts.jsonl",
        "--reward.remote_url": ENVIRONMENT,
        "--train.agent_func_path": ENVIRONMENT,
        "--ckpt.output_dir": folder / "model",
        "--ckpt.path": folder / "checkpoints",
        "--logger.tensorboard_dir": folder / "tensorboard",
    }
    if "--reward.model_name_or_path" in parse(SHIPPED[name]):
        places["--reward.model_name_or_path"] = make_reward_model(folder / "reward", recipe.architecture)
    return places


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


def digest(saved: Path, architecture: str) -> str:
    """As a step line shows it."""
    if architecture != "llava":
        return digest_of_checkpoint(saved)
    # Its files do not have the names of its parameters.
    weights = weights_of(load_model(str(saved), "--checkpoint"))
    values = [digest_block(as_matrix(weight), name, as_matrix(weight).shape[1]) for name, weight in weights.items()]
    return f"{total_digest(dict(zip(weights, values))):016x}"


@pytest.mark.parametrize("name", SHIPPED if FULL else STANDARD)
def test_two_rollouts(name, tmp_path, monkeypatch):
    """Every sync verified; the saved checkpoint is what the engines hold."""
    recipe = RECIPES[name]
    flags = [*command(name, places_of(name, tmp_path)), *LOGRA_FLAGS]
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    if recipe.launch == "python":
        finished = run(flags, run_folder, timeout=900)
    else:
        finished = run_as_job(flags, run_folder, recipe.working_dir)
    assert finished.code == 0, finished.output[-5000:]
    lines = [step.line for step in finished.steps]
    updates = updates_per_sync(parse(SHIPPED[name]))
    assert [step.version for step in finished.steps] == [updates, updates * ROLLOUTS], lines
    assert all(step.digest for step in finished.steps), lines
    assert finished.steps[0].digest != finished.steps[1].digest
    assert finished.steps[-1].digest == digest(tmp_path / "model", recipe.architecture)
    missing = [trace for trace in recipe.traces if not re.search(trace, finished.output)]
    assert not missing, missing
