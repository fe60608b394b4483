"""The registry: names, entry points of other packages, and what it refuses."""

import math
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from test_adapters import adapted
from test_sketch import NAMES
from toy import Toy, batch, loss_of

from openrlhf_logra import strategies
from openrlhf_logra.config import ConfigError, LograConfig
from openrlhf_logra.strategies import register_strategy, strategy_class, strategy_names
from openrlhf_logra.strategies.base import Strategy
from openrlhf_logra.strategies.checks import make_strategy
from openrlhf_logra.strategies.gradient import GradientStrategy
from openrlhf_logra.strategies.targeted import TargetedStrategy

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
BUILT_IN = ("logra", "galore", "fira", "flora", "lora", "dense")
MODULE = """
from openrlhf_logra.strategies import register_strategy
from openrlhf_logra.strategies.dense import DenseStrategy

@register_strategy("{registered}")
class Mine(DenseStrategy):
    pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an installed package of somebody else's whose entry point is called `named`."""

    def make(named, registered=None, source=None):
        info = tmp_path / "somebodys-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[openrlhf_logra.strategies]\n{named} = somebodys_{named}\n")
        (tmp_path / f"somebodys_{named}.py").write_text(source or MODULE.format(registered=registered or named))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    for name in [name for name in strategies._registered if name not in BUILT_IN]:
        del strategies._registered[name]
    for module in [module for module in sys.modules if module.startswith("somebodys_")]:
        del sys.modules[module]


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_built_in(name):
    assert name in strategy_names()
    assert issubclass(strategy_class(name), Strategy)
    LograConfig(enable=True, method=name).validate()


