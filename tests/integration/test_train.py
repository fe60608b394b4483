"""The stock command line with one flag more, on real Ray, DeepSpeed and vLLM: engine == trainer == checkpoint."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import FULL
from training import LOGRA_FLAGS, digest_of_checkpoint, processes_of, run, start, stock_flags, wait_until_gone

# Every stage, rank count and engine count, and every pair of the last two.
COVERING = [(0, 1, 2), (1, 2, 1), (2, 1, 1), (3, 2, 2)]
LOGRA_TRAIN = [str(Path(sys.executable).with_name("openrlhf-logra")), "train"]
COMBINATIONS = list(itertools.product((0, 1, 2, 3), (1, 2), (1, 2))) if FULL else COVERING


@pytest.mark.parametrize("zero, ranks, engines", COMBINATIONS)
def test_engines_trainer_and_checkpoint_hold_the_same_bits(zero, ranks, engines, wide_model, tmp_path):
    """ZeRO 1 starts through `openrlhf-logra train`, ZeRO 0 has prefix caching on."""
    changes = {"--vllm.enable_prefix_caching": None} if zero == 0 else {}
    flags = stock_flags(wide_model, tmp_path, zero=zero, ranks=ranks, engines=engines, **changes)
    finished = run([*flags, *LOGRA_FLAGS], tmp_path, program=LOGRA_TRAIN if zero == 1 else None)
    assert finished.code == 0, finished.output[-5000:]
    assert [step.version for step in finished.steps] == [2, 4, 6]
    assert all(step.digest for step in finished.steps), [step.line for step in finished.steps]
    assert len({step.digest for step in finished.steps}) == 3, "every step must have changed the weights"
    assert finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")
    roles = [role for role, _ in finished.roles()]
    assert roles.count("driver") == 1
    assert roles.count("trainer actor") == ranks
    assert roles.count("rollout actor") == engines
    # Per engine: the rollout actor's own process, and the engine core with its worker in it.
    assert roles.count("vLLM process") == 2 * engines


def test_gaussian_goes_dense_and_is_exact(tiny_model, tmp_path):
    flags = stock_flags(tiny_model, tmp_path, steps=2, zero=3, ranks=2)
    finished = run([*flags, *LOGRA_FLAGS, "--logra.distribution", "gaussian"], tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert [step.version for step in finished.steps] == [2, 4] and all(step.digest for step in finished.steps)
    assert finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")


def test_resume_syncs_dense_first_and_interruption_leaves_nothing(tiny_model, tmp_path):
    """Save every step, stop with Ctrl-C after the second, resume: one dense sync, then records again."""
    flags = stock_flags(tiny_model, tmp_path, steps=4, **{"--ckpt.save_steps": 1})
    process, log, mark = start([*flags, *LOGRA_FLAGS], tmp_path)
    end = time.monotonic() + 300
    while "[logra] step 2:" not in log.read_text(errors="replace") and time.monotonic() < end:
        time.sleep(0.2)
    assert "[logra] step 2:" in log.read_text(errors="replace"), log.read_text(errors="replace")[-3000:]
    while not (tmp_path / "checkpoints/_actor/latest").exists() and time.monotonic() < end:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert process.returncode != 0
    assert wait_until_gone(mark, 30) == []
    assert not processes_of(mark)

    finished = run([*flags, *LOGRA_FLAGS, "--ckpt.load_enable"], tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    first = finished.steps[0]
    resumed = 2 * (first.number - 1)
    assert resumed >= 2 and first.version == resumed + 2 and first.digest
    assert finished.output.count(f"resumed at version {resumed}: the first sync is dense") == 1
    assert all("sync factor" in step.line for step in finished.steps), "only the sync before the first step is dense"
    assert finished.steps[-1].number == 4 and finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")
