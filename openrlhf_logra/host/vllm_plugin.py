"""The vLLM entry point (`vllm.general_plugins`): runs in every vLLM process, engine cores and workers included."""

import os
from importlib.metadata import entry_points

ENABLED = "OPENRLHF_LOGRA"
ENTRY_POINT = "openrlhf_logra"


def registered() -> bool:
    """Whether vLLM's processes on this machine find our entry point: installed, not merely on the path."""
    return bool(entry_points(group="vllm.general_plugins", name=ENTRY_POINT))


def let_through() -> bool:
    """Whether vLLM's own filter, the variable VLLM_PLUGINS, lets our entry point through."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is None or ENTRY_POINT in allowed.split(",")


def register() -> None:
    """Register the weight-transfer backend where LoGRA is enabled; change nothing elsewhere. Idempotent."""
    if os.environ.get(ENABLED) != "1":
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .. import __version__
    from ..sync.worker import BACKEND
    from . import cpu

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "openrlhf_logra.sync.worker", "LograWeightTransferEngine")
    cpu.keep_vllm_weights()
    cpu.let_models_name_torchvision()
    print(f"[logra] openrlhf_logra {__version__} active in a vLLM process (pid {os.getpid()})", flush=True)
