"""The stock command line with one flag more, on real Ray, DeepSpeed and vLLM: engine == trainer == checkpoint."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import FULL
from safetensors.torch import load_file
from training import (
    LOGRA_FLAGS,
    Finished,
    digest_of_checkpoint,
    processes_of,
    run,
    start,
    stock_flags,
    wait_until_gone,
)

from openrlhf_logra.math.kl import KLSettings

# Every stage, rank count and engine count, and every pair of the last two.
COVERING = [(0, 1, 2), (1, 2, 1), (2, 1, 1), (3, 2, 2)]
LOGRA = str(Path(sys.executable).with_name("openrlhf-logra"))
COMBINATIONS = list(itertools.product((0, 1, 2, 3), (1, 2), (1, 2))) if FULL else COVERING
# What else is switched on at each stage.
ALSO = {
    0: {"--vllm.enable_prefix_caching": None},
    1: {"--train.async_enable": None, "--train.partial_rollout_enable": None, "--vllm.enable_prefix_caching": None},
    2: {"--vllm.tensor_parallel_size": 2},
    3: {},
}


def check_steps(finished: Finished, steps: int, form: str) -> None:
    """Every sync was of one form, and verified; every step changed the weights."""
    lines = [step.line for step in finished.steps]
    assert [step.version for step in finished.steps] == list(range(2, 2 * steps + 1, 2)), lines
    assert all(step.digest and f"sync {form}" in step.line for step in finished.steps), lines
    assert len({step.digest for step in finished.steps}) == steps, "every step must have changed the weights"


def check_replay(folder: Path, base: Path, finished: Finished) -> None:
    """The base model and the records give the saved checkpoint, tensor by tensor, as the last step's digest says."""
    out = folder / "replayed"
    command = ["--base", base, "--records", folder / "records", "--step", finished.steps[-1].version, "--out", out]
    subprocess.run([LOGRA, "replay", *map(str, command)], check=True)
    held, saved = (load_file(path / "model.safetensors") for path in (out, folder / "model"))
    # OpenRLHF may save the tied head as a tensor of its own; transformers does not.
    embeddings = saved["model.embed_tokens.weight"]
    assert torch.equal(saved.pop("lm_head.weight", embeddings), embeddings)
    assert held.keys() == saved.keys() and all(torch.equal(held[name], saved[name]) for name in held)
    assert finished.steps[-1].digest == digest_of_checkpoint(out)


@pytest.mark.parametrize("zero, ranks, engines", COMBINATIONS)
def test_engines_trainer_and_checkpoint_hold_the_same_bits(zero, ranks, engines, wide_model, tmp_path):
    """ZeRO 1 starts through `openrlhf-logra train`; ZeRO 2 makes fifty updates."""
    steps = 25 if zero == 2 else 3
    flags = stock_flags(wide_model, tmp_path, zero=zero, ranks=ranks, engines=engines, steps=steps, **ALSO[zero])
    flags = [*flags, *LOGRA_FLAGS, "--logra.sync.log_dir", "records"]
    finished = run(flags, tmp_path, program=[LOGRA, "train"] if zero == 1 else None)
    assert finished.code == 0, finished.output[-5000:]
    check_steps(finished, steps, "factor")
    assert all(", KL " in step.line for step in finished.steps), "predicted-KL control is the default"
    check_replay(tmp_path, wide_model, finished)
    roles = [role for role, _ in finished.roles()]
    assert roles.count("driver") == 1
    assert roles.count("trainer actor") == ranks
    assert roles.count("rollout actor") == engines
    # Per engine: the rollout actor's own process, and the engine core with its worker in it; or two workers beside it.
    assert roles.count("vLLM process") == (4 if zero == 2 else 2) * engines


WITHOUT_FACTORS = {
    # Weights in partitions, and a product that engines cannot repeat: changed elements are gathered from two ranks.
    "gaussian": ({"zero": 3, "ranks": 2}, [*LOGRA_FLAGS, "--logra.distribution", "gaussian"]),
    "dense": (
        {"zero": 1, "ranks": 2, "--actor.adam.lr": 1e-3},
        ["--logra.enable", "--logra.method", "dense", "--logra.sync.verify_every", "1"],
    ),
}


