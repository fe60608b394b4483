"""Every supported release of OpenRLHF has what the plugin uses of it. Their sources are read, not imported.

What is used is read off the plugin's own sources where they say it, and listed in host_names.py where they do not.
"""

import ast
import hashlib
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from host_names import (
    EITHER,
    ENGINE_ARGUMENTS,
    EXPERIENCE,
    EXPERIENCE_FIELDS,
    FLASH_ATTENTION,
    MAIN,
    REPLACED,
    SIGNATURES,
)
from releases import SUPPORTED, wheel
from sources import Sources, chain, is_name, names_in, parameters, stock_parser

from openrlhf_logra.config import LograConfig, add_flags
from openrlhf_logra.host import log_probs, refusals

ROOT = Path(__file__).resolve().parents[2]
OURS = Sources(ROOT, "openrlhf_logra")
HOST = [*OURS.modules("openrlhf_logra/host")]


@pytest.fixture(scope="module", params=["installed", *SUPPORTED])
def release(request, tmp_path_factory) -> Sources:
    if request.param == "installed":
        return Sources(Path(find_spec("openrlhf").submodule_search_locations[0]).parent, "openrlhf")
    folder = tmp_path_factory.mktemp(request.param)
    with ZipFile(wheel(request.param, request.config.cache.mkdir("wheels"))) as archive:
        archive.extractall(folder)
    package = next(path for path in folder.rglob("openrlhf") if path.is_dir())
    return Sources(package.parent, "openrlhf")


def locate(release: Sources, dotted: str) -> tuple[str, ast.AST] | None:
    """Module and node of "package.module.Class.method", of "package.module.function", or of a module."""
    parts = dotted.split(".")
    length = next(n for n in range(len(parts), 0, -1) if release.file(".".join(parts[:n])))
    module, rest = ".".join(parts[:length]), parts[length:]
    if not rest:
        return module, release.tree(module)
    found = release.find(module, rest[0])
    if found is None or len(rest) == 1:
        return found
    method = release.methods(module, rest[0]).get(rest[1])
    return method and (found[0], method)


def dotted(module: str, expression: ast.AST) -> str | None:
    """The name in OpenRLHF that an expression of ours stands for."""
    first, *rest = chain(expression) or ("",)
    if first == "main" and module.endswith(".plugin"):  # the stock module, as `enable` gets it
        return ".".join([MAIN, *rest])
    origin, name = OURS.names(module).get(first, ("", None))
    return ".".join([origin, *filter(None, [name]), *rest]) if origin.split(".")[0] == "openrlhf" else None


