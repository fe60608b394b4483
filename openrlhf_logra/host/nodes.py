"""The gate of a cluster: every node that may get our processes can run them, before anything expensive starts."""

import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import __version__
from . import cpu

_ANSWER_SECONDS = 900  # Ray alone gives a node ten minutes to prepare a job's working directory and packages
INSTALL = f"install openrlhf_logra {__version__} there, for the Python that `ray start` runs under (docs/cluster.md)"


def gate(allow_untested: bool = False) -> str | None:
    """One line that says which nodes of the cluster cannot run our processes, each with the way out; or None.

    Args:
        allow_untested: let versions of the host's packages pass that are not tested (the override flag).
    """
    wanted, gpu_here, install = __version__, cpu.has_gpu(), INSTALL

    def problem() -> str | None:
        # A closure, so that Ray sends the code itself: the node's openrlhf_logra may be one without this module.
        import openrlhf_logra

        if openrlhf_logra.__version__ != wanted:
            return f"has openrlhf_logra {openrlhf_logra.__version__}, the driver has {wanted}; {install}"

        from openrlhf_logra.host import cpu, versions, vllm_plugin

        if not vllm_plugin.registered():
            return f"has openrlhf_logra on its path only, where vLLM does not find it; {install}"
        if cpu.has_gpu() and not gpu_here:
            return "has a GPU, and the driver's machine none, which decides; start the driver on a node with GPUs"
        other = versions.gate(allow_untested)
        return other and f"has other releases: {other}"

    asked = []
    for node in ray.nodes():
        if node["Alive"] and {"CPU", "GPU"} & set(node["Resources"]):  # others get no process of ours
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(problem).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
            asked.append((_name(node), task.remote()))
    deadline = time.monotonic() + _ANSWER_SECONDS
    found = [(node, _answer(reference, deadline)) for node, reference in asked]
    return "; ".join(f"node {node} {answer}" for node, answer in found if answer) or None


def _name(node: dict) -> str:
    return " ".join(dict.fromkeys(node[key] for key in ("NodeManagerAddress", "NodeManagerHostname", "NodeName")))


def _answer(reference: ray.ObjectRef, deadline: float) -> str | None:
    try:
        return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.WorkerCrashedError:
        return f"cannot start a worker, most likely for want of openrlhf_logra; {INSTALL}"
    except ray.exceptions.RayError as error:
        return f"cannot run a task: {' '.join(str(error).split())}"
