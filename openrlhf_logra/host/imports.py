"""Run something right before or right after a module is imported for the first time."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


def before_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` when module `name` is about to be imported (at once, if it has been already)."""
    _watch(name, before=action)


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` when module `name` has been imported (at once, if it has been already)."""
    _watch(name, after=action)


def _watch(name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> None:
    if name in sys.modules:
        (before or after)()
    else:
        sys.meta_path.insert(0, _Watcher(name, before, after))


class _Watcher(importlib.abc.MetaPathFinder):
    def __init__(self, name, before, after):
        self._name, self._before, self._after = name, before, after
        self._done = self._looking = False

    def find_spec(self, name, path=None, target=None):
        if name != self._name or self._done or self._looking:
            return None
        if self._before:
            self._done = True
            self._before()
            return None
        # Others look a module up without importing it (transformers does, for DeepSpeed): only its execution counts.
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if not self._done:
                    self._done = True
                    self._after()

            spec.loader.exec_module = exec_module
        return spec
