"""The driver's side of the plugin: check the parsed arguments, then put our subclasses where the stock module looks.

The classes replaced here are the whole list of what LoGRA changes in OpenRLHF; subclasses all (host/stock.py).
"""

import argparse
import os
from types import ModuleType

from openrlhf.utils.config import hierarchize

from .. import __version__
from ..config import ConfigError, LograConfig, from_flat
from . import cpu, log_probs, refusals, runtime_env
from .startup import fail


def enable(flat: argparse.Namespace, main: ModuleType) -> None:
    """Check `flat` (the parsed, not yet hierarchized namespace) and install the plugin in the stock module `main`.

    Raises:
        ConfigError: something cannot work; nothing was installed and nothing started.
    """
    args = hierarchize(flat)
    config = from_flat(flat)
    if not config.enable:
        raise ConfigError("--logra.* flags are given without --logra.enable; add it, or remove them")
    config.validate()
    if config.sync_log_dir:  # the trainer's process may start elsewhere
        setattr(flat, "logra.sync.log_dir", os.path.abspath(config.sync_log_dir))
    if not cpu.has_gpu():
        _adapt_to_cpu(flat, args)
    refusals.check(args, config)
    _replace_classes(main)
    _extend_ray_init(args, config)
    print(f"[logra] openrlhf_logra {__version__} active in the driver (pid {os.getpid()})", flush=True)


def _adapt_to_cpu(flat: argparse.Namespace, args) -> None:
    """Defaults of the stock command line that mean a GPU."""
    if args.vllm.sync_backend == "nccl":
        setattr(flat, "vllm.sync_backend", "gloo")
        print("[logra] no GPU: --vllm.sync_backend gloo in place of nccl", flush=True)


def _replace_classes(main: ModuleType) -> None:
    import openrlhf.trainer.ppo_trainer as ppo_trainer
    import openrlhf.trainer.ppo_trainer_async as ppo_trainer_async
    import openrlhf.trainer.ray.vllm_engine as vllm_engine
    import ray

    from . import controller, deepspeed_strategy, rollout_actor, trainer_actor

    main.get_strategy = deepspeed_strategy.get_strategy
    main.PolicyModelActor = ray.remote(num_gpus=1)(trainer_actor.LograPolicyModelActor)
    vllm_engine.RolloutRayActor = rollout_actor.restarted_by_ray()
    ppo_trainer.PPOTrainer = ray.remote(controller.LograPPOTrainer)
    ppo_trainer_async.PPOTrainerAsync = ray.remote(controller.LograPPOTrainerAsync)


def _extend_ray_init(args, config: LograConfig) -> None:
    """Make the next `ray.init` start our hook in every worker. Where it starts Ray itself and there is no GPU, provide
    logical ones; where it joins a cluster, stop when a node cannot run our processes."""
    import ray

    from . import nodes

    init = ray.init

    def init_with_logra(*positional, **options):
        ray.init = init
        variables = {log_probs.VARIABLE: log_probs.mode(args)} if log_probs.use(args, config) else {}
        options["runtime_env"] = runtime_env.extended(options.get("runtime_env") or {}, variables)
        joins = ray._private.services.canonicalize_bootstrap_address(options.get("address")) is not None
        if not joins and not cpu.has_gpu():
            gpus = logical_gpus(args)
            options.setdefault("num_gpus", gpus)
            # Each model actor also asks for a CPU, and the trainer for one more.
            options.setdefault("num_cpus", max(os.cpu_count() or 1, gpus + 2))
            options.setdefault("include_dashboard", False)
        context = init(*positional, **options)
        problem = nodes.gate(config.allow_untested_host) if joins else None
        if problem:
            fail(problem)
        return context

    ray.init = init_with_logra


def logical_gpus(args) -> int:
    """GPUs that the command line asks Ray for: every model's, and every engine's."""
    models = [args.actor]
    if args.algo.kl.init_coef > 0:
        models.append(args.ref)
    if args.algo.advantage.estimator == "gae":
        models.append(args.critic)
    if not (args.reward.remote_url or args.train.agent_func_path):
        models.append(args.reward)
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    return sum(model.num_nodes * model.num_gpus_per_node for model in models) + engines
