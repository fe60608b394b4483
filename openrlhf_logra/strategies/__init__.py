"""Strategies: what happens to the gradients at an accumulation boundary. One name, one class (`--logra.method`)."""

from importlib import import_module

_STRATEGIES = {
    "logra": "openrlhf_logra.strategies.logra:LograStrategy",
    "dense": "openrlhf_logra.strategies.dense:DenseStrategy",
}


def strategy_names() -> tuple[str, ...]:
    """Names that `--logra.method` accepts."""
    return tuple(_STRATEGIES)


def strategy_class(name: str) -> type:
    """The class registered under `name`; its module is imported only now.

    Raises:
        KeyError: no strategy has this name.
    """
    module, _, attribute = _STRATEGIES[name].partition(":")
    return getattr(import_module(module), attribute)