@pytest.mark.parametrize("changes, logra", WITHOUT_FACTORS.values(), ids=list(WITHOUT_FACTORS))
def test_fifty_updates_that_are_no_factors(changes, logra, tiny_model, tmp_path):
    flags = [*stock_flags(tiny_model, tmp_path, steps=25, **changes), *logra, "--logra.sync.log_dir", "records"]
    finished = run(flags, tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    check_steps(finished, 25, "sparse")
    check_replay(tmp_path, tiny_model, finished)


RECORD = """
import json

from openrlhf_logra.train.callbacks import Callback


class Record(Callback):
    def on_step_end(self, context):
        self.write(version=context.outcome.version, alpha=context.outcome.alpha, **context.metrics)

    def on_sync(self, context):
        self.write(synced=context.version, bytes=context.report.sync_bytes)

    def write(self, **line):
        with open("updates.jsonl", "a") as file:
            print(json.dumps(line), file=file)
"""


def check_step_control(path: Path, resumed: int) -> None:
    """A callback of the user saw every update and sync; each update had the budget of its index, resumed or not."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    syncs = [line["synced"] for line in lines if "synced" in line]
    updates = [line for line in lines if "version" in line]
    assert syncs[-2:] == [6, 8] and resumed in syncs
    assert [line["version"] for line in updates][-8 + resumed :] == list(range(resumed + 1, 9))
    for line in updates:
        scheduled = KLSettings().scheduled(line["version"] - 1)
        assert scheduled / 2 <= line["logra/kl_budget"] <= scheduled
        assert line["logra/predicted_kl"] == pytest.approx(line["logra/kl_budget"]) or line["alpha"] == 3.0
        # (Two bf16 computations of one policy differ to either side, and only an excess of the rollout's counts.)
        assert line["logra/realized_kl"] > 0 and line["logra/mismatch"] >= 0


@pytest.mark.parametrize("end", ["ctrl-c", "kill -9 of a trainer actor"])
def test_resume_syncs_dense_first_and_an_end_leaves_nothing(end, tiny_model, tmp_path):
    """Save every step, end after the second, resume: one dense sync, then records again, in one log. Step control goes
    on where it was. (At a temperature at which vLLM's log-probabilities need processing.)"""
    changes = {"--ckpt.save_steps": 1, "--algo.advantage.estimator": "reinforce", "--rollout.temperature": 0.8}
    flags = stock_flags(tiny_model, tmp_path, steps=4, **changes)
    flags += [*LOGRA_FLAGS, "--logra.sync.log_dir", "records", "--logra.reward_baseline", "running"]
    flags += ["--logra.callbacks", "record:Record"]
    (tmp_path / "record.py").write_text(RECORD)
    process, log, mark = start(flags, tmp_path)
    deadline = time.monotonic() + 300
    while "[logra] step 2:" not in log.read_text(errors="replace") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "[logra] step 2:" in log.read_text(errors="replace"), log.read_text(errors="replace")[-3000:]
    while not (tmp_path / "checkpoints/_actor/latest").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    if end == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
    else:
        (trainer,) = re.findall(r"active in the trainer actor \(pid (\d+)\)", log.read_text(errors="replace"))
        os.kill(int(trainer), signal.SIGKILL)
    process.wait(60)
    assert process.returncode != 0
    assert wait_until_gone(mark, 30) == []
    assert not processes_of(mark)

    finished = run([*flags, "--ckpt.load_enable"], tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    first = finished.steps[0]
    resumed = 2 * (first.number - 1)
    assert resumed >= 2 and first.version == resumed + 2 and first.digest
    assert finished.output.count(f"resumed at version {resumed}: the first sync is dense") == 1
    assert all("sync factor" in step.line for step in finished.steps), "only the sync before the first step is dense"
    assert finished.steps[-1].number == 4 and finished.steps[-1].version == 8
    check_replay(tmp_path, tiny_model, finished)
    check_step_control(tmp_path / "updates.jsonl", resumed)
