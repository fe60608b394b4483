"""The stock command line with one flag more, on real Ray, DeepSpeed and vLLM: engine == trainer == checkpoint."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FULL
from training import (
    LOGRA,
    LOGRA_FLAGS,
    check_replay,
    check_steps,
    merged_by_peft,
    run,
    start,
    stock_flags,
    wait_until_gone,
)

from openrlhf_logra.math.digest import total_digest
from openrlhf_logra.math.kl import KLSettings
from openrlhf_logra.sync.trainer import digests_of

# Every stage, rank count and engine count, and every pair of the last two; stage 1 on two ranks is the resumed run's.
# A Gaussian product cannot be repeated by engines: its changes are found by comparing.
COVERING = [(0, 1, 2, "gaussian"), (2, 1, 1, "rademacher"), (3, 2, 2, "rademacher")]
EVERY = [*itertools.product((0, 1, 2, 3), (1, 2), (1, 2), ("rademacher",)), COVERING[0], (3, 2, 1, "gaussian")]
# What else is switched on at each stage.
ALSO = {
    0: {"--vllm.enable_prefix_caching": None},
    1: {"--train.async_enable": None, "--train.partial_rollout_enable": None, "--vllm.enable_prefix_caching": None},
    2: {"--vllm.tensor_parallel_size": 2},
    3: {},
}


@pytest.mark.parametrize("zero, ranks, engines, distribution", EVERY if FULL else COVERING)
def test_engines_trainer_and_checkpoint_hold_the_same_bits(zero, ranks, engines, distribution, wide_model, tmp_path):
    """ZeRO 2 and Gaussian projections make fifty updates."""
    steps = 25 if zero == 2 or distribution == "gaussian" else 3
    flags = stock_flags(wide_model, tmp_path, zero=zero, ranks=ranks, engines=engines, steps=steps, **ALSO[zero])
    flags = [*flags, *LOGRA_FLAGS, "--logra.distribution", distribution, "--logra.sync.log_dir", "records"]
    finished = run(flags, tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    check_steps(finished, steps, "factor" if distribution == "rademacher" else "sparse")
    assert all(", KL " in step.line for step in finished.steps), "predicted-KL control is the default"
    check_replay(tmp_path, wide_model, finished)
    roles = [role for role, _ in finished.roles()]
    assert roles.count("driver") == 1
    assert roles.count("trainer actor") == ranks
    assert roles.count("rollout actor") == engines
    # Per engine: the rollout actor's own process, and the engine core with its worker in it; or two workers beside it.
    assert roles.count("vLLM process") == (4 if zero == 2 else 2) * engines


def test_twenty_updates_of_lora_reach_the_engine_merged(tiny_model, tmp_path):
    """After every sync the engine's weights are the merge of the base and the adapter saved with it, by peft, bit for
    bit: the digest that trainer and engine agree on is that of the merged model, all parameters under stock names."""
    changes = {"--ds.lora.rank": 4, "--actor.adam.lr": 3e-3, "--ckpt.save_steps": 1, "--ckpt.save_hf": None}
    changes |= {"--ckpt.disable_ds": None}
    flags = stock_flags(tiny_model, tmp_path, zero=3, ranks=2, steps=10, **changes)
    flags += ["--logra.enable", "--logra.method", "lora", "--logra.sync.verify_every", "1"]
    finished = run(flags, tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    check_steps(finished, 10, "sparse")
    for step in finished.steps:
        merged = merged_by_peft(tiny_model, tmp_path / f"checkpoints/global_step{step.number}_hf")
        assert step.digest == f"{total_digest(digests_of(merged)):016x}"


RECORD = """
import json

from torch.distributed import get_rank

from openrlhf_logra.train.callbacks import Callback


class Record(Callback):
    def on_step_end(self, context):
        self.write(version=context.outcome.version, alpha=context.outcome.alpha, **context.metrics)

    def on_sync(self, context):
        self.write(synced=context.version, bytes=context.report.sync_bytes)

    def write(self, **line):
        with open(f"updates-{get_rank()}.jsonl", "a") as file:
            print(json.dumps(line), file=file)
