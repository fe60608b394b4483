"""Tell which version of a run a checkpoint is, by the digests that the run's records state.

    openrlhf-logra verify --checkpoint DIR --records DIR [--step N]

checks every record of the log, and compares the checkpoint's weights with those records that state digests (the last
one of every sync). Versions between them are not known to the log without a replay, nor is the one it begins with.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `openrlhf-logra verify`."""
    parser.add_argument("--checkpoint", metavar="DIR", required=True, help="model directory or hub name")
    parser.add_argument(
        "--records", metavar="DIR", type=Path, required=True, help="the run's --logra.sync.log_dir; only read"
    )
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="compare with this version (the number of updates since the run began) and no other",
    )


def run(args: argparse.Namespace) -> int:
    """Print which version it is. Returns 1 where it is none, and 2 after one line on stderr where that cannot be
    told."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from openrlhf_logra.config import ConfigError
    from openrlhf_logra.sync.record import RecordError

    try:
        found, message = compare(args.checkpoint, args.records, args.step)
    except (ConfigError, RecordError) as error:
        print(f"openrlhf-logra verify: {error}", file=sys.stderr)
        return 2
    print(f"{args.checkpoint}: {message}")
    return 0 if found else 1


def compare(checkpoint: str, records: Path, version: int | None) -> tuple[bool, str]:
    """Whether the checkpoint is `version` (None: any version that the records know), and a sentence about it.

    Raises:
        RecordError: a record is damaged, missing or in the wrong place, or none states the digests that are asked for.
        ConfigError: the checkpoint cannot be loaded.
    """
    from openrlhf_logra.host.models import load_model, persistent_buffers, weights_of
    from openrlhf_logra.sync.log import closest, digests, find_route
    from openrlhf_logra.sync.record import RecordError

    route = find_route(records)
    if not route.stated:
        raise RecordError(f"{records}: no record states digests; nothing can be compared")
    if version is not None and version not in route.stated:
        raise RecordError(
            f"{records}: no record states the digests of version {version}; those of {listed(route.stated, version)} "
            "are stated"
        )
    model = load_model(checkpoint, "--checkpoint")
    found = digests(weights_of(model))
    nearest, differing = closest(found, records, route.stated if version is None else (version,))
    if not differing:
        buffers = persistent_buffers(model)
        beside = f", but for {len(buffers)} buffers that no record states ({buffers[0]}, ...)" if buffers else ""
        return True, f"is version {nearest} of run {route.run}{beside}"
    said = f"is not version {version} of run {route.run}"
    if version is None:
        said = (
            f"is no version of run {route.run} whose digests are stated; version {nearest} has most in common with it"
        )
    return False, f"{said}: {differing[0]} differs, the first of {len(differing)} among {len(found)} parameters"


def listed(stated: Sequence[int], version: int) -> str:
    """The stated versions, or of many those around `version`."""
    if len(stated) <= SHOWN:
        return ", ".join(map(str, stated))
    around = sorted(sorted(stated, key=lambda other: abs(other - version))[:SHOWN])
    return f"{', '.join(map(str, around))} and {len(stated) - SHOWN} others"
