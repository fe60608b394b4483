"""A model's structure without its weights, as OpenRLHF would load it."""

from pathlib import Path

import torch
from torch import nn

from ..config import ConfigError, one_line


def load_skeleton(path: str, flag: str = "--actor.model_name_or_path") -> nn.Module:
    """The model of a directory or hub name on the meta device: modules, names and shapes, no weights. `flag` is named
    in errors.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if looks_local(path) and not Path(path).is_dir():
        raise ConfigError(f"{flag} {path}: no such directory")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: has no config.json; is it a Hugging Face model?")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantised, and cannot be updated in place; give the bf16 model")
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            return auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: cannot be loaded: {one_line(error)}") from error


def looks_local(path: str) -> bool:
    """Whether a name can only be a path: hub names have at most one slash and begin with a letter or number."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
