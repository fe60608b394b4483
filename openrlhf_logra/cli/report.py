"""Turn a finished or running training run into a table, a picture and a page.

`openrlhf-logra report RUN` reads RUN/tensorboard and, where there is one, RUN/summary.json; it writes report.png and
report.html into RUN (or --out) and prints the summary table. Nothing is written unless both files could be made.
"""

import argparse
import os
import sys
from pathlib import Path

from openrlhf_logra.report import ReportError
from openrlhf_logra.report.page import render_page
from openrlhf_logra.report.panels import panels_with_data, points_of, render_png, render_svg, step_range
from openrlhf_logra.report.reader import Run, read_run
from openrlhf_logra.report.summary import summary_facts, summary_rows, summary_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `openrlhf-logra report`."""
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="directory of the run: holds tensorboard/ (or event files) and perhaps summary.json",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where report.png and report.html go (default: RUN)")


def run(args: argparse.Namespace) -> int:
    """Make the report. Returns 0, or 2 after one line on stderr that says why there is none."""
    try:
        require_extra()
        for path in write_report(args.run, args.out or args.run):
            print(f"wrote {path}")
    except ReportError as error:
        print(f"openrlhf-logra report: {error}", file=sys.stderr)
        return 2
    return 0


def require_extra() -> None:
    """Raise ReportError with the fix if matplotlib or tensorboard cannot be imported."""
    try:
        import matplotlib  # noqa: F401
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise ReportError(f"{error}; install it with: pip install matplotlib tensorboard") from error


def write_report(directory: Path, out: Path) -> list[Path]:
    """Read the run, print its table, write report.png and report.html into `out`, and return their paths."""
    found = read_run(directory)
    panels = panels_with_data(found.scalars)
    if not panels:
        raise ReportError(f"the event files of {directory} hold none of the metrics that the report shows")
    summary = summary_from_events(found) | found.summary
    rows, facts = summary_rows(summary), run_facts(found, summary)

    heading = " · ".join([found.name, *(f"{name.lower()} {value}" for name, value in facts)])
    picture = render_png(panels, found.scalars, heading)
    steps = step_range(panels, found.scalars)
    figures = [
        (panel.title, panel.note, render_svg(panel, found.scalars, steps, f"panel{index}"))
        for index, panel in enumerate(panels)
    ]
    page = render_page(found.name, facts, rows, figures)

    if rows:
        print(summary_table(rows), end="\n\n")
    for name, value in facts:
        print(f"{name}: {value}")
    return write_files(out, {"report.png": picture, "report.html": page.encode("utf-8")})


def summary_from_events(found: Run) -> dict[str, object]:
    """What the event files alone say about the summary: the sync of the last step, and scores if there is a step 0.

    Runs started without the demo have no summary.json. An evaluation later than step 0 is no "before".
    """
    summary: dict[str, object] = {}
    for key, tag in (("sync_bytes", "train/logra/sync_bytes"), ("full_bytes", "train/logra/sync_dense_bytes")):
        points = points_of(found.scalars, tag)
        if points:
            summary[key] = points[max(points)]
    for score in ("pass1", "pass4"):
        points = points_of(found.scalars, f"eval/eval_*_{score}")
        if 0 in points and len(points) > 1:
            summary[f"{score}_before"], summary[f"{score}_after"] = points[0], points[max(points)]
    return summary


def run_facts(found: Run, summary: dict[str, object]) -> list[tuple[str, str]]:
    """Facts for the line below the title: steps logged, then those of the summary, then the digest checks."""
    steps = {step for tag, points in found.scalars.items() if tag.startswith("train/") for step in points}
    facts = [("Steps", f"{min(steps):,} to {max(steps):,}")] if steps else []
    facts += summary_facts(summary)
    checks = points_of(found.scalars, "train/logra/digest_ok").values()
    if checks:
        facts.append(("Weight checks passed", f"{sum(value == 1 for value in checks):,} of {len(checks):,}"))
    return facts


def write_files(out: Path, contents: dict[str, bytes]) -> list[Path]:
    """Write every file under a temporary name, then rename them all: none is ever half there. Returns their paths."""
    pending: list[tuple[Path, Path]] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            temporary = out / f".{name}.{os.getpid()}.tmp"
            pending.append((temporary, out / name))
            temporary.write_bytes(data)
        for temporary, path in pending:
            os.replace(temporary, path)
    except OSError as error:
        raise ReportError(f"cannot write to {out}: {error.strerror or error}") from error
    finally:
        for temporary, _ in pending:
            temporary.unlink(missing_ok=True)
    return [path for _, path in pending]
