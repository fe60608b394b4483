"""Several Ray nodes on one machine: a job submitted to them trains over both, and a node that cannot is named."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from raylets import Raylets
from recipe_runs import check_run, places_of
from training import LOGRA_FLAGS, Finished, run, stock_flags

import openrlhf_logra
from openrlhf_logra.host import nodes
from recipes import command

RECIPE, PER_NODE = "train_dapo_ray_hybrid_engine", {"nodes": 2, "gpus_per_node": 1}

# A job's hook, which says in which processes it ran and what the job's variable was there.
JOB_HOOK = """
import os

def setup():
    with open(os.path.join(os.environ["HOOKED"], str(os.getpid())), "w") as file:
        file.write(os.environ["NCCL_DEBUG"])
"""


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """Two nodes, of one logical GPU each. (Not in pytest's folder: sockets need short names.)"""
    with tempfile.TemporaryDirectory(prefix="logra-") as folder:
        started = Raylets(Path(folder))
        try:
            started.start_head("first", gpus=1)
            started.add("second")
            yield started
        finally:
            started.stop()


def places(raylets: Raylets, finished: Finished) -> dict[str, list[str]]:
    """Of each actor class of ours, on which nodes its actors were."""
    from ray.util.state import list_actors, list_nodes

    names = {node.node_id: node.node_name for node in list_nodes(address=raylets.dashboard)}
    found: dict[str, list[str]] = {}
    for actor in list_actors(address=raylets.dashboard, detail=True):
        if str(actor.pid) in {pid for _, pid in finished.roles()}:
            found.setdefault(actor.class_name, []).append(names[actor.node_id])
    return found


def test_a_job_trains_over_both_nodes(raylets, tmp_path):
    """A recipe through `ray job submit`, with a runtime environment that names what OpenRLHF's and ours do too."""
    work, hooked = tmp_path / "work", tmp_path / "hooked"
    work.mkdir()
    hooked.mkdir()
    (work / "job_hook.py").write_text(JOB_HOOK)
    variables = {"NCCL_DEBUG": "INFO", "HOOKED": str(hooked), "RAY_DEDUP_LOGS": "0"}
    job = {"working_dir": str(work), "worker_process_setup_hook": "job_hook.setup", "env_vars": variables}
    submit = raylets.submit("--runtime-env-json", json.dumps(job))
    nodes_of = {f"--{model}.num_{what}": n for model in ("actor", "ref") for what, n in PER_NODE.items()}
    flags = [*command(RECIPE, {**places_of(RECIPE, tmp_path), **nodes_of}), *LOGRA_FLAGS]
    program = [*submit, sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    finished = run(flags, tmp_path, timeout=900, program=program)
    check_run(RECIPE, finished, tmp_path)
    assert all("sync factor" in step.line for step in finished.steps)

    where = places(raylets, finished)
    assert sorted(where["LograPolicyModelActor"]) == ["first", "second"], where
    assert len(where["LograRolloutRayActor"]) == 1

    roles = [role for role, _ in finished.roles()]
    assert sorted(roles) == sorted(["driver", *["trainer actor"] * 2, "rollout actor", *["vLLM process"] * 4])
    actors = {pid for role, pid in finished.roles() if role in ("trainer actor", "rollout actor")}
    values = {path.name: path.read_text() for path in hooked.iterdir()}
    assert actors <= set(values) and set(values.values()) == {"INFO"}


def test_nodes_that_cannot_run_it_are_named(raylets, tiny_model, tmp_path):
    """One without the package, one with another release of it: one line, before any model is loaded. The driver finds
    the cluster as one does where `ray start` was run, without RAY_ADDRESS."""
    for name in ("without", "older"):
        (tmp_path / name).mkdir()
    (tmp_path / "without" / "openrlhf_logra.py").write_text("raise ModuleNotFoundError('No such package')\n")
    copy = tmp_path / "older" / "openrlhf_logra"
    shutil.copytree(Path(openrlhf_logra.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    init = copy / "__init__.py"
    init.write_text(init.read_text().replace(openrlhf_logra.__version__, "0.0.9"))
    raylets.add("without", path=tmp_path / "without")
    raylets.add("older", path=tmp_path / "older")

    flags = [*stock_flags(tiny_model, tmp_path), *LOGRA_FLAGS]
    program = ["env", f"RAY_TMPDIR={raylets.folder.parent}", sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    finished = run(flags, tmp_path, program=program)
    assert finished.code == 2, finished.output[-5000:]
    (line,) = [line for line in finished.output.splitlines() if line.startswith("openrlhf_logra: error: ")]
    first, second = sorted(line.partition("error: ")[2].split("; node "), key=lambda text: "older" in text)
    assert " without cannot start a worker" in first and nodes.INSTALL in first
    assert " older has openrlhf_logra 0.0.9" in second and "docs/cluster.md" in second
    assert [role for role, _ in finished.roles()] == ["driver"]
