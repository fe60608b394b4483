"""Read a run directory: TensorBoard scalars, merged over event files, and summary.json."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf_logra.report import ReportError
from openrlhf_logra.report.summary import SUMMARY_KEYS

EVENT_FILES = "*events.out.tfevents.*"

Points = dict[int, float]  # global step -> value


@dataclass(frozen=True)
class Run:
    """One training run as it is on disk.

    Attributes:
        name: name of the run directory (never its full path: the page is made to be passed on).
        scalars: tag, as OpenRLHF's TensorboardLogger writes it (`train/...`, `eval/...`) -> points in order of step.
        summary: contents of summary.json; empty when there is none.
    """

    name: str
    scalars: dict[str, Points]
    summary: dict[str, object] = field(default_factory=dict)


def read_run(directory: Path) -> Run:
    """Read RUN/tensorboard/** (or else the event files directly in RUN) and RUN/summary.json.

    Raises:
        ReportError: no such directory, no event files, no scalars in them, or a summary.json that makes no sense.
    """
    if not directory.is_dir():
        raise ReportError(f"no such run directory: {directory}")
    files = find_event_files(directory)
    if not files:
        raise ReportError(f"no TensorBoard event files in {directory}/tensorboard or {directory}")
    summary = read_summary(directory / "summary.json")
    scalars = merge_scalars([read_event_file(path) for path in files])
    if not scalars:
        raise ReportError(f"the event files of {directory} hold no scalars yet")
    return Run(name=directory.resolve().name, scalars=scalars, summary=summary)


def find_event_files(directory: Path) -> list[Path]:
    """Event files below RUN/tensorboard, or, if there are none, those directly in RUN."""
    nested = (directory / "tensorboard").rglob(EVENT_FILES)
    return sorted(path for path in nested if path.is_file()) or sorted(
        path for path in directory.glob(EVENT_FILES) if path.is_file()
    )


def read_event_file(path: Path) -> tuple[float, dict[str, Points]]:
    """Scalars of one event file, and the time of its first event (0 for an empty file).

    A run that was killed leaves a cut record at the end; what comes before it counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # 0 keeps every point; the default is a random sample of 10,000. Orphans are merge_scalars' business.
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0}, purge_orphaned_data=False)
    try:
        events.Reload()
        started = events.FirstEventTimestamp()
    except ValueError:  # no event in it
        return 0.0, {}
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    tags = events.Tags()[SCALARS]
    return started, {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def merge_scalars(parts: list[tuple[float, dict[str, Points]]]) -> dict[str, Points]:
    """Merge event files tag by tag: from the first step at which a later file speaks, the earlier ones are void.

    A run resumed from a checkpoint repeats the steps since then, and may be cut off again before it has repeated all
    of them; the leftovers of the first attempt would not belong to the weights that exist now.
    """
    merged: dict[str, Points] = {}
    for _, scalars in sorted(parts, key=lambda part: part[0]):
        for tag, points in scalars.items():
            resumed_at = min(points)
            kept = {step: value for step, value in merged.get(tag, {}).items() if step < resumed_at}
            merged[tag] = kept | dict(sorted(points.items()))
    return merged


def read_summary(path: Path) -> dict[str, object]:
    """Contents of summary.json, the keys that the report uses checked to be finite numbers (or null)."""
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ReportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(summary, dict):
        raise ReportError(f"{path} must hold a JSON object, not {type(summary).__name__}")
    for key in SUMMARY_KEYS:
        value = summary.get(key)
        # The bound excludes NaN and infinity, and integers that no float can hold.
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        if value is not None and not number:
            raise ReportError(f"{path}: {key} must be a finite number, got {json.dumps(value)[:40]}")
    return summary
