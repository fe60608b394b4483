"""Runs recipes/demo.sh once per configuration and seed, and tabulates what the runs logged (recipes/compare.sh)."""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from openrlhf_logra.report import ReportError
from openrlhf_logra.report.reader import read_run
from openrlhf_logra.units import bytes_text

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 42)  # the paper's
# Learning rates: the best on seed 7, which is none of the table's (docs/strategies.md). Two bases in a run.
METHODS = {
    "logra": [],
    "galore": ["--logra.method", "galore", "--actor.adam.lr", "8e-3", "--logra.refresh_every", "20"],
    "fira": ["--logra.method", "fira", "--actor.adam.lr", "4e-3", "--logra.refresh_every", "20"],
    "flora": ["--logra.method", "flora", "--actor.adam.lr", "0.1", "--logra.refresh_every", "20"],
    "lora": ["--logra.method", "lora", "--ds.lora.rank", "8", "--actor.adam.lr", "3e-3"],
    "dense": ["--logra.method", "dense", "--actor.adam.lr", "3e-4"],
}
STUDY = {
    f"{optimizer} r={rank} K={every or 'fixed'} {others}": [
        *("--logra.optimizer", optimizer, "--logra.rank", str(rank)),
        *("--logra.refresh_every", str(every), "--logra.non_target", others),
    ]
    for optimizer, rank, every, others in itertools.product(
        ("sgd", "row_adam", "adam"), (4, 16, 64), (1, 20, 0), ("freeze", "adamw")
    )
}
PHASES = ("timing/generation", "timing/make_experience", "timing/ppo_train", "timing/broadcast")


class RunFailed(Exception):
    """A run gave no figures. The message is one line."""


@dataclass(frozen=True)
class Result:
    """The figures of one run: scores are fractions, sizes bytes."""

    before: float
    pass1: float
    pass4: float
    state: float
    memory: float
    seconds: float
    sync: float


def train(flags: list[str], seed: int, steps: int, run: Path) -> Result:
    """One run, unless it has been made; its output is in RUN.log.

    Raises:
        RunFailed: saying where to look.
    """
    flags = [*flags, "--data.max_samples", str(64 * steps), "--eval.steps", str(steps)]
    flags += ["--logra.kl.horizon", str(2 * steps), "--logra.callbacks", "peak_memory:PeakMemory"]
    made, expected = run / "flags.json", json.dumps(flags)
    if not made.is_file() or made.read_text() != expected:
        run.parent.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "SEED": str(seed), "RUN": str(run), "PYTHONPATH": paths}
        with run.with_suffix(".log").open("w") as log:
            command = ["bash", str(HERE.parent / "demo.sh"), *flags]
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RunFailed(f"demo.sh ended with {done.returncode}; see {log.name}")
        made.write_text(expected)
    try:
        return read(run)
    except (ReportError, OSError, ValueError, KeyError, ZeroDivisionError) as error:
        raise RunFailed(f"{run} has no figures ({type(error).__name__}: {error}); delete it and run again") from error


def read(run: Path) -> Result:
    """The figures of a finished run."""
    scalars = read_run(run).scalars
    summary = json.loads((run / "summary.json").read_text())
    per_step = [scalars[f"train/{phase}"] for phase in PHASES]
    steps = [sum(points[step] for points in per_step) for step in per_step[0]]
    return Result(
        before=summary["pass1_before"],
        pass1=summary["pass1_after"],
        pass4=summary["pass4_after"],
        state=summary["state_bytes"],
        memory=max(scalars["train/peak_memory_bytes"].values()),
        seconds=statistics.median(steps) * len(steps) / summary["updates"],
        sync=summary["sync_bytes"],
    )


def table(results: dict[str, list[Result]]) -> str:
    """Markdown: mean and standard deviation over the seeds, of sizes and times the mean."""
    rows = [
        "| | pass@1 before | pass@1 | pass@4 | trainer state | peak memory | s/update, rollout included | synced |",
        "|---" * 8 + "|",
    ]
    for name, of in results.items():
        cells = [spread([getattr(result, score) for result in of]) for score in ("before", "pass1", "pass4")]
        cells += [bytes_text(mean(of, size)) for size in ("state", "memory")]
        cells += [f"{mean(of, 'seconds'):.2f}", bytes_text(mean(of, "sync"))]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def mean(results: list[Result], figure: str) -> float:
    return statistics.mean(getattr(result, figure) for result in results)


def spread(scores: list[float]) -> str:
    """In percent; one score has no deviation."""
    deviation = f" ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{100 * statistics.mean(scores):.1f}{deviation}"


def draw(results: dict[str, list[Result]], path: Path) -> None:
    """Accuracy against trainer bytes, a mark for each configuration."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    colours = {"sgd": "tab:blue", "row_adam": "tab:orange", "adam": "tab:green"}
    markers = {"K=1": "o", "K=20": "s", "K=fixed": "^"}
    fills = {"freeze": "none", "adamw": "full"}
    for name, of in results.items():
        optimizer, _, every, others = name.split()
        axes.errorbar(
            mean(of, "state") / 1e3,
            100 * mean(of, "pass1"),
            yerr=100 * statistics.stdev(r.pass1 for r in of) if len(of) > 1 else None,
            color=colours[optimizer],
            marker=markers[every],
            fillstyle=fills[others],
        )
    for optimizer, colour in colours.items():
        axes.plot([], [], color=colour, label=optimizer)
    for every, marker in markers.items():
        axes.plot([], [], "k", linestyle="", marker=marker, fillstyle="none", label=every)
    for others, fill in fills.items():
        axes.plot([], [], "k", linestyle="", marker="D", fillstyle=fill, label=f"non_target {others}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xscale("log")
    axes.set_xlabel("trainer state in kB")
    axes.set_ylabel("held-out pass@1 in %")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Returns 1 after one line on stderr when a run fails, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", action="store_true", help="LoGRA's own choices instead of methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=16, help="rollouts of a run, two updates each")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the configurations")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    args = parser.parse_args()
    known = STUDY if args.study else METHODS
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]}: is none of {', '.join(known)}")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        parser.error(f"--seeds {' '.join(map(str, args.seeds))}: must be whole numbers, each given once")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: is not a directory")
    chosen = {name: known[name] for name in args.only or known}
    results: dict[str, list[Result]] = {name: [] for name in chosen}
    jobs = list(itertools.product(args.seeds, chosen))
    for seed, name in (bar := tqdm(jobs, unit="run")):
        bar.set_description(f"{name}, seed {seed}")
        run = args.out / f"{name.replace(' ', '_')}-{seed}-{args.steps}"
        try:
            results[name].append(train(chosen[name], seed, args.steps, run))
        except RunFailed as error:
            bar.close()
            print(f"compare.py: {name} with seed {seed}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            bar.close()
            print("compare.py: stopped; the same command goes on with what is missing", file=sys.stderr)
            return 130
    text = table(results)
    (args.out / ("study.md" if args.study else "table.md")).write_text(text)
    print(text)
    if args.study:
        draw(results, args.out / "study.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
