"""Train through OpenRLHF's stock command line, where site hooks do not run.

    openrlhf-logra train <flags of openrlhf.cli.train_ppo_ray> --logra.enable

does what `python -m openrlhf.cli.train_ppo_ray` does with the same flags where the `.pth` start-up line is active.
"""

import argparse
import os
import runpy
import sys

from openrlhf_logra.host import startup, versions
from openrlhf_logra.host.startup import STOCK_MODULE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the one argument of `openrlhf-logra train`: all that follows is OpenRLHF's."""
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help=f"flags of {STOCK_MODULE}")


def run(args: argparse.Namespace) -> int:
    """Activate LoGRA in this process and run the stock module as `__main__`.

    Returns 2 after one line on stderr when OpenRLHF or the flag is not there; the stock module's own SystemExit passes
    through.
    """
    if not {"--logra.enable", "--help", "-h"} & set(args.flags):
        print("openrlhf-logra train: --logra.enable is not among the flags; add it", file=sys.stderr)
        return 2
    openrlhf = next(finding for finding in versions.findings() if finding.package == "openrlhf")
    if openrlhf.status == versions.MISSING:
        print(f"openrlhf-logra train: openrlhf is not installed: {openrlhf.fix}", file=sys.stderr)
        return 2
    sys.path.insert(0, os.getcwd())  # as with -m: where callbacks may be
    startup.activate()
    sys.argv = [STOCK_MODULE, *args.flags]
    runpy.run_module(STOCK_MODULE, run_name="__main__", alter_sys=True)
    return 0
