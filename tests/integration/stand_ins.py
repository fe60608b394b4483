"""The tests' own CPU stand-ins, for stock OpenRLHF without the package: enough to import it and step an actor."""

import importlib.machinery
import sys
import types


def install() -> None:
    import torch
    import torch.distributed.device_mesh as device_mesh

    def module(name: str, **contents) -> None:
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        made.__dict__.update(contents)
        sys.modules[name] = made

    def missing(*_args, **_kwargs):
        raise NotImplementedError("needs flash_attn")

    padding = dict.fromkeys(("index_first_axis", "pad_input", "rearrange", "unpad_input"), missing)
    module("flash_attn")
    module("flash_attn.bert_padding", **padding)
    module("flash_attn.utils")
    module("flash_attn.utils.distributed", all_gather=missing)

    torch.cuda.current_device = lambda: "cpu"
    for name in ("set_device", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)
    stock_mesh = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *args, **kwargs: stock_mesh("cpu", *args, **kwargs)
