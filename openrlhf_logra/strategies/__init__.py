"""Strategies: what happens to the gradients at an accumulation boundary. One name, one class (`--logra.method`).

A package of its own brings one with an entry point that names the module in which it is registered:

    [project.entry-points."openrlhf_logra.strategies"]
    lion = "my_package.lion"               # whose class is decorated with @register_strategy("lion")
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

ENTRY_POINTS = "openrlhf_logra.strategies"
_BUILT_IN = {name: f"{__name__}.{name}" for name in ("logra", "galore", "fira", "flora", "lora", "dense")}
_registered: dict[str, type] = {}


def register_strategy(name: str) -> Callable[[type], type]:
    """Decorator: `--logra.method name` means this class.

    Raises:
        ValueError: another class has the name, or it is a built-in one's.
        TypeError: the class is no Strategy, or one that cannot be called as the host calls them.
    """

    def register(cls: type) -> type:
        from .base import Strategy
        from .checks import full_name, misfit

        if not (isinstance(cls, type) and issubclass(cls, Strategy)):
            raise TypeError(f"strategy {name!r}: {getattr(cls, '__qualname__', cls)} does not derive from Strategy")
        if _BUILT_IN.get(name, cls.__module__) != cls.__module__:
            raise ValueError(f"strategy {name!r} is a built-in one already; give {full_name(cls)} another name")
        known = _registered.get(name, cls)
        if full_name(known) != full_name(cls):
            raise ValueError(f"strategy {name!r} is {full_name(known)} already; give {full_name(cls)} another name")
        problems = (misfit(cls, base) for base in cls.__mro__ if base.__module__.startswith(f"{__name__}."))
        problem = next(filter(None, problems), None)
        if problem:
            raise TypeError(f"strategy {name!r}: {full_name(cls)} {problem}")
        _registered.setdefault(name, cls)
        return cls

    return register


def strategy_names() -> tuple[str, ...]:
    """Names that `--logra.method` accepts: built in, then those of other packages."""
    return tuple(dict.fromkeys([*_BUILT_IN, *_registered, *(point.name for point in _points())]))


def strategy_class(name: str) -> type:
    """The class registered under `name`; its module is imported only now.

    Raises:
        ValueError: no strategy has this name, several packages bring one, or its entry point names a module that does
            not register it.
    """
    if name not in _registered:
        modules = {_BUILT_IN[name]} if name in _BUILT_IN else set()
        modules |= {point.module for point in _points() if point.name == name}
        if not modules:
            raise ValueError(f"strategy {name!r} is none of {', '.join(strategy_names())}")
        if len(modules) > 1:
            raise ValueError(f"strategy {name!r} is in {' and in '.join(sorted(modules))}; keep one package")
        (module,) = modules
        import_module(module)
        if name not in _registered:
            raise ValueError(f"{module} registers no strategy {name!r}")
    return _registered[name]


def _points():
    return entry_points(group=ENTRY_POINTS)
