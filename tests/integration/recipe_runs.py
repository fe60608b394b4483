"""Runs of the recipes: their models and data, and what a run has to show."""

import json
import re
from pathlib import Path

from models import make_architecture, make_reward_model, make_vision_language_model
from training import Finished, digest_of_checkpoint

from openrlhf_logra.host.models import load_model, weights_of
from openrlhf_logra.math.digest import as_matrix, digest_block, total_digest
from recipes import RECIPES, SHIPPED, parse, updates_per_sync

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


def check_run(name: str, finished: Finished, folder: Path) -> None:
    """Every sync was verified; the checkpoint saved in `folder` is what the engines hold."""
    assert finished.code == 0, finished.output[-5000:]
    lines = [step.line for step in finished.steps]
    updates, recipe = updates_per_sync(parse(SHIPPED[name])), RECIPES[name]
    assert [step.version for step in finished.steps] == [updates, updates * ROLLOUTS], lines
    assert all(step.digest for step in finished.steps), lines
    assert finished.steps[0].digest != finished.steps[1].digest
    assert finished.steps[-1].digest == digest(folder / "model", recipe.architecture)
    missing = [trace for trace in recipe.traces if not re.search(trace, finished.output)]
    assert not missing, missing


def digest(saved: Path, architecture: str) -> str:
    """As a step line shows it."""
    if architecture != "llava":
        return digest_of_checkpoint(saved)
    # Its files do not have the names of its parameters.
    weights = weights_of(load_model(str(saved), "--checkpoint"))
    values = [digest_block(as_matrix(weight), name, as_matrix(weight).shape[1]) for name, weight in weights.items()]
    return f"{total_digest(dict(zip(weights, values))):016x}"
