"""A rollout engine that dies is started again by Ray, serves nothing, and is brought to the trainer's version."""

import os
import signal
import time
from pathlib import Path

import pytest

from openrlhf_logra.host import cpu

cpu.install()

import openrlhf.trainer.ray.vllm_engine as stock  # noqa: E402
import ray  # noqa: E402
from vllm_engines import Trainer  # noqa: E402

from openrlhf_logra.host import actors, plugin  # noqa: E402


@pytest.fixture
def engines(tiny_model, monkeypatch):
    """Two rollout actors, made by OpenRLHF's own function."""
    monkeypatch.setattr(stock, "RolloutRayActor", plugin.rollout_actor())
    # What ends an actor of this session must not need another one's address.
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init(
        num_gpus=2,
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": plugin.SETUP_HOOK},
    )
    settings = {"seed": 0, "full_determinism": False, "enable_prefix_caching": True, "enforce_eager": True}
    yield stock.create_vllm_engines(2, 1, str(tiny_model), max_model_len=64, gpu_memory_utilization=0.5, **settings)
    ray.shutdown()


class Trained(Trainer):
    """The trainer with OpenRLHF's actors as its engines."""

    def __init__(self, path, engines, **options):
        super().__init__(path, [], **options)
        self.client = self.sender.client = actors.RayEngines(engines)


def engine_core_of(actor) -> int:
    """The process of the engine core: the actor's only child that holds vLLM's name."""
    parent = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, name = (entry / "status").read_text(), (entry / "cmdline").read_text()
            except OSError:
                continue
            if f"PPid:\t{parent}\n" in status and "EngineCore" in name:
                return int(entry.name)
    raise AssertionError(f"process {parent} has no engine core")


def generate(actor):
    from vllm import SamplingParams

    return actor.generate.remote([5, 17, 40], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))


def test_an_engine_that_dies_is_repaired(engines, tiny_model, capfd):
    trainer = Trained(tiny_model, engines)
    trainer.update()
    assert trainer.sender.send_weights().mode == "factor"
    os.kill(engine_core_of(engines[1]), signal.SIGKILL)
    time.sleep(1)
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and report.digest_ok and report.version == 2
    assert "engine 1 answers again" in capfd.readouterr().out
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "factor" and report.digest_ok
    first, second = (list(o.outputs[0].token_ids) for o in ray.get([generate(actor) for actor in engines]))
    assert first == second

    # The whole actor dies: it comes back with the base model, and requests wait until a sync has reached it.
    ray.kill(engines[0], no_restart=False)
    waiting = None
    for _ in range(120):
        try:
            ray.get(engines[0].get_num_unfinished_requests.remote())
            waiting = generate(engines[0])
            break
        except ray.exceptions.RayActorError:
            time.sleep(1)
    assert waiting is not None
    assert ray.wait([waiting], timeout=3)[0] == []
    trainer.update()
    assert trainer.sender.send_weights().mode == "dense"
    assert ray.get(waiting, timeout=60).outputs[0].token_ids
