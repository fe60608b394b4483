"""Two of OpenRLHF's rollout actors with real vLLM engines under Ray: caches, requests in flight, engines that die."""

import os
import signal
import time
from pathlib import Path

import pytest

from openrlhf_logra.host import cpu

cpu.install()

import openrlhf.trainer.ray.vllm_engine as stock  # noqa: E402
import ray  # noqa: E402
from models import make_model  # noqa: E402
from vllm_engines import Trainer  # noqa: E402

from openrlhf_logra.host import engine_client, rollout_actor, runtime_env  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With room for prompts of more than one block of vLLM's cache (128 tokens on a CPU)."""
    return make_model(tmp_path_factory.mktemp("long"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engines(model):
    """Made by OpenRLHF's own function."""
    stock_class, stock.RolloutRayActor = stock.RolloutRayActor, rollout_actor.restarted_by_ray()
    ray.init(
        num_gpus=2,
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": runtime_env.OUR_HOOK},
    )
    settings = {"seed": 0, "full_determinism": False, "enable_prefix_caching": True, "enforce_eager": True}
    yield stock.create_vllm_engines(2, 1, str(model), max_model_len=512, gpu_memory_utilization=0.5, **settings)
    ray.shutdown()
    stock.RolloutRayActor = stock_class


class Trained(Trainer):
    """The trainer with OpenRLHF's actors as its engines."""

    def __init__(self, path, engines, **options):
        super().__init__(path, [], **options)
        self.client = self.sender.client = engine_client.RayEngines(engines)


def process_of(actor) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def engine_core_of(actor) -> int:
    """The process of the engine core: the actor's only child that holds vLLM's name."""
    parent = process_of(actor)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, name = (entry / "status").read_text(), (entry / "cmdline").read_text()
            except OSError:
                continue
            if f"PPid:\t{parent}\n" in status and "EngineCore" in name:
                return int(entry.name)
    raise AssertionError(f"process {parent} has no engine core")


def wait_until_started_again(actor, killed: int) -> None:
    """Until another process than ``killed`` answers: Ray kills asynchronously, the old one may answer for a while."""
    end = time.monotonic() + 300
    while True:
        try:
            if process_of(actor) != killed:
                return
        except ray.exceptions.RayActorError:
            pass
        assert time.monotonic() < end, "Ray has not started the actor again"
        time.sleep(1)


def generate(actor, prompt=(5, 17, 40), tokens=4):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    return actor.generate.remote(list(prompt), sampling)


def said(output) -> list[tuple[int, float]]:
    (one,) = output.outputs
    return [(token, found[token].logprob) for token, found in zip(one.token_ids, one.logprobs)]


def test_no_block_of_old_weights_is_used(engines, model):
    """A prompt that one engine has cached under old weights, and a request that a partial rollout keeps running."""
    prompt = [3 + i % 90 for i in range(300)]
    trainer = Trained(model, engines)
    old = said(ray.get(generate(engines[0], prompt)))
    kept = generate(engines[0], prompt, tokens=200)
    while not ray.get(engines[0].get_num_unfinished_requests.remote()):
        time.sleep(0.01)
    ray.get(engines[0].pause_generation.remote())
    trainer.update(4)
    assert trainer.sender.send_weights().digest_ok
    ray.get(engines[0].resume_generation.remote())
    assert len(said(ray.get(kept))) == 200
    cached, fresh = (said(output) for output in ray.get([generate(actor, prompt) for actor in engines]))
    assert cached == fresh != old


def test_an_engine_that_dies_is_repaired(engines, model, capfd):
    trainer = Trained(model, engines, loaded_version=None)  # the engines hold another test's weights
    trainer.update()
    assert trainer.sender.send_weights().mode == "dense"
    trainer.update()
    assert trainer.sender.send_weights().mode == "factor"
    os.kill(engine_core_of(engines[1]), signal.SIGKILL)
    time.sleep(1)
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "dense" and report.digest_ok and report.version == 3
    assert "engine 1 answers again" in capfd.readouterr().out
    trainer.update()
    report = trainer.sender.send_weights()
    assert report.mode == "factor" and report.digest_ok
    first, second = (said(output) for output in ray.get([generate(actor) for actor in engines]))
    assert first == second


def test_an_actor_that_ray_started_again_serves_nothing_before_a_sync(engines, model):
    trainer = Trained(model, engines, loaded_version=None)
    trainer.update()
    trainer.sender.send_weights()
    killed = process_of(engines[0])
    ray.kill(engines[0], no_restart=False)
    wait_until_started_again(engines[0], killed)
    waiting = generate(engines[0])
    assert ray.wait([waiting], timeout=3)[0] == []
    trainer.update()
    assert trainer.sender.send_weights().mode == "dense"
    first, second = said(ray.get(waiting, timeout=60)), said(ray.get(generate(engines[1])))
    assert first == second
