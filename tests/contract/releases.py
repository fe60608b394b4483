"""OpenRLHF's releases as its package index has them, for tests: downloaded once, unpacked, not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_logra.host.versions import PEERS

SUPPORTED = next(peer for peer in PEERS if peer.package == "openrlhf").tested
# The wheels are pure Python, and say otherwise: this is how pip finds them on any machine.
_WHERE = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--platform=manylinux1_x86_64"]
_DOWNLOAD = ["download", "--quiet", "--no-deps", "--retries=1", "--timeout=15", *_WHERE]
_UNREACHABLE = ("from versions: none", "Connection", "Temporary failure", "timed out")


def wheel(release: str, folder: Path) -> Path:
    """The wheel of a release, in `folder` (where it is looked for first). Skips the test where there is no network."""
    pattern = f"openrlhf-{release}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", *_DOWNLOAD, f"--dest={folder}", f"openrlhf=={release}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
            pytest.skip(f"openrlhf {release} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    return next(folder.glob(pattern))


def install(release: str, downloads: Path, target: Path) -> Path:
    """The release in a folder of its own, with its metadata, for PYTHONPATH."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += [f"--target={target}", str(wheel(release, downloads))]
    subprocess.run(command, check=True, capture_output=True)
    return target
