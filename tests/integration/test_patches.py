"""A patched fork needs no start-up hook: real training by an interpreter that has none (patches/README.md)."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import FULL
from training import LOGRA_FLAGS, check_replay, check_steps, run, stock_flags

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from releases import SUPPORTED, install

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
INSTALLED = version("openrlhf")


@pytest.fixture(scope="module", params=SUPPORTED if FULL else [INSTALLED])
def python(request, tmp_path_factory) -> str:
    """An interpreter with our packages and a patched OpenRLHF in front of them. Start-up lines act in a site folder
    only, and ours is none of this interpreter's."""
    folder = tmp_path_factory.mktemp("fork")
    fork = folder / "fork"
    if request.param == INSTALLED:
        shutil.copytree(PACKAGES / "openrlhf", fork / "openrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        install(request.param, request.config.cache.mkdir("wheels"), fork)
    patch = ROOT / "patches" / f"openrlhf-{request.param}.patch"
    subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=fork, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "paths.pth").write_text(f"{fork}\n{ROOT}\n{PACKAGES}\n")
    return str(folder / "venv" / "bin" / "python")


def ask(python: str, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_there_is_no_start_up_hook(python):
    code = "import sys; print('openrlhf_logra.host.startup' in sys.modules)"
    assert ask(python, "-c", code, "--logra.probe") == "False"
    assert ask(sys.executable, "-c", code, "--logra.probe") == "True"
    code = "from importlib.util import find_spec; print(find_spec('openrlhf').origin)"
    assert ask(python, "-c", code).endswith("/fork/openrlhf/__init__.py")


def test_without_a_flag_of_ours_nothing_is_imported(python, tiny_model, tmp_path):
    script, out = Path(__file__).with_name("stock.py"), tmp_path / "out.json"
    ask(python, str(script), "namespace", str(out), "--", *stock_flags(tiny_model, tmp_path))
    seen = json.loads(out.read_text())
    assert seen["__logra_imported__"] == [] and "logra" not in seen
    assert seen["actor"]["model_name_or_path"] == str(tiny_model)


EVERY = [*(("dense", zero) for zero in range(4)), ("logra", 2)]


@pytest.mark.parametrize("method, zero", EVERY if FULL else [("dense", 1)])
def test_training(python, method, zero, tiny_model, tmp_path, monkeypatch):
    """Dense: all parameters trained by DeepSpeed on two ranks, their changed elements sent; the log replays."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    steps = 25 if FULL else 2
    flags = stock_flags(tiny_model, tmp_path, zero=zero, ranks=2, steps=steps, **{"--actor.adam.lr": 1e-3})
    flags += [*LOGRA_FLAGS, "--logra.method", method, "--logra.sync.log_dir", "records"]
    finished = run(flags, tmp_path, program=[python, "-m", "openrlhf.cli.train_ppo_ray"])
    assert finished.code == 0, finished.output[-5000:]
    roles = [role for role, _ in finished.roles()]
    assert sorted(roles) == sorted(["driver", "rollout actor", *["trainer actor"] * 2, *["vLLM process"] * 2])
    check_steps(finished, steps, "sparse" if method == "dense" else "factor")
    check_replay(tmp_path, tiny_model, finished)
