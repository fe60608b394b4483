"""`openrlhf-logra report`: from event files to a table, a picture and a page."""

import argparse
import builtins
import contextlib
import io
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tensorboard")

from openrlhf_logra.cli import report
from openrlhf_logra.report import ReportError
from openrlhf_logra.report.panels import (
    DPI,
    HEADER_INCHES,
    PANEL_INCHES,
    PANELS,
    points_of,
    running_mean,
)
from openrlhf_logra.report.reader import merge_scalars, read_run
from openrlhf_logra.report.summary import summary_rows, summary_table
from openrlhf_logra.units import bytes_text, seconds_text

SUMMARY = {
    "pass1_before": 0.331,
    "pass1_after": 0.489,
    "pass4_before": 0.602,
    "pass4_after": 0.711,
    "sync_bytes": 61234,
    "full_bytes": 1638400,
    "state_bytes": 1203000,
    "dense_state_bytes": 19660800,
    "updates": 60,
    "seconds": 547.3,
    "seed": 1,
}


def write_events(path: Path, scalars: dict[str, dict[int, float]], started: float = 1000.0) -> Path:
    """Write one event file whose first event is at time `started`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event(wall_time=started, file_version="brain.Event:2")]
    for tag, points in scalars.items():
        for step, number in points.items():
            value = Summary.Value(tag=tag, simple_value=number)
            events.append(Event(wall_time=started + step, step=step, summary=Summary(value=[value])))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
    return path


def synthetic(steps: int, seed: int = 0) -> dict[str, dict[int, float]]:
    """Scalars like those of a run of the demo."""
    noise = random.Random(seed)
    each = range(1, steps + 1)
    cosine = {step: 0.5 * (1 + math.cos(math.pi * step / steps)) for step in each}
    return {
        "train/rollout/reward_mean": {s: 0.33 + 0.17 * s / steps + noise.gauss(0, 0.03) for s in each},
        "train/rollout/response_length_mean": {s: 38 + noise.gauss(0, 1) for s in each},
        "train/actor_grad_norm": {s: 0.8 + 0.2 * noise.random() for s in each},
        "train/logra/alpha": cosine,
        "train/logra/update_ratio": {s: 6e-5 * alpha for s, alpha in cosine.items()},
        "train/logra/kl_budget": {s: 2e-4 * alpha + 1e-5 for s, alpha in cosine.items()},
        "train/logra/predicted_kl": {s: 2e-4 * alpha + 1e-5 for s, alpha in cosine.items()},
        "train/logra/realized_kl": {s: 2.1e-4 * alpha + 1e-5 for s, alpha in cosine.items()},
        "train/logra/mismatch": dict.fromkeys(each, 1e-05),
        "train/logra/sync_bytes": {s: 60000 + noise.randint(-500, 500) for s in each},
        "train/logra/sync_dense_bytes": dict.fromkeys(each, 1600000.0),
        "train/logra/digest_ok": {s: 1 for s in each if s % 10 == 0},
        "eval/eval_default_pass1": {s: 0.34 + 0.15 * s / steps for s in range(0, steps + 1, steps // 3)},
        "eval/eval_default_pass4": {s: 0.6 + 0.1 * s / steps for s in range(0, steps + 1, steps // 3)},
    }


def call(*arguments: object) -> int:
    """Run the subcommand with these arguments."""
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(argument) for argument in arguments]))


def picture_size(path: Path) -> tuple[int, int]:
    """Decode a PNG, check that it is not one flat colour, return width and height."""
    from matplotlib.image import imread

    pixels = imread(path)
    assert pixels.std() > 0.02
    return pixels.shape[1], pixels.shape[0]


def expected_size(rows: int) -> tuple[int, int]:
    return round(2 * PANEL_INCHES[0] * DPI), round((rows * PANEL_INCHES[1] + HEADER_INCHES) * DPI)


class Page(HTMLParser):
    """Collects what the tests ask of the page, and fails on tags that are not closed in order."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open = self.open[:-1] if tag not in self.VOID else self.open

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def make_demo(run: Path) -> Path:
    """Fill a run directory as the demo leaves it."""
    write_events(run / "tensorboard" / "ppo" / "events.out.tfevents.1000.host.1.0", synthetic(60))
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    return run


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo's run directory, without a report."""
    return make_demo(tmp_path / "demo")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's run directory with the report in it, and what the command printed."""
    run = make_demo(tmp_path_factory.mktemp("runs") / "demo")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert call(run) == 0
    return run, printed.getvalue()


