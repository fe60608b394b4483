"""Runs OpenRLHF's real policy actor on DeepSpeed for a few steps per configuration, on one or two gloo ranks.

    python actor_steps.py CONFIGS.json RESULTS_DIR   (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them)

Each rank writes RESULTS_DIR/rank<R>.pt: a list with one result per configuration. Used by test_actor.py.
"""

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from openrlhf_logra.host import cpu

cpu.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from openrlhf.models import Actor  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed_utils import offload_deepspeed_states, reload_deepspeed_states  # noqa: E402
from openrlhf.utils.utils import get_strategy as get_stock_strategy  # noqa: E402

from openrlhf_logra.config import add_flags  # noqa: E402
from openrlhf_logra.host import deepspeed_strategy  # noqa: E402
from openrlhf_logra.math.digest import as_matrix, digest_block  # noqa: E402
from openrlhf_logra.math.exact import apply_block  # noqa: E402
from openrlhf_logra.train import host_optimizer  # noqa: E402
from openrlhf_logra.train.ranks import share_bits  # noqa: E402
from openrlhf_logra.train.shards import digest, gathered  # noqa: E402


def host_arguments(config: dict) -> SimpleNamespace:
    """The arguments that strategy and actor read, as the stock parser nests them."""
    import argparse

    from openrlhf.utils.config import hierarchize

    parser = argparse.ArgumentParser()
    add_flags(parser)
    parsed = parser.parse_args(["--logra.enable", *config.get("flags", [])])
    stock = {
        "local_rank": -1,
        "ds.param_dtype": "bf16",
        "ds.zero_stage": config["zero"],
        "ds.tensor_parallel_size": 1,
        "ds.ring_attn_size": 1,
        "ds.adam_offload": config.get("offload", False),
        "rollout.temperature": config.get("temperature", 1.0),
        "train.dynamic_batch_enable": config.get("dynamic", False),
        "train.seed": 1,
        "train.batch_size": config["batch"],
        "train.micro_batch_size": micro(config),
    }
    for key, value in stock.items():
        setattr(parsed, key, value)
    return hierarchize(parsed)


ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCHEDULE = {"optim": "adam", "adam": ADAM, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0}


def micro(config: dict) -> int:
    """Samples of a micro-batch: given, or such that `gas` of them are a rank's share of the batch."""
    return config.get("micro") or config["batch"] // int(os.environ["WORLD_SIZE"]) // config["gas"]


