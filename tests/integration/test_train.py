"""The stock command line with one flag more, on real Ray, DeepSpeed and vLLM: engine == trainer == checkpoint."""

import itertools
import os
import signal
import time

import pytest
from conftest import FULL
from training import LOGRA_FLAGS, digest_of_checkpoint, processes_of, run, start, stock_flags, wait_until_gone

# Every stage, rank count and engine count, and every pair of the last two.
COVERING = [(0, 1, 2), (1, 2, 1), (2, 1, 1), (3, 2, 2)]
COMBINATIONS = list(itertools.product((0, 1, 2, 3), (1, 2), (1, 2))) if FULL else COVERING


@pytest.mark.parametrize("zero, ranks, engines", COMBINATIONS)
def test_engines_trainer_and_checkpoint_hold_the_same_bits(zero, ranks, engines, tiny_model, tmp_path):
    flags = stock_flags(tiny_model, tmp_path, zero=zero, ranks=ranks, engines=engines)
    finished = run([*flags, *LOGRA_FLAGS], tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert [step.version for step in finished.steps] == [2, 4, 6]
    assert all(step.digest for step in finished.steps), [step.line for step in finished.steps]
    assert len({step.digest for step in finished.steps}) == 3, "every step must have changed the weights"
    assert finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")
    roles = [role for role, _ in finished.roles()]
    assert roles.count("driver") == 1
    assert roles.count("trainer actor") == ranks
    assert roles.count("rollout actor") == engines
    # Per engine: the rollout actor's own process, the engine core and its worker.
    assert roles.count("vLLM process") == 3 * engines


def test_dense_mode(tiny_model, tmp_path):
    flags = stock_flags(tiny_model, tmp_path, steps=2)
    finished = run([*flags, *LOGRA_FLAGS, "--logra.sync.mode", "dense"], tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert [step.version for step in finished.steps] == [2, 4] and all(step.digest for step in finished.steps)
    assert finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")


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
    assert first.number >= 2 and first.version == 2 * first.number and first.digest
    assert "resumed at version" in finished.output and "dense sync" in finished.output
    assert finished.steps[-1].number == 4 and finished.steps[-1].digest == digest_of_checkpoint(tmp_path / "model")
