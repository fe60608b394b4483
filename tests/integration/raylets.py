"""Ray nodes as `ray start` makes them, apart from any other Ray on this machine."""

import os
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
from training import MARK, leave_nothing, processes_of

from openrlhf_logra.host.cpu import quiet_port

RAY = str(Path(sys.executable).with_name("ray"))
START_SECONDS = 240


class Raylets:
    """Ray nodes with ports and a folder of their own, apart from any other Ray on this machine."""

    def __init__(self, folder: Path):
        self.folder = folder / "ray"  # where Ray looks for a cluster if RAY_TMPDIR is the given one
        self.folder.mkdir()
        self.mark, self.dashboard = uuid.uuid4().hex, f"http://127.0.0.1:{quiet_port()}"

    def start_head(self, name: str, gpus: int, cpus: int = 4) -> None:
        dashboard = self.dashboard.rpartition(":")[2]
        ports = [f"--port={quiet_port()}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={quiet_port()}"]
        self._start(name, "--head", *ports, f"--num-gpus={gpus}", f"--num-cpus={cpus}")

    def add(self, name: str, gpus: int = 1, path: Path | None = None) -> None:
        """Start a node; with `path`, packages there come before what is installed."""
        address = (self.folder / "ray_current_cluster").read_text().strip()
        # One log monitor reads the logs of all: they share the folder.
        self._start(
            name,
            f"--address={address}",
            f"--num-gpus={gpus}",
            "--num-cpus=4",
            "--include-log-monitor=false",
            path=path,
        )

    def _start(self, name: str, *options: str, path: Path | None = None) -> None:
        agent = f"--dashboard-agent-listen-port={quiet_port()}"
        # Worker ports: two nodes cannot share a range.
        shared = [f"--node-name={name}", "--min-worker-port=0", "--max-worker-port=0", agent]
        environment = {
            **os.environ,
            MARK: self.mark,
            "RAY_DEDUP_LOGS": "0",
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_SECONDS),
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(START_SECONDS),
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        if path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
        command = [RAY, "start", f"--temp-dir={self.folder}", *shared, *options]
        log = self.folder / f"{name}.log"
        with log.open("w") as sink:
            done = subprocess.run(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd="/")
        assert done.returncode == 0, log.read_text()

    def submit(self, *options: str) -> list[str]:
        """The command that runs what follows as a job."""
        return [RAY, "job", "submit", "--address", self.dashboard, *options, "--"]

    def stop(self) -> None:
        found = {}
        for pid in processes_of(self.mark):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                # An agent's title may cover its environment and so the mark; while its raylet lives, it is a child.
                found.update((one.pid, one) for one in (process, *process.children(recursive=True)))
        for process in found.values():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, left = psutil.wait_procs(list(found.values()), timeout=20)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        leave_nothing(self.mark)
