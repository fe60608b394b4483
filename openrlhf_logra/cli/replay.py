"""Rebuild the weights of one version from the base model and a run's records, bit for bit.

    openrlhf-logra replay --base MODEL --records DIR --step N --out DIR

writes a Hugging Face checkpoint. Every record up to version N is checked before the model is loaded; the weights are
compared with the digests that the first and the last of these records state (where none does, the base is tried out at
the first later record that does). --out appears when all of it is there: after an error nothing is left.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `openrlhf-logra replay`."""
    parser.add_argument(
        "--base",
        metavar="MODEL",
        required=True,
        help="directory or hub name of the weights that the records begin with: the model that the run began with "
        "(version 0), or the checkpoint at which --logra.sync.log_dir was first given",
    )
    parser.add_argument(
        "--records", metavar="DIR", type=Path, required=True, help="the run's --logra.sync.log_dir; only read"
    )
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        required=True,
        help="version to rebuild: the number of updates since the run began, `version` in the line of each step (a "
        "step may make several); the version at which the records begin gives the base",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="new or empty directory to write")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say so in one line. Returns 2 after one line on stderr when nothing was written."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from openrlhf_logra.config import ConfigError
    from openrlhf_logra.sync.record import RecordError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing half-written stays
    try:
        print(rebuild(args.base, args.records, args.step, args.out))
    except (ConfigError, RecordError) as error:
        print(f"openrlhf-logra replay: {error}", file=sys.stderr)
        return 2
    return 0


def rebuild(base: str, records: Path, version: int, out: Path) -> str:
    """Write the weights of `version` to `out`; returns a line about it.

    Raises:
        RecordError: the records do not lead to the version, or not from this base.
        ConfigError: the base cannot be loaded, or `out` cannot be written.
    """
    from openrlhf_logra.host.models import load_model, weights_of
    from openrlhf_logra.math.digest import total_digest
    from openrlhf_logra.sync.log import find_route, first_stated, replay

    start = time.perf_counter()
    check_out(out)
    route = find_route(records, version)
    first = route.stated[0] if route.stated else first_stated(records)
    if first is not None and first > version:
        # Otherwise another base, or a log whose first records are lost, would go unseen.
        replay(weights_of(load_model(base, "--base")), find_route(records, first))
    model = load_model(base, "--base")
    digests = replay(weights_of(model), route)
    write(model, base, out)
    return (
        f"{out}: version {version} of run {route.run}, {route.records} records, digest "
        f"{total_digest(digests):016x}, {time.perf_counter() - start:.1f} s"
        + ("; not verified: no record states digests" if first is None else "")
    )


def check_out(out: Path) -> None:
    """Raise ConfigError where `out` could not be written at the end."""
    from openrlhf_logra.config import ConfigError

    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty; give a new directory")
    if os.path.ismount(out):
        raise ConfigError(f"--out {out}: is a mount point, which cannot be replaced; give a new directory inside it")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is not a directory")
    parent = out.resolve().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--out {out}: {parent} is no directory in which it can be made")


def write(model: Any, base: str, out: Path) -> None:
    """Save the model and its tokenizer beside `out`, then rename: `out` is never half there.

    Raises:
        ConfigError: it cannot be written.
    """
    from openrlhf_logra.config import ConfigError, one_line

    place = out.resolve()
    try:
        with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as beside:
            made = Path(beside, place.name)
            made.mkdir()  # a temporary directory itself would be for its owner's eyes only
            model.save_pretrained(made)
            save_tokenizer(model, base, made)
            os.replace(made, place)
    except Exception as error:
        raise ConfigError(f"--out {out}: cannot be written: {one_line(error)}") from error


def save_tokenizer(model: Any, base: str, folder: Path) -> None:
    """Save the tokenizer of the base as OpenRLHF does (of a model with vision: the processor). Without one the weights
    are as good, and it is only said."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import cached_file

    from openrlhf_logra.config import one_line

    auto = AutoProcessor if hasattr(model.config, "vision_config") else AutoTokenizer
    try:
        cached_file(base, "tokenizer_config.json")  # raises: without it some classes make up an empty vocabulary
        tokenizer = auto.from_pretrained(base, trust_remote_code=True)
    except Exception as error:
        print(f"no tokenizer is written: {one_line(error)}")
        return
    tokenizer.save_pretrained(folder)
