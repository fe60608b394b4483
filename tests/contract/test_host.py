"""The host's names and signatures that the plugin is written against. A failure here means: the host moved."""

import argparse
import inspect
import subprocess
import sys

import pytest
import torch
from host_names import SIGNATURES
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf_logra.host import cpu

cpu.install()

from openrlhf_logra.config import add_flags  # noqa: E402
from openrlhf_logra.host import controller, deepspeed_strategy, rollout_actor, trainer_actor, vllm_worker  # noqa: E402

ACTOR_CLASSES = (
    controller.LograPPOTrainer,
    controller.LograTrainingActor,
    controller.LograPPOTrainerAsync,
    rollout_actor.LograRolloutRayActor,
    trainer_actor.LograPolicyModelActor,
)
SUBCLASSES = (
    *ACTOR_CLASSES,
    controller.LograExperienceMaker,
    deepspeed_strategy.LograDeepspeedStrategy,
    trainer_actor.LograActorPPOTrainer,
)


@pytest.mark.parametrize("ours", SUBCLASSES)
def test_signatures(ours):
    """Of the objects themselves, as Ray and OpenRLHF have made them; test_releases.py reads the sources."""
    stock = next(c for c in ours.__mro__ if c.__module__.startswith("openrlhf."))
    found = {}
    for method in SIGNATURES[f"{stock.__module__}.{stock.__qualname__}"]:
        # Ray adds a parameter of its own to the methods of actor classes.
        names = inspect.signature(getattr(stock, method)).parameters
        found[method] = [name for name in names if name not in ("self", "_ray_trace_ctx")]
    assert found == SIGNATURES[f"{stock.__module__}.{stock.__qualname__}"]


@pytest.mark.parametrize("ours", ACTOR_CLASSES)
def test_stock_methods_that_call_super_are_named_again(ours):
    """Ray pickles inherited methods by value; with `super()` in them they would look at another class
    (host/controller.py)."""
    for stock in ours.__mro__:
        if not stock.__module__.startswith("openrlhf."):
            continue
        for name, function in vars(stock).items():
            if inspect.isfunction(function) and "__class__" in function.__code__.co_freevars:
                owner = next(c for c in ours.__mro__ if name in vars(c))
                assert owner.__module__.startswith("openrlhf_logra.host."), name


@pytest.mark.parametrize("ours", ACTOR_CLASSES)
def test_actor_classes_are_pickled_by_reference(ours):
    assert getattr(sys.modules[ours.__module__], ours.__qualname__) is ours
    assert not hasattr(ours, "__ray_actor_class__")


def test_worker_extension_collides_with_no_worker():
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    ours = {name for name in vars(vllm_worker.LograWorkerExtension) if not name.startswith("__")}
    assert ours == {"init_process_group", "logra_initialise", "logra_sync"}
    for worker in (Worker, CPUWorker):
        assert not ours & set(dir(worker))


def test_weight_transfer_engine_implements_the_abstract_class():
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightTransferEngine

    from openrlhf_logra.sync.trainer import LograTrainerEngine
    from openrlhf_logra.sync.worker import LograWeightTransferEngine

    assert issubclass(LograWeightTransferEngine, WeightTransferEngine)
    assert issubclass(LograTrainerEngine, TrainerWeightTransferEngine)
    assert not LograWeightTransferEngine.__abstractmethods__ and not LograTrainerEngine.__abstractmethods__


@pytest.mark.parametrize(
    "method, lines",
    [
        ("logra", []),
        (
            "fira",
            [
                "[logra] fira: steps are sized by the actor's learning rate",
                "[logra] fira makes no use of --logra.kl.*, .distribution, .optimizer, .update_ratio",
            ],
        ),
        (
            "dense",
            [
                "[logra] dense makes no use of --logra.kl.*, .rank, .seed, .distribution, .refresh_every, "
                ".target_modules, .optimizer, .beta1, .beta2, .eps, .update_ratio, .non_target, .rounding"
            ],
        ),
    ],
)
def test_a_run_names_the_flags_without_effect(method, lines, monkeypatch):
    """Before DeepSpeed has the model, which is as far as this goes."""
    from openrlhf.models import Actor
    from openrlhf.utils.config import hierarchize
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    class Wrapped(Exception):
        pass

    def stop(*_):
        raise Wrapped

    parser = argparse.ArgumentParser()
    add_flags(parser)
    actor = torch.nn.Module.__new__(Actor)
    torch.nn.Module.__init__(actor)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    actor.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    strategy = object.__new__(deepspeed_strategy.LograDeepspeedStrategy)
    strategy.args = hierarchize(parser.parse_args(["--logra.method", method, "--logra.rank", "8"]))
    said = []
    strategy.print = said.append
    monkeypatch.setattr(DeepspeedStrategy, "_ds_init_train_model", stop)
    with pytest.raises(Wrapped):
        strategy._ds_init_train_model(actor, {})
    assert said[0].startswith("[logra] coverage") and said[1:] == lines


def test_deepspeed_parameter_attributes():
    """What train/shards.py reads of a partitioned parameter."""
    import deepspeed.runtime.zero.partition_parameters as partition

    source = inspect.getsource(partition)
    for name in ("ds_tensor", "ds_shape", "ds_numel", "ds_process_group"):
        assert f"param.{name}" in source


def test_a_ray_worker_waits_for_every_gather():
    """The stand-in that keeps ZeRO-3 from corrupting a parameter at load, in the order a Ray worker imports things."""
    code = (
        "from openrlhf_logra.host import ray_worker\n"
        "ray_worker.setup()\n"
        "import openrlhf_logra.host.trainer_actor\n"
        "import deepspeed.runtime.zero.partition_parameters as partition\n"
        "print(hasattr(partition.dist.all_gather_into_tensor, '__wrapped__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True", done.stderr[-2000:]


def test_whether_ray_init_joins_a_cluster(monkeypatch, tmp_path):
    """What plugin.py asks Ray: logical GPUs may be given only where `ray.init` starts Ray itself."""
    from ray._private.services import canonicalize_bootstrap_address

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert canonicalize_bootstrap_address(None) is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.7:6379")  # what `ray start` leaves
    assert canonicalize_bootstrap_address(None) == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert canonicalize_bootstrap_address(None) is None


def test_extra_plugin_registration_is_idempotent(monkeypatch):
    """vLLM loads plugins several times: applied three times, registered once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils

    from openrlhf_logra.host import vllm_plugin

    registry = dict(WeightTransferEngineFactory._registry)
    dispatch = utils.dispatch_cpu_unquantized_gemm
    monkeypatch.delenv(vllm_plugin.ENABLED, raising=False)
    vllm_plugin.register()
    assert WeightTransferEngineFactory._registry == registry and utils.dispatch_cpu_unquantized_gemm is dispatch
    monkeypatch.setenv(vllm_plugin.ENABLED, "1")
    try:
        vllm_plugin.register()
        once = utils.dispatch_cpu_unquantized_gemm
        vllm_plugin.register()
        vllm_plugin.register()
        assert utils.dispatch_cpu_unquantized_gemm is once
        assert set(WeightTransferEngineFactory._registry) == {*registry, "logra"}
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch
        WeightTransferEngineFactory._registry.pop("logra", None)
