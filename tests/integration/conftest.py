"""Fixtures shared by the integration tests."""

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from openrlhf_logra.config import add_flags
from openrlhf_logra.host import cpu

sys.path.insert(0, str(Path(__file__).parent))

FULL = os.environ.get("LOGRA_FULL") == "1"


# What starts Ray. Two Rays on one machine may take each other's ports: these run one after the other.
WITH_RAY = {f"test_{name}.py" for name in ("cluster", "patches", "readme", "recipes", "rollout_actors", "train")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first."""
    items.sort(key=lambda item: item.path.name not in WITH_RAY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """How run.sh deals tests out to its two processes: what starts Ray to one of them, then module by module, whose
    fixtures are dear."""
    from xdist.scheduler import LoadScopeScheduling

    class RayApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::")[0]
            return "ray" if Path(module).name in WITH_RAY else module

    return RayApart(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from models import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    """With matrices that ZeRO-3 really partitions: above its default persistence threshold of 100,000 elements."""
    from models import make_model

    return make_model(tmp_path_factory.mktemp("wide"), intermediate_size=1664, num_hidden_layers=1)


@pytest.fixture(scope="session")
def parser():
    """The stock module's own parser with our group, without running what follows."""
    cpu.install()
    captured = []

    class Stop(Exception):
        pass

    def stop(self, *_):
        captured.append(self)
        raise Stop

    stock = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop
    try:
        with pytest.raises(Stop):
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=False)
    finally:
        argparse.ArgumentParser.parse_args = stock
    add_flags(captured[0])
    return captured[0]


def run_ranks(script: Path, arguments: list[str], world: int, timeout: float) -> None:
    """Run a script once per rank, as torchrun would; fails with the tail of the first rank that failed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(cpu.quiet_port()),
        "WORLD_SIZE": str(world),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        end = time.monotonic() + timeout
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    time.sleep(5)  # the others may fail by themselves and say more
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
        tails = "\n".join(
            f"rank {rank} ({code}):\n{logs[rank].read_text()[-3000:]}" for rank, code in enumerate(codes)
        )
    assert codes == [0] * world, tails
