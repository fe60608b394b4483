"""CPU stand-ins: everything that lets the real stack run on a machine without a GPU, and nothing else.

OpenRLHF says `cuda` in a dozen places and imports flash_attn at module top; vLLM packs its linear weights for oneDNN,
so that they could not be patched in place. Where there is a GPU none of this is active.
"""

import importlib
import importlib.machinery
import os
import socket
import sys
import types
import warnings
from functools import wraps
from pathlib import Path
from random import SystemRandom

from . import cpu_attention
from .imports import after_import

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def has_gpu() -> bool:
    """Whether this machine has a GPU, visible to this process or not.

    By device file: Ray hides GPUs from actors that asked for none, and asking CUDA too early fixes its view of
    them.
    """
    return any(Path(path).exists() for path in _DEVICE_FILES)


def install() -> None:
    """Put the stand-ins of a trainer or driver process in place. Idempotent; does nothing where there is a GPU."""
    if has_gpu() or isinstance(sys.modules.get("flash_attn"), _StandIn):
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    _install_flash_attn()
    _install_cuda_names()
    multiply_in_float32()
    after_import("deepspeed", _wait_for_every_gather)
    after_import("deepspeed", _offload_states_of_adamw)
    after_import("deepspeed", _compile_nothing)
    after_import("transformers.modeling_utils", cpu_attention.install)


# ---- flash_attn: what openrlhf/models/ring_attn_utils.py imports ----------------------------------------------------


