"""Fixtures shared by the integration tests."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FULL = os.environ.get("LOGRA_FULL") == "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from models import make_model

    return make_model(tmp_path_factory.mktemp("model"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(script: Path, arguments: list[str], world: int, timeout: float) -> None:
    """Run a script once per rank, as torchrun would; fails with the tail of the first rank that failed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