@cache
def uses() -> set[str]:
    """Every name of OpenRLHF in the plugin."""
    found = set()
    for module in HOST:
        tree = OURS.tree(module)
        found |= {dotted(module, node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
        found |= {".".join(filter(None, origin)) for _, *origin in OURS.imported(module)}
    return {name for name in found if name and name.split(".")[0] == "openrlhf"}


@cache
def subclasses() -> dict[tuple[str, str], tuple[str, bool]]:
    """Our (module, class) -> the stock class under it, and whether ours takes it out of a Ray actor class."""
    found = {}
    for module in HOST:
        for node in OURS.tree(module).body:
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                unwraps = isinstance(base, ast.Call) and is_name(base.func, "plain")
                stock = dotted(module, base.args[0] if unwraps else base)
                if stock:
                    found[module, node.name] = stock, unwraps
    return found


def test_our_own_sources_are_understood():
    assert "openrlhf.trainer.ray.ppo_actor.PolicyModelActor" in uses()
    assert {"openrlhf.models.Actor", "openrlhf.utils.config.hierarchize"} <= uses()
    assert len(subclasses()) >= 8
    assert {f"{module}.{name}" for module, name in subclasses()} >= {
        "openrlhf_logra.host.rollout_actor.LograRolloutRayActor",
        "openrlhf_logra.host.controller.LograTrainingActor",
    }


def test_names(release):
    missing = sorted(name for name in uses() if locate(release, name) is None)
    assert missing == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(release, name):
    expected = SIGNATURES[name]
    module, node = locate(release, name)
    if isinstance(expected, list):
        assert parameters(node) == expected
        return
    methods = release.methods(module, node.name)
    assert {method: parameters(methods[method]) for method in expected if method in methods} == expected


def test_the_signatures_of_all_overridden_methods_are_listed():
    """Methods that hand on whatever they get are none of them."""
    installed = Sources(Path(find_spec("openrlhf").submodule_search_locations[0]).parent, "openrlhf")
    for (module, name), (stock, _) in subclasses().items():
        origin, node = locate(installed, stock)
        theirs, ours = installed.methods(origin, node.name), OURS.methods(module, name)
        named = {method for method in ours.keys() & theirs.keys() if parameters(ours[method]) != ["args", "kwargs"]}
        assert named <= set(SIGNATURES[f"{origin}.{node.name}"]), name


def test_attributes_that_our_subclasses_read(release):
    for (module, name), (stock, _) in subclasses().items():
        origin, node = locate(release, stock)
        read = set()
        for _, ours in OURS.bases(*OURS.find(module, name)):
            for item in ast.walk(ours):
                if isinstance(item, ast.Attribute) and is_name(item.value, "self"):
                    read.add(item.attr)
                elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Call):
                    if is_name(item.value.func, "super"):
                        read.add(item.attr)
        known = release.attributes(origin, node.name) | OURS.attributes(module, name)
        assert sorted(read - known - set(dir(object))) == [], name


def test_actor_classes_are_actor_classes(release):
    for stock, unwraps in subclasses().values():
        _, node = locate(release, stock)
        assert any("remote" in ast.dump(item) for item in node.decorator_list) == unwraps, stock


def test_stock_methods_that_call_super_are_named_again(release):
    """host/controller.py says why."""
    for (module, name), (stock, unwraps) in subclasses().items():
        origin, node = locate(release, stock)
        for method, function in release.methods(origin, node.name).items() if unwraps else ():
            assert "super" not in names_in(function) or method in OURS.methods(module, name), f"{stock}.{method}"


def test_replaced_names_are_all_listed():
    stored = {
        dotted(module, node)
        for module in HOST
        for node in ast.walk(OURS.tree(module))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {name for name in stored if name} == set(REPLACED)


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_names_are_looked_up_where_they_are_replaced(release, name):
    module, _, attribute = name.rpartition(".")
    user, node = locate(release, REPLACED[name])
    late = [*release.imported(user, node)]
    if user == module:
        assert attribute in names_in(node) - {local for local, *_ in late}
    else:
        assert [module, attribute] in [origin for _, *origin in late]


def test_ray_is_started_with_a_runtime_environment(release):
    """`_extend_ray_init` adds to it."""
    _, train = locate(release, f"{MAIN}.train")
    calls = [node for node in ast.walk(train) if isinstance(node, ast.Call) and chain(node.func) == ("ray", "init")]
    assert [[keyword.arg for keyword in call.keywords] for call in calls] == [["runtime_env"]]


def test_arguments_of_rollout_actors(release):
    _, create = locate(release, "openrlhf.trainer.ray.vllm_engine.create_vllm_engines")
    strings = {node.value for node in ast.walk(create) if isinstance(node, ast.Constant)}
    assert ENGINE_ARGUMENTS | {"logprobs_mode"} <= strings


def test_fields_of_an_experience(release):
    module, _, name = EXPERIENCE.rpartition(".")
    assert EXPERIENCE_FIELDS <= release.attributes(module, name)


def test_what_is_imported_of_flash_attn_has_a_stand_in(release):
    """At module top, where it is needed without being used; and what a ring of ranks imports when it is set up."""
    asked = set()
    for module in release.modules("openrlhf"):
        top = [node for node in release.tree(module).body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = [item for node in top for item in release.imported(module, node)]
        asked |= {(origin, name) for _, origin, name in imported if origin.split(".")[0] == "flash_attn"}
        asked |= {(origin, name) for _, origin, name in release.imported(module) if origin == "ring_flash_attn"}
    assert asked == FLASH_ATTENTION


# ---- flags ----------------------------------------------------------------------------------------------------------


def flags_of(parser) -> set[str]:
    return {name.removeprefix("--") for name in parser._option_string_actions if name.startswith("--")}


@cache
def flags_read() -> set[str]:
    """Every host flag that the plugin reads: what follows `args` in its sources, through local names too."""
    found = set()
    for module in HOST:
        for function in ast.walk(OURS.tree(module)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= _read_in(function)
    return {flag for flag in found if flag and not flag.startswith("logra")}


def _read_in(function: ast.AST) -> set[str]:
    aliases = {("args",): "", ("self", "args"): "", ("strategy", "args"): "", ("self", "strategy", "args"): ""}
    for node in ast.walk(function):
        for target, value in _assignments(node):
            source = _flag(chain(value), aliases)
            if isinstance(target, ast.Name) and source:
                aliases[target.id,] = source
    expressions = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in expressions}
    return {_flag(chain(node), aliases) for node in expressions if id(node) not in inner} - {None}


def _assignments(node: ast.AST):
    for target in node.targets if isinstance(node, ast.Assign) else ():
        pairs = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        yield from zip(target.elts, node.value.elts) if pairs else [(target, node.value)]


def _flag(parts: tuple[str, ...], aliases: dict[tuple[str, ...], str]) -> str | None:
    for length in range(len(parts), 0, -1):
        if parts[:length] in aliases:
            return ".".join(filter(None, [aliases[parts[:length]], *parts[length:]]))
    return None


@cache
def flags_named() -> set[str]:
    """Every flag that a text of the plugin names, or that it sets by name."""
    found = set()
    for module in OURS.modules("openrlhf_logra"):
        for node in ast.walk(OURS.tree(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"--([a-z]+(?:\.[a-z0-9_]+)+)", node.value))
            elif isinstance(node, ast.Call) and is_name(node.func, "setattr") and is_name(node.args[0], "flat"):
                found.add(node.args[1].value)
    return found


@pytest.fixture
def parser(release):
    return stock_parser(release, MAIN)


def test_how_flags_are_found():
    source = "def f(args):\n a, b = 1, self.args.x.y\n c = args.p\n return args.q.r.s, b.z, c.d, other.e, args\n"
    assert _read_in(ast.parse(source).body[0]) == {"x.y", "x.y.z", "p", "p.d", "q.r.s"}
    assert {"ds.lora.rank", "actor.adam.lr", "rollout.temperature", "algo.advantage.estimator"} <= flags_read()
    assert {"vllm.sync_backend", "ds.load_in_4bit", "logra.kl.disable"} <= flags_named()


def test_flags(parser):
    known = flags_of(parser)
    groups = {flag.rpartition(".")[0] for flag in known} | {flag.split(".")[0] for flag in known}
    either = set().union(*EITHER)
    assert either <= flags_read()
    assert sorted(flags_read() - known - groups - either) == []
    assert all(len(one_of & known) == 1 for one_of in EITHER)
    add_flags(parser)
    ours = {flag for flag in flags_of(parser) if flag.startswith("logra.")}
    none = {"logra.probe"}  # cli/doctor.py wants one that does not exist
    parts = {flag.rpartition(".")[0] for flag in ours}
    assert sorted(flags_named() - known - ours - parts - either - none) == []


def test_our_flags_collide_with_none_and_make_none_ambiguous(release, parser):
    """argparse takes any unambiguous beginning of a flag for the flag."""
    stock = set(parser._option_string_actions)
    assert not any(name.startswith("--logra") for name in stock)
    add_flags(parser)  # raises where two are the same
    beginnings = {name[:length] for name in stock for length in range(3, len(name))} - stock
    short = {begin: [name for name in stock if name.startswith(begin)] for begin in beginnings}
    unambiguous = {begin: names[0] for begin, names in short.items() if len(names) == 1}
    assert len(unambiguous) > 500
    for begin, name in unambiguous.items():
        assert [option for _, option, *_ in parser._get_option_tuples(begin)] == [name]


@pytest.mark.parametrize("more", [[], ["--rollout.top_p", "0.9"]])
def test_our_code_reads_the_release_s_own_namespace(parser, more):
    from openrlhf.utils.config import hierarchize

    from openrlhf_logra.host import plugin

    add_flags(parser)
    flat = parser.parse_args(["--vllm.num_engines", "2", "--logra.enable", *more])
    args = hierarchize(flat)
    refusals._check_combinations(args)
    refusals._check_step_control(args, LograConfig())
    assert plugin.logical_gpus(args) == 4 * 8 + 2  # actor, reference, critic and reward on eight each
    assert log_probs.mode(args) == (log_probs.RAW if more else log_probs.PROCESSED)
    plugin._adapt_to_cpu(flat, args)
    assert hierarchize(flat).vllm.sync_backend == "gloo"


def test_a_correction_by_the_host_is_seen(parser):
    from openrlhf.utils.config import hierarchize

    old = "algo.advantage.is_correction_enable" in flags_of(parser)
    on = ["--algo.advantage.is_correction_enable"] if old else ["--algo.advantage.is_correction_level", "seq"]
    assert log_probs.mode(hierarchize(parser.parse_args(["--rollout.top_p", "0.9", *on]))) is None
    assert log_probs.mode(hierarchize(parser.parse_args(["--rollout.top_p", "0.9"]))) == log_probs.RAW


# ---- patches --------------------------------------------------------------------------------------------------------

PATCHES = ROOT / "patches"
TOOLS = {"git": ["git", "apply", "--unidiff-zero"], "patch": ["patch", "-p1", "-s", "-i"]}


def blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def test_there_is_a_patch_for_every_release():
    assert {path.name for path in PATCHES.glob("*.patch")} == {f"openrlhf-{release}.patch" for release in SUPPORTED}


@pytest.mark.parametrize("tool", TOOLS)
def test_patch(release, tool, tmp_path):
    """Made for this very file, it puts a few lines in front of everything and touches nothing else."""
    if not shutil.which(TOOLS[tool][0]):
        pytest.skip(f"this machine has no {TOOLS[tool][0]}")
    stock = release.file(MAIN).read_bytes()
    number = next(n for n in SUPPORTED if blob(stock).startswith(_from_blob(n)))
    file = tmp_path / release.file(MAIN).relative_to(release.root)
    file.parent.mkdir(parents=True)
    shutil.copy(release.file(MAIN), file)
    subprocess.run([*TOOLS[tool], str(PATCHES / f"openrlhf-{number}.patch")], cwd=tmp_path, check=True)
    patched = file.read_bytes()
    assert patched.endswith(stock) and len(patched) < len(stock) + 250
    added = ast.parse(patched.removesuffix(stock))
    assert [type(node) for node in added.body] == [ast.Import, ast.If]


def _from_blob(number: str) -> str:
    text = (PATCHES / f"openrlhf-{number}.patch").read_text()
    return re.search(r"^index ([0-9a-f]{7,})\.\.", text, re.MULTILINE)[1]
