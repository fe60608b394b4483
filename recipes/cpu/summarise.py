"""Gather the demo's figures into RUN/summary.json.

    python recipes/cpu/summarise.py RUN --seconds N --seed N

Everything but seconds and seed is read from what the run itself logged; nothing is computed from promises.
"""

import argparse
import json
import sys
from pathlib import Path

from openrlhf_logra.report import ReportError
from openrlhf_logra.report.reader import read_run


def first_and_last(points: dict[int, float]) -> tuple[float, float]:
    """Values at the first and at the last step."""
    return points[min(points)], points[max(points)]


def summarise(run: Path, seconds: float, seed: int) -> dict[str, float]:
    """The figures of one run; bytes of syncs are totals over the run.

    Raises:
        ReportError: the run has no event files, or lacks the metric that a figure comes from.
    """
    scalars = read_run(run).scalars
    try:
        pass1 = next(
            points for tag, points in sorted(scalars.items()) if tag.startswith("eval/") and tag.endswith("_pass1")
        )
        pass4 = next(
            points for tag, points in sorted(scalars.items()) if tag.startswith("eval/") and tag.endswith("_pass4")
        )
        return {
            "pass1_before": first_and_last(pass1)[0],
            "pass1_after": first_and_last(pass1)[1],
            "pass4_before": first_and_last(pass4)[0],
            "pass4_after": first_and_last(pass4)[1],
            "sync_bytes": int(sum(scalars["train/logra/sync_bytes"].values())),
            "full_bytes": int(sum(scalars["train/logra/sync_dense_bytes"].values())),
            "state_bytes": int(max(scalars["train/logra/state_bytes"].values())),
            "dense_state_bytes": int(max(scalars["train/logra/dense_state_bytes"].values())),
            "updates": int(max(scalars["train/logra/version"].values())),
            "seconds": seconds,
            "seed": seed,
        }
    except (KeyError, StopIteration) as error:
        raise ReportError(f"{run} logged no {error if isinstance(error, KeyError) else 'evaluation'}") from error


def main() -> int:
    """Write RUN/summary.json. Returns 2 after one line on stderr when the run is not complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    try:
        figures = summarise(args.run, args.seconds, args.seed)
    except ReportError as error:
        print(f"summarise.py: {error}", file=sys.stderr)
        return 2
    (args.run / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
