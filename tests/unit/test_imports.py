"""Actions right before and right after an import."""

import importlib
import importlib.util
import sys

import pytest

from openrlhf_logra.host.imports import after_import, before_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that nothing has imported, and a clean sys.meta_path afterwards."""
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "watched_module"
    sys.modules.pop("watched_module", None)


def test_after_an_import_once(module):
    calls = []
    after_import(module, lambda: calls.append(sys.modules[module].VALUE))
    assert calls == []
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert calls == [1]


def test_a_look_up_is_no_import(module):
    """transformers asks whether DeepSpeed is there long before anyone imports it."""
    calls = []
    after_import(module, lambda: calls.append("after"))
    assert importlib.util.find_spec(module) is not None
    assert importlib.util.find_spec(module) is not None
    assert calls == []
    importlib.import_module(module)
    assert calls == ["after"]


def test_before_an_import(module):
    calls = []
    before_import(module, lambda: calls.append(module in sys.modules))
    importlib.import_module(module)
    assert calls == [False]


def test_at_once_where_it_is_imported_already(module):
    importlib.import_module(module)
    calls = []
    after_import(module, lambda: calls.append("after"))
    before_import(module, lambda: calls.append("before"))
    assert calls == ["after", "before"]


def test_a_module_that_does_not_exist():
    after_import("no_such_module_at_all", lambda: pytest.fail("it was not imported"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
