"""Memory of every process of a run of 300 updates on the CPU: after update 20, and at the end.

    python tests/benchmarks/memory_growth.py [--updates 300] [flags added to the command line]

Real OpenRLHF, DeepSpeed, vLLM and Ray on a tiny model through the stock command line. Memory is what a process has for
itself (resident and anonymous, from /proc), taken twice a second; printed is the median over the ten updates around
each point, since garbage is collected now and then. Ray's object store is what the raylet has of shared memory.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from models import make_model
from training import LOGRA_FLAGS, leave_nothing, processes_of, start, stock_flags

UPDATES_PER_STEP = 2
WINDOW = 10


def role(pid: int) -> str:
    """What the process calls itself, without the method that a Ray actor is in."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    name = words[0] if words else ""
    if "::" in name:
        return name.partition(".")[0]
    return " ".join(Path(word).name for word in words[:3] if not word.startswith("-"))[:40]


def resident(pid: int, kind: str) -> int:
    """Bytes of its own ("Anon"), or of shared memory ("Shmem")."""
    found = re.search(rf"Rss{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0  # a zombie has none


def sample(mark: str) -> dict[tuple[int, str], int]:
    taken = {}
    for pid in processes_of(mark):
        try:
            taken[pid, name := role(pid)] = resident(pid, "Anon")
            if name.startswith("raylet"):
                taken[pid, "raylet, object store"] = resident(pid, "Shmem")
        except OSError:  # it has ended
            continue
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=300)
    options, more = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp())
    flags = stock_flags(make_model(folder / "model"), folder, steps=options.updates // UPDATES_PER_STEP)
    process, log, mark = start([*flags, *LOGRA_FLAGS, *more], folder)
    taken: list[tuple[int, dict]] = []
    try:
        while process.poll() is None:
            steps = re.findall(r"\[logra\] step (\d+):", log.read_text(errors="replace"))
            if steps:
                taken.append((UPDATES_PER_STEP * int(steps[-1]), sample(mark)))
            time.sleep(0.5)
    finally:
        leave_nothing(mark)
    if process.returncode:
        sys.exit(log.read_text(errors="replace")[-3000:])
    first, last = (20, 20 + WINDOW), (options.updates - 1 - WINDOW, options.updates - 1)
    print(f"{'process':42} {'after update 20':>16} {'at the end':>12} {'growth':>8}")
    for one in sorted({one for _, found in taken for one in found}, key=lambda one: one[1]):
        early, late = (
            [found[one] for update, found in taken if start <= update <= end and one in found]
            for start, end in (first, last)
        )
        if early and late:
            a, b = statistics.median(early), statistics.median(late)
            print(f"{one[1]:42} {a / 1e6:13.1f} MB {b / 1e6:9.1f} MB {100 * (b / a - 1):+7.2f}%")


main()
