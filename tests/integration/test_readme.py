"""Every command of the README is run: here, by the test named beside it, or by being this test run itself."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FULL
from training import leave_nothing

ROOT = Path(__file__).parents[2]

# command -> where it is run
RUN_BY = {
    "bash recipes/demo.sh": "test_demo",
    "SEED=2 bash recipes/demo.sh": "test_demo",
    "bash tests/run.sh": "this test run",
    "pip install --no-deps .": "tests/contract/test_packaging.py",
    "python -m openrlhf.cli.train_ppo_ray <your flags> --logra.enable": "tests/integration/test_train.py",
    "openrlhf-logra train <your flags> --logra.enable": "tests/integration/test_train.py",
    "python -m openrlhf.cli.train_ppo_ray --logra.enable --help": "tests/integration/test_refusals.py",
    "openrlhf-logra doctor": "test_doctor",
    "openrlhf-logra describe --model DIR --logra.rank 64": "test_describe",
    "openrlhf-logra report RUN": "test_demo",
    "openrlhf-logra replay --base MODEL --records DIR --step N --out OUT": "tests/unit/test_replay.py",
    "openrlhf-logra verify --checkpoint OUT --records DIR": "tests/unit/test_replay.py",
    "pip uninstall openrlhf-logra": "tests/contract/test_packaging.py",
}
STARTS = ("bash ", "SEED=", "pip ", "python ", "openrlhf-logra ")


def commands() -> set[str]:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    inline = [
        " ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    return {line for line in [*lines, *inline] if line.startswith(STARTS) and not line.endswith("...")}


def test_every_command_is_run_somewhere():
    assert commands() == set(RUN_BY)
    for place in RUN_BY.values():
        assert place in globals() or place == "this test run" or (ROOT / place).is_file(), place


def tool(*arguments: str) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name("openrlhf-logra")
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=120)


def test_doctor():
    done = tool("doctor")
    assert done.returncode == 0, done.stdout
    assert "all right" in done.stdout


def test_describe(tiny_model):
    done = tool("describe", "--model", str(tiny_model), "--logra.rank", "64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"q_proj +2 +64 x 64 +64", done.stdout)
    sketched, frozen, total = (int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}(?= |$)", done.stdout)[:3])
    assert sketched + frozen == total


@pytest.mark.parametrize("arguments", [["--logra.rank", "65"], ["--logra.target_modules", "none"]])
def test_describe_refuses(tiny_model, arguments):
    done = tool("describe", "--model", str(tiny_model), *arguments)
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("openrlhf-logra describe: ")]) == 1
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_describe_loads_no_weights(tiny_model, tmp_path):
    """A model directory without its weights will do."""
    copy = tmp_path / "bare"
    shutil.copytree(tiny_model, copy)
    (copy / "model.safetensors").unlink()
    assert tool("describe", "--model", str(copy), "--logra.rank", "8").returncode == 0


def test_demo(tmp_path):
    """The demo, cut to two steps unless --full: its table, figures and pictures."""
    short = [] if FULL else ["--data.max_samples", "128", "--eval.steps", "2"]
    environment = {**os.environ, "SEED": "2", "RUN": str(tmp_path / "run"), "LOGRA_TEST_RUN": tmp_path.name}
    try:
        done = subprocess.run(
            ["bash", "recipes/demo.sh", *short], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
    finally:
        leave_nothing(tmp_path.name)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) == {
        "pass1_before",
        "pass1_after",
        "pass4_before",
        "pass4_after",
        "sync_bytes",
        "full_bytes",
        "state_bytes",
        "dense_state_bytes",
        "updates",
        "seconds",
        "seed",
    }
    assert summary["seed"] == 2 and 0.2 < summary["pass1_before"] < 0.45
    assert summary["sync_bytes"] < summary["full_bytes"] and summary["state_bytes"] < summary["dense_state_bytes"]
    for name in ("report.png", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 10_000
    assert "Held-out pass@1" in done.stdout and "Weight sync" in done.stdout
    steps = re.findall(r"\[logra\] step \d+:.* digest ok", done.stdout)
    assert len(steps) == (48 if FULL else 2)
    if FULL:
        assert summary["pass1_after"] > summary["pass1_before"] + 0.10


def test_demo_refuses_a_bad_seed():
    done = subprocess.run(
        ["bash", "recipes/demo.sh"],
        cwd=ROOT,
        env={**os.environ, "SEED": "x"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "SEED is 'x'" in done.stderr