"""


def check_step_control(path: Path, resumed: list[int]) -> None:
    """A callback of the user saw every update and sync; each update had the budget of its index, resumed or not."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    syncs = [line["synced"] for line in lines if "synced" in line]
    updates = [line for line in lines if "version" in line]
    assert syncs[-2:] == [10, 12] and set(resumed) <= set(syncs)
    assert [line["version"] for line in updates][-12 + resumed[-1] :] == list(range(resumed[-1] + 1, 13))
    for line in updates:
        scheduled = KLSettings().scheduled(line["version"] - 1)
        assert scheduled / 2 <= line["logra/kl_budget"] <= scheduled
        assert line["logra/predicted_kl"] == pytest.approx(line["logra/kl_budget"]) or line["alpha"] == 3.0
        # (Two bf16 computations of one policy differ to either side, and only an excess of the rollout's counts.)
        assert line["logra/realized_kl"] > 0 and line["logra/mismatch"] >= 0


def end_after(step: int, flags: list[str], folder: Path, kill: Callable[[subprocess.Popen, str], None]) -> None:
    """Start a run, end it once a checkpoint of this step is there, and see that nothing is left of it."""
    process, log, mark = start(flags, folder, [LOGRA, "train"])
    latest, deadline = folder / "checkpoints/_actor/latest", time.monotonic() + 300
    reached = f"[logra] step {step}:"
    while reached not in log.read_text(errors="replace") and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    assert reached in log.read_text(errors="replace"), log.read_text(errors="replace")[-3000:]
    while not latest.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    kill(process, log.read_text(errors="replace"))
    process.wait(60)
    assert process.returncode != 0
    assert wait_until_gone(mark, 30) == []


def ctrl_c(process: subprocess.Popen, output: str) -> None:
    os.killpg(process.pid, signal.SIGINT)


def kill_trainer(process: subprocess.Popen, output: str) -> None:
    trainer, _ = re.findall(r"active in the trainer actor \(pid (\d+)\)", output)
    os.kill(int(trainer), signal.SIGKILL)


def test_resume_syncs_dense_first_and_an_end_leaves_nothing(tiny_model, tmp_path):
    """Save every step; Ctrl-C after the second, resume; kill -9 of a trainer's actor after the fourth, resume: a dense
    sync each time, then records again, all in one log. Step control goes on where it was, on both ranks. (Through
    `openrlhf-logra train`, at a temperature at which vLLM's log-probabilities need processing.)"""
    changes = {"--ckpt.save_steps": 1, "--algo.advantage.estimator": "reinforce", "--rollout.temperature": 0.8}
    flags = stock_flags(tiny_model, tmp_path, zero=1, ranks=2, steps=6, **changes)
    flags += [*LOGRA_FLAGS, "--logra.sync.log_dir", "records", "--logra.reward_baseline", "running"]
    flags += ["--logra.callbacks", "record:Record"]
    (tmp_path / "record.py").write_text(RECORD)
    again = [*flags, "--ckpt.load_enable"]
    end_after(2, flags, tmp_path, ctrl_c)
    first = latest_version(tmp_path)
    end_after(4, again, tmp_path, kill_trainer)
    assert f"resumed at version {first}: the first sync is dense" in (tmp_path / "train.log").read_text()
    second = latest_version(tmp_path)
    assert 4 <= first < second
    finished = run(again, tmp_path, program=[LOGRA, "train"])
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count(f"resumed at version {second}: the first sync is dense") == 1
    assert finished.steps[0].version == second + 2 and finished.steps[0].digest
    assert all("sync factor" in step.line for step in finished.steps), "only the sync before the first step is dense"
    assert finished.steps[-1].number == 6 and finished.steps[-1].version == 12
    check_replay(tmp_path, tiny_model, finished)
    for rank in range(2):
        check_step_control(tmp_path / f"updates-{rank}.jsonl", [first, second])


def latest_version(folder: Path) -> int:
    """Of the checkpoint that a resume continues: two updates a step."""
    tag = (folder / "checkpoints/_actor/latest").read_text().strip()
    return 2 * int(tag.removeprefix("global_step"))
