"""Show what LoGRA would train in a model, and what it costs, without loading weights.

    openrlhf-logra describe --model DIR [--logra.rank 256 ...]

prints the coverage table that training prints at its start, for the same `--logra.*` flags.
"""

import argparse
import os
import sys

from openrlhf_logra.config import ConfigError, add_flags, from_flat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and every `--logra.*` flag."""
    parser.add_argument("--model", required=True, help="model directory or hub name, as --actor.model_name_or_path")
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the coverage table. Returns 2 after one line on stderr when model or flags cannot work."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from openrlhf_logra.host.models import load_skeleton
    from openrlhf_logra.host.refusals import check_method
    from openrlhf_logra.train.callbacks import load_callbacks
    from openrlhf_logra.train.coverage import render

    sys.path.insert(0, os.getcwd())  # as for training: where callbacks may be
    try:
        config = from_flat(args)
        config.validate()
        load_callbacks(config.callbacks)
        strategy = check_method(config, load_skeleton(args.model, flag="--model"), f"--model {args.model}")
    except ConfigError as error:
        print(f"openrlhf-logra describe: {error}", file=sys.stderr)
        return 2
    print(render(strategy.coverage()))
    return 0
