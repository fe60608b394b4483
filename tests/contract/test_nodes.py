"""The gate of a cluster (host/nodes.py), with a stand-in for Ray; tests/integration/test_cluster.py has real nodes."""

import re
from types import SimpleNamespace

import pytest
import ray

from openrlhf_logra.host import cpu, nodes, versions, vllm_plugin


def node(name: str, alive: bool = True, **resources: float) -> dict:
    return {
        "NodeID": name.encode().hex().ljust(56, "0"),
        "NodeManagerAddress": "10.0.0.7",
        "NodeManagerHostname": "host",
        "NodeName": name,
        "Alive": alive,
        "Resources": {"memory": 1.0, **resources},
    }


@pytest.fixture
def asked(monkeypatch):
    """Ray of three nodes, two of which get no process; what a task raises is what `ray.get` raises."""
    places = []

    def remote(function):
        def options(scheduling_strategy, **_):
            places.append(bytes.fromhex(scheduling_strategy.node_id).decode().rstrip("\0"))
            return SimpleNamespace(remote=lambda: function)

        return SimpleNamespace(options=options)

    cluster = [node("works", CPU=1.0), node("dead", alive=False, CPU=1.0), node("serves")]
    monkeypatch.setattr(ray, "nodes", lambda: cluster)
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", lambda function, timeout: function())
    return places


def test_a_cluster_that_can_run_it(asked):
    assert nodes.gate() is None and asked == ["works"]


def test_a_node_with_a_gpu_and_a_driver_without(asked, monkeypatch):
    answers = iter((False, True))  # the driver, the node
    monkeypatch.setattr(cpu, "has_gpu", lambda: next(answers))
    assert nodes.gate().startswith("node 10.0.0.7 host works has a GPU, and the driver's machine none")


def test_a_node_with_the_package_on_its_path_only(asked, monkeypatch):
    monkeypatch.setattr(vllm_plugin, "registered", lambda: False)
    assert "works has openrlhf_logra on its path only" in nodes.gate() and nodes.INSTALL in nodes.gate()


def test_a_node_with_other_releases_of_the_host(asked, monkeypatch):
    monkeypatch.setattr(versions, "gate", lambda allow_untested: None if allow_untested else "vllm 0.1 is untested")
    assert nodes.gate() == "node 10.0.0.7 host works has other releases: vllm 0.1 is untested"
    assert nodes.gate(allow_untested=True) is None


@pytest.mark.parametrize(
    "error, says",
    [
        (ray.exceptions.WorkerCrashedError(), f"works cannot start a worker.*{nodes.__version__}"),
        (ray.exceptions.RuntimeEnvSetupError("no such package"), "works cannot run a task: .*no such package"),
        (ray.exceptions.GetTimeoutError("Get timed out"), "works cannot run a task: Get timed out"),
    ],
)
def test_a_node_that_does_not_answer(asked, monkeypatch, error, says):
    def fail(reference, timeout):
        raise error

    monkeypatch.setattr(ray, "get", fail)
    assert re.search(says, nodes.gate())
