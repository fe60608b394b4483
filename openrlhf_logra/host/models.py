"""A model as OpenRLHF would load it: its structure alone, or with its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import ConfigError, one_line


def load_skeleton(path: str, flag: str = "--actor.model_name_or_path") -> nn.Module:
    """The model of a directory or hub name on the meta device: modules, names and shapes, no weights. `flag` is named
    in errors.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
    """

    def build(auto: type, config: Any) -> nn.Module:
        with torch.device("meta"):
            return auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)

    return _load(path, flag, build)


def load_model(path: str, flag: str) -> nn.Module:
    """The model of a directory or hub name on the CPU, with its weights as the trainer holds them after loading: every
    parameter in bf16. `flag` is named in errors.

    Raises:
        ConfigError: there is no such model, it cannot be loaded, or its checkpoint lacks some of it.
    """

    def build(auto: type, config: Any) -> nn.Module:
        settings = {"dtype": torch.bfloat16, "trust_remote_code": True, "output_loading_info": True}
        model, loading = auto.from_pretrained(path, **settings)
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(f"its checkpoint lacks {missing[0]} ({len(missing)} tensors in all)")
        return model

    model = _load(path, flag, build)
    for parameter in model.parameters():
        # transformers keeps some (routers, say) in float32; DeepSpeed's bf16 engine does not.
        parameter.data = parameter.data.to(torch.bfloat16).contiguous()
    return model


def persistent_buffers(model: nn.Module) -> list[str]:
    """What a checkpoint holds beside parameters: no training changes it, and no record states it."""
    return sorted(set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)})


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors by name, a tied one once."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _load(path: str, flag: str, build: Callable[[type, Any], nn.Module]) -> nn.Module:
    """`build(auto class, configuration)`, where the path is a model that can be trained."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"{flag} {path}: no such directory")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: has no config.json; is it a Hugging Face model?")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantised, and cannot be updated in place; give the bf16 model")
        return build(AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM, config)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: cannot be loaded: {one_line(error)}") from error


def looks_local(path: str) -> bool:
    """Whether a name can only be a path: hub names have at most one slash and begin with a letter or number."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