def test_writes_picture_and_page(reported: tuple[Path, str]):
    run, printed = reported
    assert "+15.8 points" in printed and "27x smaller" in printed
    assert f"wrote {run / 'report.png'}\nwrote {run / 'report.html'}\n" in printed
    assert max(map(len, printed.split("wrote")[0].splitlines())) <= 80

    assert picture_size(run / "report.png") == expected_size(rows=3)
    assert sorted(path.name for path in run.iterdir()) == ["report.html", "report.png", "summary.json", "tensorboard"]


def test_page_is_self_contained(reported: tuple[Path, str]):
    run, _ = reported
    text = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link", text)
    assert str(run.parent) not in text
    page = Page(text)
    assert page.seen.count("figure") == page.seen.count("svg") == len(PANELS)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    for figure in ("48.9%", "+10.9 points", "61.2 kB", "16x smaller", "9 min 7 s", "6 of 6", "rollout reward"):
        assert figure in page.text, figure
    # Every colour of the figures follows the reader's light or dark setting.
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#[0-9a-f]{6}\b", text[text.index("<main>") :])


def test_same_run_same_files_elsewhere(reported: tuple[Path, str], tmp_path: Path):
    run, _ = reported
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    assert call(run, "--out", tmp_path / "new" / "deep") == 0
    for name in ("report.png", "report.html"):
        assert (tmp_path / "new/deep" / name).read_bytes() == (run / name).read_bytes()
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_name_of_the_run_is_escaped(tmp_path: Path):
    run = tmp_path / "a <b> & $x^$"
    write_events(run / "events.out.tfevents.1", {"train/logra/sync_bytes": {1: 5e4, 2: 6e4}})
    assert call(run) == 0
    assert picture_size(run / "report.png") == expected_size(rows=1)
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "a &lt;b&gt; &amp; $x^$" in text and "a <b>" not in text


