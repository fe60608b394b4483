"""Installed and not enabled, nothing changes: same namespace, same objects, same bits."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from training import stock_flags

from openrlhf_logra.host.cpu import quiet_port

SCRIPT = Path(__file__).with_name("stock.py")


def run(mode: str, out: Path, *rest: str, installed: bool) -> dict:
    """stock.py, with the package installed or as if it were not (no site: no .pth files, so no editable finder)."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(quiet_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flags = []
    if not installed:
        flags, environment["LOGRA_TEST_SITE"] = ["-S"], sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        [sys.executable, *flags, str(SCRIPT), mode, str(out), *rest],
        env=environment,
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_without_site_the_package_cannot_be_imported(tmp_path):
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('openrlhf_logra') is not None)"
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path).returncode == 0
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 1


def test_the_parsed_namespace_is_the_stock_one(tiny_model, tmp_path):
    flags = stock_flags(tiny_model, tmp_path, **{"--logger.wandb.run_name": "fixed"})
    with_package = run("namespace", tmp_path / "with.json", "--", *flags, installed=True)
    without = run("namespace", tmp_path / "without.json", "--", *flags, installed=False)
    assert with_package == without and "logra" not in with_package
    assert with_package["__logra_imported__"] == []


def test_every_object_is_the_stock_one(tmp_path):
    seen = run("identity", tmp_path / "identity.json", installed=True)
    assert seen["imported_before_vllm_plugins"] == []
    assert seen["foreign"] == []
    assert seen["backends"] == ["ipc", "nccl", "sharded_rdt", "sparse_nccl"]
    assert not any(module.startswith("openrlhf_logra") for module in seen["finders"])
    # vLLM imports every entry point; ours looks at one environment variable.
    assert seen["imported"] in ([], ["openrlhf_logra", "openrlhf_logra.host", "openrlhf_logra.host.vllm_plugin"])


@pytest.fixture(scope="module")
def stock_weights(tiny_model, tmp_path_factory):
    return run("steps", tmp_path_factory.mktemp("stock") / "without.json", str(tiny_model), installed=False)


def test_five_actor_steps_are_bit_equal(tiny_model, tmp_path, stock_weights):
    with_package = run("steps", tmp_path / "with.json", str(tiny_model), installed=True)
    assert with_package == stock_weights