def build(config: dict):
    args = host_arguments(config)
    strategy = (get_stock_strategy if config.get("stock") else deepspeed_strategy.get_strategy)(args)
    strategy.setup_distributed()
    actor = Actor(
        config["model"],
        attn_implementation="flash_attention_2",
        param_dtype="bf16",
        ds_config=strategy.get_ds_train_config(),
        temperature=args.rollout.temperature,
        packing_samples=config.get("packing", False),
        lora_rank=config.get("lora", 0),
        target_modules="all-linear",
    )
    if config.get("stock"):
        for name, parameter in actor.model.named_parameters():
            parameter.requires_grad_("_proj.weight" not in name)
    if config.get("checkpointing"):
        reentrant = config["checkpointing"] == "reentrant"
        actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    stock_config, threshold = strategy.get_ds_train_config, config.get("persistence_threshold")

    def train_config(*positional, **named):
        made = stock_config(*positional, **named)
        if threshold is not None:
            made["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
        made["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own would be compiled first
        return made

    strategy.get_ds_train_config = train_config
    schedule = {**SCHEDULE, "max_norm": config.get("max_norm", 1.0), "scheduler_steps": 100}
    actor, optimizer, scheduler = strategy.prepare((actor, schedule))
    return strategy, actor, optimizer, scheduler


def samples(step: int, batch: int) -> torch.Tensor:
    return torch.randint(3, 99, (batch, 12), generator=torch.Generator().manual_seed(step))


def lengths(step: int, batch: int) -> torch.Tensor:
    """Of the samples, [batch, 1]; what is behind them is padding."""
    return torch.randint(6, 13, (batch, 1), generator=torch.Generator().manual_seed(1000 + step))


def train_step(strategy, actor, optimizer, scheduler, step: int, config: dict) -> None:
    """One update on the global batch of this step; this rank's share of it, in micro-batches."""
    rank, world, engine = dist.get_rank(), dist.get_world_size(), actor.model
    share = samples(step, config["batch"]).chunk(world)[rank]
    valid = (torch.arange(12) < lengths(step, config["batch"])).long().chunk(world)[rank]
    if config.get("sleep"):
        wake(strategy, engine)
    actor.train()
    parts = list(zip(share.split(micro(config)), valid.split(micro(config))))
    for index, (ids, mask) in enumerate(parts):
        last = index + 1 == len(parts)
        if config.get("dynamic"):  # as host/trainer_actor.py does
            engine.set_gradient_accumulation_boundary(last)
        log_probs = actor(ids, mask[:, 1:], attention_mask=mask)
        loss = -(log_probs * mask[:, 1:]).sum(1).mean() / 11
        strategy.backward(loss / len(parts) if config.get("dynamic") else loss, actor, optimizer)
        if last or not config.get("dynamic"):
            strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
    if config.get("sleep"):
        sleep(strategy, engine)


def sleep(strategy, engine) -> None:
    """As host/trainer_actor.py does; here the other device is the same one."""
    offload_deepspeed_states(engine, pin_memory=False)
    strategy.logra.move(torch.device("cpu"))


def wake(strategy, engine) -> None:
    reload_deepspeed_states(engine)
    strategy.logra.move(engine.device)


def whole_weights(engine) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with gathered(parameter) as tensor:
            weights[name] = tensor.detach().clone()
    return weights


def as_sent(loaded: dict[str, torch.Tensor], sent: list) -> dict[str, torch.Tensor] | None:
    """The targets as an engine has them that loaded the checkpoint and applied what was sent; None where updates are
    not exact."""
    weights = {}
    for update in (update for updates in sent for update in updates):
        if update.s is None:
            return None
        name = update.projection.name
        weights.setdefault(name, loaded[name].clone())
        apply_block(weights[name], update)
    return weights


def reduced(logra) -> torch.Tensor:
    """What all ranks' backward passes have left: on rank 0, or each target's on its owner."""
    for part, owner in zip(logra._by_target(), getattr(logra, "_owners", [])):
        share_bits(part, owner)
    return logra._flat.clone()


def run(config: dict, folder: Path) -> dict:
    strategy, actor, optimizer, scheduler = build(config)
    if config.get("stock"):
        return stock_steps(config, strategy, actor, optimizer, scheduler, folder)
    if config.get("lora"):
        return lora_steps(config, strategy, actor, optimizer, scheduler, folder)
    if config.get("adopt"):
        return adopted(config, strategy, actor, optimizer, scheduler)
    logra, engine = strategy.logra, actor.model
    result: dict = {"sketches": [], "grad_norms": [], "dense_norms": [], "loaded": whole_weights(engine)}
    propose, reduce = logra.propose, logra._reduce

    def watched_propose(max_norm, dense_norm):
        result["dense_norms"].append(dense_norm)
        return propose(max_norm, dense_norm)

    def watched_reduce():
        reduce()
        if dist.get_rank() == 0 or hasattr(logra, "_owners"):
            result["sketches"].append(reduced(logra))

    logra.propose, logra._reduce = watched_propose, watched_reduce
    sent = []
    strategy.push = lambda updates, version: sent.append([update.to("cpu") for update in updates])
    if config.get("sleep"):
        sleep(strategy, engine)
    result["buffers"] = {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}
    for step in range(config.get("steps", 2)):
        train_step(strategy, actor, optimizer, scheduler, step, config)
        result["grad_norms"].append(strategy.get_grad_norm(actor))
        result.setdefault("first", whole_weights(engine))
        result.setdefault("first_moments", squared_moments(engine))
    result["versions"] = logra.version
    result["state_bytes"], result["table_bytes"] = logra.state_bytes, strategy.coverage.state
    result["table_sink_bytes"] = strategy.coverage.sink
    result["all_state_bytes"], result["table_dense_bytes"] = strategy.state_bytes, strategy.coverage.dense_state
    result["weights"] = whole_weights(engine)
    result["as_sent"] = as_sent(result["loaded"], sent)
    result["shard_digests"] = {name: digest(name, p) for name, p in engine.module.named_parameters()}
    result["digests"] = {
        name: digest_block(as_matrix(weight), name, as_matrix(weight).shape[1])
        for name, weight in result["weights"].items()
    }
    # The new bits must also be what the engine computes with.
    with torch.no_grad():
        ids = samples(99, 2)
        mask = torch.ones_like(ids)
        result["log_probs"] = actor(ids, mask[:, 1:], attention_mask=mask)
    if config.get("poison_rank") is not None:
        result["poisoned"] = poisoned_step(config, strategy, actor, optimizer, scheduler)
    if config.get("resume"):
        result["resumed"] = resume(config, strategy, actor, optimizer, scheduler, folder)
    if config.get("save"):
        tokenizer = SimpleNamespace(save_pretrained=lambda path: None)
        strategy.save_model(actor, tokenizer, str(folder / "hf"))
    return result


def stock_steps(config, strategy, actor, optimizer, scheduler, folder: Path) -> dict:
    """OpenRLHF without the plugin, on what is no target."""
    train_step(strategy, actor, optimizer, scheduler, 0, config)
    strategy.save_ckpt(actor.model, str(folder / "checkpoint"), "tag", client_state={"global_step": 7})
    weights = whole_weights(actor.model)
    return {"first": weights, "weights": weights}


def lora_steps(config, strategy, actor, optimizer, scheduler, folder: Path) -> dict:
    """Adapters trained by DeepSpeed: the merged weights, the adapter as it is saved, and a resume (or the continuation
    of somebody else's checkpoint)."""
    result: dict = {}
    if config.get("adopt"):
        strategy.load_ckpt(actor.model, config["adopt"])
    else:
        for step in range(2):
            train_step(strategy, actor, optimizer, scheduler, step, config)
    result["merged"] = {}
    for name, parameter in strategy.logra.parameters().items():
        with gathered(parameter) as whole:
            result["merged"][name] = whole.detach().clone()
    strategy.save_model(actor, SimpleNamespace(save_pretrained=lambda path: None), str(folder / "hf"))
    result["state_bytes"], result["table_bytes"] = strategy.state_bytes, strategy.coverage.dense_state
    if not config.get("adopt"):
        result["resumed"] = resume(config, strategy, actor, optimizer, scheduler, folder)
    return result


def adopted(config, strategy, actor, optimizer, scheduler) -> dict:
    """What an actor holds that continues a checkpoint which DeepSpeed cannot continue, and after one more update."""
    _, states = strategy.load_ckpt(actor.model, config["adopt"])
    loaded, state = whole_weights(actor.model), copy.deepcopy(strategy.logra.state_dict())
    train_step(strategy, actor, optimizer, scheduler, 2, config)
    result = {"weights": loaded, "state": state, "global_step": states["global_step"], "resumed": strategy.resumed}
    return {**result, "next": strategy.logra.version, "after": whole_weights(actor.model)}


def squared_moments(engine) -> float:
    """Sum of squares of the first moments that this rank's DeepSpeed optimizer keeps."""
    return sum(float(state["exp_avg"].double().square().sum()) for state in engine.optimizer.optimizer.state.values())


def poisoned_step(config, strategy, actor, optimizer, scheduler) -> dict:
    """One update with a NaN in the sketch of one rank, then a good one."""
    logra, before = strategy.logra, whole_weights(actor.model)
    reduce = logra._reduce

    def poisoned():
        if dist.get_rank() == config["poison_rank"] % dist.get_world_size():
            logra._sinks[3].value[0, 0] = float("nan")
        reduce()

    poison = config.get("poison")
    norm = host_optimizer.gradient_norm

    def poisoned_gradients(engine):
        if dist.get_rank() == config["poison_rank"] % dist.get_world_size():
            next(host_optimizer._gradients(engine)).view(-1)[0] = float("nan")
        return norm(engine)

    if poison == "gradients":
        host_optimizer.gradient_norm = poisoned_gradients
    else:
        logra._reduce = poisoned
    moments = squared_moments(actor.model)
    train_step(strategy, actor, optimizer, scheduler, 50, config)
    after = whole_weights(actor.model)
    kept = moments == squared_moments(actor.model)
    logra._reduce, host_optimizer.gradient_norm = reduce, norm
    outcome = strategy.outcomes[-1]
    train_step(strategy, actor, optimizer, scheduler, 51, config)
    return {
        "skipped": outcome.skipped,
        "unchanged": kept and all(torch.equal(before[name], after[name]) for name in before),
        "version": outcome.version,
        "next": strategy.outcomes[-1].version,
        "moves": not any(torch.isnan(weight).any() for weight in whole_weights(actor.model).values()),
    }


def resume(config, strategy, actor, optimizer, scheduler, folder: Path) -> tuple[dict, dict, dict]:
    """Weights two updates after a checkpoint, uninterrupted and from the checkpoint in a fresh actor; and the
    strategy's state in it."""
    path = str(folder / "checkpoint")
    strategy.save_ckpt(actor.model, path, "tag", client_state={"global_step": 7})
    state = copy.deepcopy(strategy.logra.state_dict())
    steps = range(config.get("steps", 2), config.get("steps", 2) + 2)
    for step in steps:
        train_step(strategy, actor, optimizer, scheduler, step, config)
    uninterrupted = whole_weights(actor.model)
    strategy, actor, optimizer, scheduler = build(config)
    _, states = strategy.load_ckpt(actor.model, path)
    assert states["global_step"] == 7 and "logra" not in states
    for step in steps:
        train_step(strategy, actor, optimizer, scheduler, step, config)
    return uninterrupted, whole_weights(actor.model), state


def main(run) -> None:
    """`run(config, folder)` for every configuration of the file that the command line names; also kl_steps.py's."""
    configs, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    out = []
    for index, config in enumerate(configs):
        folder = results / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        out.append(run(config, folder))
        dist.barrier()
    torch.save(out, results / f"rank{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(run)