def test_what_openrlhf_writes_without_summary(tmp_path: Path):
    """OpenRLHF's TensorboardLogger writes with torch's SummaryWriter; the table then says what the events say."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(log_dir=str(tmp_path))
    for tag, points in synthetic(30).items():
        for step, value in points.items():
            writer.add_scalar(tag, value, step)
    writer.add_text("train/generated_samples", "Sample", 1)
    writer.close()
    assert call(tmp_path) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.seen.count("svg") == len(PANELS)
    assert "+15.0 points" in page.text and "27x smaller" in page.text


def test_later_event_file_wins(tmp_path: Path):
    tag = "train/rollout/reward_mean"
    # The names sort the other way round: what counts is the time of the first event.
    first, second = dict.fromkeys(range(1, 51), 0.1), dict.fromkeys(range(41, 46), 0.9)
    write_events(tmp_path / "tensorboard/b/events.out.tfevents.1", {tag: first}, started=100)
    write_events(tmp_path / "tensorboard/a/events.out.tfevents.2", {tag: second}, started=900)
    points = read_run(tmp_path).scalars[tag]
    assert list(points) == list(range(1, 46))
    assert points[40] == pytest.approx(0.1) and points[41] == pytest.approx(0.9)


def test_merge_keeps_other_tags_whole():
    first = (1.0, {"train/a": {1: 1.0, 2: 1.0, 3: 1.0}, "eval/b": {0: 5.0, 2: 5.0}})
    second = (2.0, {"train/a": {2: 2.0}})
    assert merge_scalars([second, first]) == {"train/a": {1: 1.0, 2: 2.0}, "eval/b": {0: 5.0, 2: 5.0}}


def test_event_file_cut_by_a_kill(demo: Path):
    whole = read_run(demo).scalars
    path = next(demo.rglob("events.out.tfevents.*"))
    path.write_bytes(path.read_bytes()[:-7])
    (path.parent / "events.out.tfevents.2000.host.2.0").write_bytes(b"")
    cut = read_run(demo).scalars
    last = list(whole)[-1]
    assert list(cut[last].items()) == list(whole[last].items())[:-1]
    assert {**cut, last: None} == {**whole, last: None}


def test_panels_without_data_are_left_out(tmp_path: Path):
    scalars = synthetic(30)
    kept = {tag: scalars[tag] for tag in ("train/rollout/reward_mean", "train/logra/alpha", "train/logra/sync_bytes")}
    write_events(tmp_path / "events.out.tfevents.1", kept)
    assert call(tmp_path) == 0
    assert picture_size(tmp_path / "report.png") == expected_size(rows=2)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.seen.count("svg") == 3
    for absent in ("Gradient norm", "Update ratio", "full weights,", "Before / full"):
        assert absent not in page.text, absent


@pytest.mark.parametrize(
    "points",
    [{1: 0.5}, {1: 0.0, 2: 0.0}, {1: float("nan"), 2: 0.5, 3: float("inf")}, {1: -3.0, 2: 12345.0, 10_000_000: 1e9}],
)
def test_odd_values_are_drawn(tmp_path: Path, points: dict[int, float]):
    tags = ("train/rollout/reward_mean", "train/logra/alpha", "train/logra/sync_bytes")  # each kind of axis
    write_events(tmp_path / "events.out.tfevents.1", dict.fromkeys(tags, points))
    assert call(tmp_path) == 0


def one_line_error(capsys: pytest.CaptureFixture, *words: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("openrlhf-logra report: ") and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err, word


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert call(tmp_path / "none") == 2
    one_line_error(capsys, "no such run directory", "none")
    assert list(tmp_path.iterdir()) == []


def test_no_event_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "tensorboard").mkdir()
    assert call(tmp_path, "--out", tmp_path / "out") == 2
    one_line_error(capsys, "no TensorBoard event files", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


@pytest.mark.parametrize("scalars, words", [({}, "no scalars yet"), ({"train/loss": {1: 1.0}}, "none of the metrics")])
def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture, scalars: dict, words: str):
    write_events(tmp_path / "events.out.tfevents.1", scalars)
    assert call(tmp_path) == 2
    one_line_error(capsys, words)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"seed": 1,', "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"pass1_after": "0.5"}', "pass1_after must be a finite number"),
        ('{"sync_bytes": NaN}', "sync_bytes must be a finite number"),
        ('{"updates": true}', "updates must be a finite number"),
        ('{"seed": 1%s}' % ("0" * 400), "seed must be a finite number"),
    ],
)
def test_corrupt_summary(demo: Path, capsys: pytest.CaptureFixture, text: str, words: str):
    (demo / "summary.json").write_text(text)
    assert call(demo) == 2
    one_line_error(capsys, "summary.json", words)
    assert not (demo / "report.png").exists() and not (demo / "report.html").exists()


def test_unwritable_destination(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="cannot write to .*file"):
        report.write_files(tmp_path / "file", {"report.png": b"1"})
    (tmp_path / "out" / "report.html").mkdir(parents=True)  # no file can replace it
    with pytest.raises(ReportError, match="cannot write to .*out"):
        report.write_files(tmp_path / "out", {"report.png": b"1", "report.html": b"2"})
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("missing", ["matplotlib", "tensorboard"])
def test_missing_extra(demo: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: str):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert call(demo) == 2
    one_line_error(capsys, missing, "pip install matplotlib tensorboard")


def test_summary_rows():
    assert summary_rows(SUMMARY) == [
        ("Held-out pass@1", "33.1%", "48.9%", "+15.8 points"),
        ("Held-out pass@4", "60.2%", "71.1%", "+10.9 points"),
        ("Weight sync", "1.64 MB", "61.2 kB", "27x smaller"),
        ("Trainer state", "19.7 MB", "1.2 MB", "16x smaller"),
    ]
    worse = {"pass1_before": 0.5, "pass1_after": 0.25, "sync_bytes": 3, "full_bytes": 2, "state_bytes": None}
    assert summary_rows(worse) == [
        ("Held-out pass@1", "50.0%", "25.0%", "-25.0 points"),
        ("Weight sync", "2 B", "3 B", "1.5x larger"),
    ]
    assert summary_rows({}) == []
    assert summary_rows({"sync_bytes": 0, "full_bytes": 10})[0][3] == "-"
    lines = summary_table(summary_rows(SUMMARY)).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= 80 and len(lines) == 6


def test_bytes_text():
    counts = (0, 999, 999.7, 61234, 999_600, 1.5e10, 2e16)
    assert [bytes_text(c) for c in counts] == ["0 B", "999 B", "1 kB", "61.2 kB", "1 MB", "15 GB", "20,000 TB"]


def test_seconds_text():
    assert [seconds_text(s) for s in (0.4, 59.6, 547.3, 7800)] == ["0 s", "1 min 0 s", "9 min 7 s", "2 h 10 min"]


def test_several_held_out_sets_are_averaged():
    scalars = {"eval/eval_a_pass1": {0: 0.2, 5: 0.4}, "eval/eval_b_pass1": {0: 0.4}, "eval/eval_a_pass16": {0: 9.0}}
    assert points_of(scalars, "eval/eval_*_pass1") == pytest.approx({0: 0.3, 5: 0.4})


def test_running_mean():
    assert running_mean([1.0, 5.0, 1.0]) == [1.0, 5.0, 1.0]  # too few to smooth
    line = [float(value) for value in range(100)]
    assert running_mean(line)[10:90] == line[10:90]  # a straight line stays where it is
    assert len(running_mean(line)) == 100
