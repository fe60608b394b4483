"""What a strategy class, perhaps another package's, is held to: when it is registered, and before training starts."""

import inspect

from torch import nn

from ..config import ConfigError, LograConfig, blamed
from ..train.coverage import render
from . import strategy_class
from .base import Strategy


def make_strategy(config: LograConfig, model: nn.Module) -> Strategy:
    """The strategy of `--logra.method` for a model on the meta device, asked for what a trainer needs at its start.

    Raises:
        ConfigError: flags and model do not fit, or the class is at fault; the message names it and the place.
    """
    cls = strategy_class(config.method)
    try:
        strategy = cls(config, model)
        _check_claims(strategy)
        render(strategy.coverage())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--logra.method {config.method}: {full_name(cls)} fails: {blamed(error)}") from error
    return strategy


def _check_claims(strategy: Strategy) -> None:
    """Raise ValueError where attributes contradict methods or each other."""
    known, trained = strategy.parameters(), set(strategy.trained)
    strange = [name for name in strategy.trained if name not in known]
    if strange:
        raise ValueError(f"`trained` names {strange[0]}, which is none of `parameters()`")
    untold = [name for name in strategy.dense if name not in trained]
    if untold:
        raise ValueError(f"`dense` names {untold[0]}, which is not in `trained`")
    if strategy.can_probe and type(strategy).along is Strategy.along:
        raise ValueError("`can_probe` needs a method along")


def misfit(cls: type, base: type) -> str | None:
    """The first public method of `base` that a class lacks or cannot be called with the same arguments, or None."""
    for name in vars(base):
        expected, found = getattr(base, name), getattr(cls, name, None)
        if name.startswith("_") or not inspect.isroutine(expected):
            continue
        if not callable(found) or getattr(found, "__isabstractmethod__", False):
            return f"has no method {name}"
        arguments, taken = inspect.signature(expected).parameters, inspect.signature(found)
        try:
            taken.bind(*arguments)
        except TypeError:
            return f"has {name}({', '.join(taken.parameters)}), called as {name}({', '.join(arguments)})"
    return None


def full_name(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