class _StandIn(types.ModuleType):
    """A module that says what it is when something else of the real one is asked for."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self.__name__}.{name} has no CPU stand-in; {self._reason}")


def _stand_in(name: str, reason: str, **contents) -> _StandIn:
    module = _StandIn(name, "CPU stand-in of openrlhf_logra")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(contents, _reason=reason)
    sys.modules[name] = module
    return module


def _install_flash_attn() -> None:
    import torch
    from einops import rearrange

    def unpad_input(hidden_states, attention_mask):
        lengths = attention_mask.sum(-1, dtype=torch.int32)
        indices = attention_mask.flatten().nonzero().flatten()
        bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, int(lengths.max()), lengths

    def index_first_axis(values, indices):
        return values[indices]

    def pad_input(hidden_states, indices, batch, seqlen):
        padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
        return padded.index_put((indices,), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])

    reason = "flash_attn needs a GPU"
    padding = _stand_in(
        "flash_attn.bert_padding",
        reason,
        index_first_axis=index_first_axis,
        pad_input=pad_input,
        rearrange=rearrange,
        unpad_input=unpad_input,
    )
    distributed = _stand_in("flash_attn.utils.distributed", reason, all_gather=cpu_attention.gather_differentiably)
    utils = _stand_in("flash_attn.utils", reason, distributed=distributed)
    _stand_in("flash_attn", reason, bert_padding=padding, utils=utils)


# ---- torch.cuda and device names ------------------------------------------------------------------------------------


class _CpuDevice(str):
    """Stands where OpenRLHF expects the number of the current GPU: a device name for `.to()`, a number in text."""

    def __format__(self, spec: str) -> str:
        return "0"


def _install_cuda_names() -> None:
    import torch
    import torch.distributed.device_mesh as device_mesh

    torch.cuda.current_device = lambda: _CpuDevice("cpu")
    for name in ("set_device", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)

    init_device_mesh = device_mesh.init_device_mesh

    @wraps(init_device_mesh)
    def on_cpu(device_type, *args, **kwargs):
        return init_device_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = on_cpu


# ---- bf16 matrix products -------------------------------------------------------------------------------------------

_library = None


def multiply_in_float32() -> None:
    """Compute bf16 products in float32 where the CPU has no bf16 instructions: ten times faster, and rounded once."""
    global _library
    import torch

    if _library is not None or torch.cpu._is_avx512_bf16_supported():
        return

    aten = torch.ops.aten

    def wide(out_variant, tensors, **scalars):
        dtype = tensors[0].dtype
        if dtype is torch.bfloat16:
            tensors = [tensor.float() for tensor in tensors]
        out = torch.empty(0, dtype=tensors[0].dtype)
        return out_variant(*tensors, **scalars, out=out).to(dtype)

    _library = torch.library.Library("aten", "IMPL")
    kernels = {
        "mm": lambda a, b: wide(aten.mm.out, [a, b]),
        "bmm": lambda a, b: wide(aten.bmm.out, [a, b]),
        "addmm": lambda c, a, b, beta=1, alpha=1: wide(aten.addmm.out, [c, a, b], beta=beta, alpha=alpha),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the point
        for name, kernel in kernels.items():
            _library.impl(name, kernel, "CPU", allow_override=True)


# ---- ports ----------------------------------------------------------------------------------------------------------


def quiet_port() -> int:
    """A free port that nothing is likely to take before it is used.

    OpenRLHF asks the system for one a minute before the process group listens on it; with everything on one machine,
    Ray and vLLM ask for hundreds from the same range meanwhile. This one lies below that range, and where there is
    room above the ports that Ray gives its workers (10002 to 19999).
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(20_000, lowest) if lowest >= 21_000 else range(10_000, 20_000)
    for port in SystemRandom().sample(ports, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of a hundred ports from {ports.start} to {ports.stop - 1} is free")


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


def _wait_for_every_gather() -> None:
    """ZeRO-3's blocking gather waits for its last handle only: enough on a CUDA stream, not for gloo's threads, where
    it leaves a random parameter half-gathered."""
    import deepspeed.comm as comm

    gather = comm.all_gather_into_tensor

    @wraps(gather)
    def blocking(*args, **kwargs):
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    comm.all_gather_into_tensor = blocking


def _compile_nothing() -> None:
    """DeepSpeed's process group begins by compiling an all-reduce for inference, which nothing here calls: a minute of
    a core for every folder it is installed in; and who is stopped meanwhile leaves a lock that all wait for, for ever.
    """
    # (As an attribute of its package the name is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def _offload_states_of_adamw() -> None:
    """DeepSpeed's sleep moves the states of its fused Adam, a GPU kernel, and of no other optimizer by name; torch's
    AdamW, which runs instead, calls them the same."""
    import deepspeed.ops.adam.fused_adam as fused_adam
    import torch

    fused_adam.FusedAdam = torch.optim.AdamW


# ---- vLLM -----------------------------------------------------------------------------------------------------------


# vLLM's CPU platform has no Ray executor; and it turns "uni" into a process of its own, which a class path avoids.
EXECUTORS = {"ray": "mp", "uni": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def give_each_worker_a_core(workers: int) -> None:
    """vLLM gives every worker of a tensor-parallel engine a NUMA node of its own, of which one machine may have too
    few."""
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[worker % len(cores)]) for worker in range(workers))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)


def let_models_name_torchvision() -> None:
    """vLLM's models of images import torchvision by way of transformers, to name classes that they do not use; it does
    not import beside a torch without CUDA."""
    from transformers.utils import is_torchvision_available

    if has_gpu() or is_torchvision_available():  # transformers asks once and keeps the answer
        return
    functional = _stand_in("torchvision.transforms.v2.functional", "images are processed by PIL")
    v2 = _stand_in("torchvision.transforms.v2", "images are processed by PIL", functional=functional)
    _stand_in("torchvision.transforms", "images are processed by PIL", v2=v2)
    _stand_in("torchvision", "images are processed by PIL")


def keep_vllm_weights() -> None:
    """Let vLLM compute with `layer.weight` itself: its CPU dispatch keeps a packed copy and empties the parameter."""
    if has_gpu():
        return
    import torch
    from vllm.model_executor.layers import utils

    def plain_linear(layer, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
    multiply_in_float32()
