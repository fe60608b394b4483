"""Check that this machine can train with LoGRA, and say what to do if not."""

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from openrlhf_logra.host import cpu, versions
from openrlhf_logra.host.versions import MISSING, OK, Finding
from openrlhf_logra.host.vllm_plugin import ENTRY_POINT, let_through, registered

PTH = "openrlhf_logra.pth"
REINSTALL = "pip install --force-reinstall --no-deps . (in a checkout of openrlhf_logra)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`openrlhf-logra doctor` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 when a row needs a fix, which is then printed below the table."""
    rows = [python(), *versions.findings(), gpu(), startup_line(), vllm_entry_point()]
    print(table(rows))
    wrong = [row for row in rows if row.status != OK]
    for row in wrong:
        print(f"fix {row.package}: {row.fix}")
    if not wrong:
        print("all right: add --logra.enable to the command line of openrlhf.cli.train_ppo_ray")
    return 1 if wrong else 0


def table(rows: list[Finding]) -> str:
    """The rows as aligned columns: what, found, supported, status."""
    lines = [("", "found", "supported", "status")]
    lines += [(row.package, row.found or "-", row.wanted, row.status) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def python() -> Finding:
    """The interpreter; packaging refuses those that do not fit, so that this row informs only."""
    return Finding("python", platform.python_version(), ">=3.10", OK, "")


def gpu() -> Finding:
    """Whether the CPU stand-ins will be active. Both answers are fine."""
    found = "yes" if cpu.has_gpu() else "no: CPU stand-ins"
    return Finding("GPU", found, "yes or no", OK, "")


def startup_line() -> Finding:
    """Whether a new interpreter imports the start-up module when it sees a `--logra.` argument."""
    name, wanted = ".pth start-up line", "active"
    installed = [folder for folder in sys.path if Path(folder, PTH).is_file()]
    # The argument is no flag that exists, and the process no training: only the import can happen.
    code = "import sys; print('openrlhf_logra.host.startup' in sys.modules)"
    command = [sys.executable, "-c", code, "--logra.probe"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=os.path.abspath(os.sep))
    if process.stdout.strip() == "True":
        return Finding(name, "active", wanted, OK, "")
    if "openrlhf_logra" in process.stderr:
        reason = process.stderr.strip().splitlines()[-1]
        return Finding(name, "fails", wanted, versions.UNSUPPORTED, f"it says '{reason}'; {REINSTALL}")
    if installed:
        fix = f"{installed[0]} is not a site folder of this Python; use `openrlhf-logra train` instead of python -m"
        return Finding(name, "not active", wanted, MISSING, fix)
    return Finding(name, None, wanted, MISSING, f"{REINSTALL}, or use `openrlhf-logra train` instead of python -m")


def vllm_entry_point() -> Finding:
    """Whether vLLM's processes will load our plugin: registered, and let through by VLLM_PLUGINS where that is set."""
    name, wanted = "vLLM entry point", "registered"
    if not registered():
        return Finding(name, None, wanted, MISSING, REINSTALL)
    if not let_through():
        fix = f"unset VLLM_PLUGINS (it is '{os.environ['VLLM_PLUGINS']}'), or add {ENTRY_POINT} to it"
        return Finding(name, "filtered out", wanted, versions.UNSUPPORTED, fix)
    return Finding(name, "registered", wanted, OK, "")
