"""Targets: the nn.Linear weights that LoGRA trains, found by name in a Hugging Face model."""

from dataclasses import dataclass

import torch
from torch import nn

from ..config import ConfigError


@dataclass(frozen=True)
class Target:
    """One trained weight W.

    Attributes:
        name: its Hugging Face parameter name.
        module: the nn.Linear that owns it.
        rows, width: d and k of W, whatever the shard in memory.
    """

    name: str
    module: nn.Linear
    rows: int
    width: int

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also where ZeRO-3 keeps only a partition (or nothing) in its storage."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def find_targets(model: nn.Module, names: tuple[str, ...]) -> list[Target]:
    """The targets called `names`, in the model's order.

    Args:
        model: Hugging Face model; meta tensors will do.
        names: ends of module paths ("q_proj", "mlp.up_proj"), or whole ones, as peft has them.

    Raises:
        ConfigError: a name matches no module, or one that is not an nn.Linear, or a weight that is shared with another
            parameter. The message lists what the model has.
    """
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    available = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linears))
    matched: set[str] = set()
    language = _language_model(model)
    for name in names:
        hits = [path for path, _ in model.named_modules() if path == name or path.endswith(f".{name}")]
        others = [path for path in hits if path not in linears]
        if not hits:
            raise ConfigError(
                f"--logra.target_modules {name} matches no module of the model; its linear modules are: {available}"
            )
        if others:
            kind = type(model.get_submodule(others[0])).__name__
            raise ConfigError(
                f"--logra.target_modules {name} matches {others[0]}, which is {kind} and not nn.Linear; "
                f"the model's linear modules are: {available}"
            )
        matched.update([path for path in hits if path.startswith(language)] or hits)
    targets = [
        Target(f"{path}.weight", module, *full_shape(module.weight))
        for path, module in linears.items()
        if path in matched
    ]
    _refuse_shared(model, targets)
    for target in targets:
        if type(target.module).forward is not nn.Linear.forward or "forward" in vars(target.module):
            raise ConfigError(
                f"--logra.target_modules: {target.name} belongs to a {type(target.module).__name__} with a forward of "
                "its own, which a sketch would bypass; leave it out"
            )
    return targets


def _language_model(model: nn.Module) -> str:
    """Prefix of the subtree that holds the input embeddings: in a vision-language model, not the tower. Names that
    occur in it mean the modules in it alone."""
    embeddings = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embeddings)
    parent = path.rpartition(".")[0]
    return f"{parent}." if parent else ""


def _refuse_shared(model: nn.Module, targets: list[Target]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for target in targets:
        names = owners[id(target.weight)]
        if len(names) > 1:
            raise ConfigError(
                f"--logra.target_modules: {names[-1]} shares its weight with {names[0]}, whose gradient a sketch of "
                f"the linear layer would miss; leave {names[-1].split('.')[-2]} out"
            )


def check_rank(rank: int, targets: list[Target], both_sides: bool = False) -> None:
    """Refuse a rank that some target is too narrow for, or, of both sides, too short.

    Raises:
        ConfigError: naming the target and the largest rank that fits all.
    """

    def most(target: Target) -> int:
        return min(target.rows, target.width) if both_sides else target.width

    narrowest = min(targets, key=most)
    if rank > most(narrowest):
        side = "the smaller side" if both_sides else "in_features"
        raise ConfigError(
            f"--logra.rank {rank} is above {side} {most(narrowest)} of {narrowest.name}; "
            f"the largest rank that fits every target is {most(narrowest)}"
        )
