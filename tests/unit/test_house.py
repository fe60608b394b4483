"""Rules of the house that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import openrlhf_logra

PACKAGE = Path(openrlhf_logra.__file__).parent
HOST = {"openrlhf", "deepspeed", "vllm", "ray", "transformers"}


def imports(path: Path) -> set[str]:
    """Top-level names of what a file imports, anywhere in it; of this package, one level more: as "..<module>"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = (
                [(node.level, node.module)] if node.module else [(node.level, alias.name) for alias in node.names]
            )
        else:
            continue
        for level, module in modules:
            first, _, rest = module.partition(".")
            if first == "openrlhf_logra" and level == 0:
                level, first = 2, rest.split(".")[0]
            found.add("." * level + first)
    return found


def test_the_mathematics_knows_no_host():
    for path in (PACKAGE / "math").glob("*.py"):
        assert not imports(path) & HOST, path
        above = {name for name in imports(path) if name.startswith("..")} - {"..kernels"}  # its twins, on a GPU only
        assert not above, f"{path} imports what is above it"


def test_only_the_host_folder_names_openrlhf_and_ray():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("host",):
            assert not imports(path) & {"openrlhf", "ray"}, path


def test_the_host_folder_is_imported_by_nobody_but_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("host", "cli"):
            assert not imports(path) & {"..host", ".host"}, path


def test_how_imports_are_told(tmp_path):
    forms = ("from .. import host", "import openrlhf_logra.host.cpu", "from openrlhf_logra.host import cpu")
    for form in (*forms, "from ..host.cpu import install"):
        (tmp_path / "code.py").write_text(form)
        assert imports(tmp_path / "code.py") == {"..host"}, form


def test_the_mathematics_imports_without_the_host():
    code = (
        "import sys\n"
        f"for name in {sorted(HOST)!r}: sys.modules[name] = None\n"
        "import openrlhf_logra.math.exact, openrlhf_logra.math.digest, openrlhf_logra.math.direction\n"
        "import openrlhf_logra.math.sketch, openrlhf_logra.strategies.logra\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_scripts_parse():
    root = PACKAGE.parent
    scripts = [*root.rglob("*.sh"), root / ".ci" / "run"]
    scripts = [path for path in scripts if ".venv" not in path.parts]
    assert len(scripts) >= 3
    for path in scripts:
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0, path
