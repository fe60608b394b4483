"""Stock OpenRLHF, with whatever is installed and no flag of ours; writes what it saw as JSON. Used by test_off.py.

    python stock.py namespace OUT -- <flags of train_ppo_ray>      the parsed and hierarchized arguments
    python stock.py steps OUT MODEL                                weights after five actor steps
    python stock.py identity OUT                                   objects that are not the stock ones

With LOGRA_TEST_SITE set to a site-packages folder the interpreter runs without site (python -S), as if the package had
never been installed.
"""

import hashlib
import json
import os
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace

if site := os.environ.get("LOGRA_TEST_SITE"):
    sys.path.append(site)
sys.path.insert(0, str(Path(__file__).parent))

import stand_ins

stand_ins.install()


def plain(value):
    """Nested namespaces as dictionaries."""
    if isinstance(value, SimpleNamespace):
        return {key: plain(item) for key, item in sorted(vars(value).items())}
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def namespace(flags: list[str]) -> dict:
    import ray

    captured = {}

    def stop():
        captured["args"] = sys._getframe(1).f_locals["args"]
        raise SystemExit(0)

    ray.is_initialized = stop
    sys.argv = ["train_ppo_ray", *flags]
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    return plain(captured["args"])


def steps(model: str) -> dict:
    import torch
    from openrlhf.models import Actor
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    torch.set_num_threads(1)
    ds = SimpleNamespace(param_dtype="bf16", zero_stage=2, tensor_parallel_size=1, ring_attn_size=1)
    args = SimpleNamespace(ds=ds, train=SimpleNamespace(dynamic_batch_enable=False), local_rank=-1)
    strategy = DeepspeedStrategy(seed=1, micro_train_batch_size=4, train_batch_size=4, zero_stage=2, args=args)
    strategy.setup_distributed()
    stock_config = strategy.get_ds_train_config

    def with_torch_adam(*positional, **named):
        config = stock_config(*positional, **named)
        if "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    strategy.get_ds_train_config = with_torch_adam
    actor = Actor(model, attn_implementation="sdpa", param_dtype="bf16", ds_config=stock_config())
    adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    schedule = {"optim": "adam", "adam": adam, "lr_scheduler": "constant", "scheduler_steps": 10}
    actor, optimizer, scheduler = strategy.prepare((actor, schedule))
    for step in range(5):
        ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        strategy.backward(-actor(ids, mask[:, 1:], attention_mask=mask).mean(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler)
    return {
        name: hashlib.sha256(parameter.detach().view(torch.int16).numpy().tobytes()).hexdigest()
        for name, parameter in actor.model.module.named_parameters()
    }


def is_ours(value) -> bool:
    """By type first: asking a lazily imported module for an attribute would import it."""
    code = issubclass(type(value), (type, types.FunctionType, types.MethodType))
    return code and str(value.__module__).startswith("openrlhf_logra")


def identity() -> dict:
    import deepspeed  # noqa: F401
    import openrlhf.cli.train_ppo_ray
    import openrlhf.trainer.ppo_trainer_async  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.plugins import load_general_plugins

    before = [name for name in sys.modules if name.startswith("openrlhf_logra")]
    load_general_plugins()
    foreign = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("openrlhf", "deepspeed", "vllm", "ray", "transformers", "argparse"):
            for key, value in list(vars(module).items()):
                if is_ours(value):
                    foreign.append(f"{name}.{key}")
                for attribute, item in list(vars(value).items()) if issubclass(type(value), type) else ():
                    if is_ours(item):
                        foreign.append(f"{name}.{key}.{attribute}")
    return {
        "imported_before_vllm_plugins": before,
        "imported": sorted(name for name in sys.modules if name.startswith("openrlhf_logra")),
        "foreign": foreign,
        "backends": sorted(WeightTransferEngineFactory._registry),
        "finders": [type(finder).__module__ for finder in sys.meta_path],
    }


if __name__ == "__main__":
    mode, out, *rest = sys.argv[1:]
    if mode == "namespace":
        result = namespace(rest[1:])
    elif mode == "steps":
        result = steps(*rest)
    else:
        result = identity()
    result["__logra_imported__"] = sorted(name for name in sys.modules if name.startswith("openrlhf_logra"))
    Path(out).write_text(json.dumps(result))