def test_names_need_no_strategy_module():
    code = (
        "import sys; from openrlhf_logra.strategies import strategy_names; strategy_names();"
        "print([m for m in sys.modules if m.startswith('openrlhf_logra.strategies.') or m == 'torch'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_another_package_is_found_by_its_entry_point(package):
    package("lion")
    assert "lion" in strategy_names()
    LograConfig(method="lion").validate()
    assert strategy_class("lion").__module__ == "somebodys_lion"
    with torch.device("meta"):
        model = Toy()
    assert strategy_class("lion")(LograConfig(method="lion"), model).trained
    assert LograConfig(method="lion").unused_flags == ("kl.*", *strategy_class("dense").unused_flags)


@pytest.mark.parametrize(
    "source, words",
    [
        (None, "registers no strategy 'lion'"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        (MODULE.format(registered="logra"), "'logra' is a built-in one already"),
    ],
)
def test_a_package_that_brings_none_is_named(package, source, words):
    strategy_class("logra")
    package("lion", registered="tiger", source=source)
    with pytest.raises(ConfigError, match=words) as error:
        LograConfig(method="lion").validate()
    assert "--logra.method lion" in str(error.value) and "\n" not in str(error.value)


HEAD = """
from openrlhf_logra.strategies import register_strategy
from openrlhf_logra.strategies.base import HostTrained, Strategy
from openrlhf_logra.strategies.dense import DenseStrategy
from openrlhf_logra.strategies.gradient import GradientStrategy
from openrlhf_logra.strategies.targeted import TargetedStrategy

class Rule:
    def step(self, gradient): ...
    def state_bytes(self, rows, cols): return 0

@register_strategy("lion")
"""
DENSE = "class Lion(DenseStrategy):\n    "


@pytest.mark.parametrize(
    "source, words",
    [
        ("class Lion(Strategy): pass", r"Lion has no method coverage"),
        (
            "class Lion(TargetedStrategy):\n    def coverage(self): ...",
            r"Lion has no method (forward|columns|propose)",
        ),
        ("class Lion(GradientStrategy): pass", r"Lion has no method make_rule"),
        (
            f"{DENSE}def commit(self, alpha): ...",
            r"Lion has commit\(self, alpha\), called as commit\(self, proposal, alpha\)",
        ),
        (
            f"{DENSE}def default_refresh(self, optimizer): ...",
            r"Lion has default_refresh\(self, optimizer\), called as",
        ),
        (f"{DENSE}state_dict = None", r"Lion has no method state_dict"),
        (
            f"{DENSE}pass\n@register_strategy('lion')\nclass Puma(Lion): pass",
            r"'lion' is \S+Lion already; give \S+Puma another",
        ),
        ("Lion = None", "SyntaxError: invalid syntax .*somebodys_lion.py, line"),
        (f"{DENSE}pass\n1 / 0", r"ZeroDivisionError: division by zero \(\S+somebodys_lion.py:\d+\)"),
        (
            f"{DENSE}@classmethod\n    def default_refresh(cls, optimizer): return {{}}[optimizer]",
            "KeyError: 'row_adam'",
        ),
    ],
)
def test_a_class_that_cannot_be_called_is_named(package, source, words):
    package("lion", source=HEAD + source)
    with pytest.raises(ConfigError, match=words) as error:
        LograConfig(method="lion")
    assert str(error.value).startswith("--logra.method lion: cannot be loaded: ") and "\n" not in str(error.value)
    assert "somebodys_lion" in str(error.value)


@pytest.mark.parametrize(
    "source, words",
    [
        (f"{DENSE}def __init__(self): ...", r"TypeError: Lion.__init__\(\) takes 1 positional argument"),
        (f"{DENSE}def __init__(self, config, model): 1 / 0", r"ZeroDivisionError: .* \(\S+somebodys_lion.py:\d+\)"),
        ("class Lion(HostTrained):\n    def coverage(self): ...", "AttributeError: .* no attribute 'trained'"),
        (f"{DENSE}def coverage(self): return None", "AttributeError: 'NoneType'"),
        (f"{DENSE}def parameters(self): return {{}}", "`trained` names embed_tokens.weight, which is none of"),
        (f"{DENSE}trained = property(lambda self: (), lambda self, value: None)", "`dense` names embed_tokens.weight"),
        (f"{DENSE}can_probe = True", "`can_probe` needs a method along"),
        ("class Lion(GradientStrategy):\n    def make_rule(self): ...", "Lion has make_rule"),
        (
            "class Lion(GradientStrategy):\n    def make_rule(self, target): return 1",
            "its rule builtins.int has no method step",
        ),
        (
            "class Lion(GradientStrategy):\n    def make_rule(self, target): return Rule()",
            r"its rule somebodys_lion.Rule has step\(self, gradient\), called as step\(self, gradient, state\)",
        ),
    ],
)
def test_a_class_that_fails_on_a_model_is_named(package, source, words):
    package("lion", source=HEAD + source)
    with torch.device("meta"):
        model = Toy()
    with pytest.raises(ConfigError, match=words) as error:
        make_strategy(LograConfig(method="lion", rank=8, target_modules=("up_proj",)), model)
    assert str(error.value).startswith("--logra.method lion: ") and "\n" not in str(error.value)
    assert "somebodys_lion.Lion" in str(error.value)


def test_the_page_names_what_is_obligatory():
    for cls in (Strategy, TargetedStrategy, GradientStrategy):
        (named,) = re.findall(rf"^\| `{cls.__name__}` \(.*?\) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", named)) == cls.__abstractmethods__


def test_the_example_of_the_page(package):
    (source,) = re.findall(r"```python\n(.*?@register_strategy.*?)```", PAGE.read_text(), re.DOTALL)
    package("sign", source=source)
    with torch.device("meta"):
        model = Toy()
    strategy = make_strategy(LograConfig(method="sign", target_modules=("up_proj",)), model)
    assert strategy.trained == ("layers.0.up_proj.weight", "layers.1.up_proj.weight")


@pytest.mark.parametrize("method", [name for name in BUILT_IN if name != "lora"])
def test_the_built_in_ones_pass(method):
    with torch.device("meta"):
        model = Toy()
    strategy = make_strategy(LograConfig(method=method, rank=8, target_modules=("up_proj",)), model)
    assert type(strategy) is strategy_class(method)


def test_defaults_are_the_strategys():
    for method, refresh, growth in (("logra", 1, math.inf), ("galore", 200, None), ("fira", 200, 1.01)):
        config = LograConfig(method=method)
        assert (config.refresh_every, config.norm_growth_limit) == (refresh, growth)
    assert LograConfig(optimizer="adam").refresh_every == 20
    assert LograConfig(method="fira", refresh_every=7, norm_growth_limit=2.0).norm_growth_limit == 2.0
    assert LograConfig(method="fira", refresh_every=7).refresh_every == 7


def test_a_name_means_one_class():
    with pytest.raises(ValueError, match="already"):
        register_strategy("logra")(type("Other", (Strategy,), {}))
    assert register_strategy("logra")(strategy_class("logra")) is strategy_class("logra")


def test_a_built_in_name_is_taken_before_its_module_is_imported(monkeypatch):
    monkeypatch.setattr(strategies, "_registered", {})
    with pytest.raises(ValueError, match="'fira' is a built-in one already"):
        register_strategy("fira")(type("Other", (Strategy,), {}))


@pytest.mark.parametrize("name", ["lion", "fira"])
def test_a_name_that_two_packages_bring_is_refused(package, name, monkeypatch):
    """One of them, for `fira`, this one."""
    package(name)
    points = strategies._points()
    if name == "lion":
        points = [*points, EntryPoint("lion", "another.lion", strategies.ENTRY_POINTS)]
    monkeypatch.setattr(strategies, "_points", lambda: points)
    monkeypatch.setattr(strategies, "_registered", {})
    with pytest.raises(ConfigError, match=f"{name!r} is in .* and in .*; keep one"):
        LograConfig(method=name)


@pytest.mark.parametrize("method", ["galore", "flora", "lora", "dense"])
def test_a_limit_where_nothing_is_limited_is_refused(method):
    with pytest.raises(ConfigError, match=f"norm_growth_limit 1.01: --logra.method {method} limits nothing"):
        LograConfig(method=method, norm_growth_limit=1.01).validate()


class Watched(LograConfig):
    """Knows which of its flags were read."""

    read: set[str] = set()

    def __getattribute__(self, name):
        type(self).read.add(name)
        return super().__getattribute__(name)


OF_ALL = {"enable", "method", "reward_baseline", "callbacks", "eval_at_start", "allow_untested_host"}
REFUSED = {"norm_growth_limit"}  # where it would mean nothing


@pytest.mark.parametrize("method", BUILT_IN)
def test_the_flags_that_a_method_does_not_read_are_those_it_is_said_not_to_use(method):
    torch.manual_seed(0)
    model = adapted()[1] if method == "lora" else Toy().to(torch.bfloat16)
    config = Watched(method=method, rank=8, target_modules=NAMES, optimizer="adam")
    Watched.read.clear()
    strategy = strategy_class(method)(config, model)
    strategy.attach()
    strategy.bind(torch.device("cpu"))
    if method != "lora":
        loss_of(model, batch()).backward()
    assert not strategy.step(1e-2, 0.0).skipped
    names = {item.name for item in fields(LograConfig)} - OF_ALL - REFUSED
    names = {name for name in names if not name.startswith(("kl_", "sync_"))}
    controlled = ["kl.*"] if method != "logra" else []
    assert sorted(config.unused_flags) == sorted([*controlled, *(names - Watched.read)])


@pytest.mark.parametrize("other", [type("Other", (), {}), lambda: None])
def test_what_is_no_strategy_is_refused(other):
    with pytest.raises(TypeError, match="does not derive from Strategy"):
        register_strategy("other")(other)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="'sgd' is none of logra, galore"):
        strategy_class("sgd")
