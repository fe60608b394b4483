"""The host's names and signatures that the plugin is written against. A failure here means: the host moved."""

import ast
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from openrlhf_logra.host import cpu

cpu.install()

from openrlhf_logra.host import controller, deepspeed_strategy, rollout_actor, trainer_actor, vllm_worker  # noqa: E402

STOCK_MODULE = Path(find_spec("openrlhf").submodule_search_locations[0]) / "cli" / "train_ppo_ray.py"

# class -> method -> parameters after self, as in OpenRLHF 0.11.2
SIGNATURES = {
    deepspeed_strategy.LograDeepspeedStrategy: {
        "_ds_init_train_model": ["model", "cfg"],
        "get_ds_train_config": ["optim_dict", "max_norm"],
        "optimizer_step": ["_optimizer", "model", "_scheduler", "name", "kwargs"],
        "get_grad_norm": ["model"],
        "save_ckpt": [
            "model",
            "save_dir",
            "tag",
            "max_num",
            "max_mem",
            "client_state",
            "save_latest",
            "metric_value",
            "metric_key",
        ],
        "load_ckpt": [
            "model",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
        ],
    },
    trainer_actor.LograActorPPOTrainer: {
        "_init_vllm_sync_group": ["backend"],
        "ppo_train": ["kl_ctl"],
        "broadcast_to_vllm": [],
    },
    trainer_actor.LograPolicyModelActor: {
        "init_model_from_pretrained": ["strategy", "pretrain", "max_steps", "vllm_engines"],
    },
    rollout_actor.LograRolloutRayActor: {
        "__init__": ["args", "bundle_indices", "agent_func_path", "remote_rm_url", "mm_pad_token_ids", "kwargs"],
        "generate": ["prompt_token_ids", "sampling_params", "multi_modal_data"],
    },
    controller.LograPPOTrainer: {
        "fit": ["global_step"],
        "train_step": ["rollout_samples", "global_step"],
        "save_logs_and_checkpoints": ["global_step", "logs_dict", "client_states"],
        "evaluate": ["global_step", "generate_kwargs"],
    },
    controller.LograTrainingActor: {"broadcast_to_vllm": [], "train_step": ["rollout_samples", "global_step"]},
}


@pytest.mark.parametrize(
    "ours, method",
    [(cls, method) for cls, methods in SIGNATURES.items() for method in methods],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_signatures(ours, method):
    stock = next(c for c in ours.__mro__ if c.__module__.startswith("openrlhf.") and method in vars(c))
    # Ray adds a parameter of its own to the methods of actor classes.
    parameters = inspect.signature(getattr(stock, method)).parameters
    found = [name for name in parameters if name not in ("self", "_ray_trace_ctx")]
    assert found == SIGNATURES[ours][method]


def test_the_stock_module_uses_the_names_that_are_replaced():
    """In `__main__`: called, or passed on, as plain names that were imported at module top."""
    tree = ast.parse(STOCK_MODULE.read_text())
    top = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    train = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    used = {node.id for node in ast.walk(train) if isinstance(node, ast.Name)}
    assert {"get_strategy", "PolicyModelActor", "create_vllm_engines"} <= top & used
    late = {
        (node.module, alias.name): alias.asname
        for node in ast.walk(train)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert ("openrlhf.trainer.ppo_trainer", "PPOTrainer") in late
    assert ("openrlhf.trainer.ppo_trainer_async", "PPOTrainerAsync") in late


def test_engines_are_made_of_the_module_global():
    from openrlhf.trainer.ray import vllm_engine

    names = {
        n.id
        for n in ast.walk(ast.parse(inspect.getsource(vllm_engine.create_vllm_engines)))
        if isinstance(n, ast.Name)
    }
    assert "RolloutRayActor" in names


ACTOR_CLASSES = (
    controller.LograPPOTrainer,
    controller.LograTrainingActor,
    controller.LograPPOTrainerAsync,
    rollout_actor.LograRolloutRayActor,
    trainer_actor.LograPolicyModelActor,
)


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
    """vLLM loads plugins several times: applied three times, registered once (cases.md, Plugin mechanics)."""
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
