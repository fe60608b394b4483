"""Updates of OpenRLHF's real policy actor under predicted-KL control, on one or two gloo ranks.

    python kl_steps.py CONFIGS.json RESULTS_DIR   (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them)

Each rank writes RESULTS_DIR/rank<R>.pt: a list with one result per configuration. Used by test_kl_control.py.
"""

import math
from pathlib import Path

from openrlhf_logra.host import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from actor_steps import build, main, samples, whole_weights  # noqa: E402

from openrlhf_logra.host import deepspeed_strategy  # noqa: E402
from openrlhf_logra.train.callbacks import Callback  # noqa: E402
from openrlhf_logra.train.kl_control import PROBE_KL  # noqa: E402
from openrlhf_logra.train.probe import Probe, first_responses  # noqa: E402
from openrlhf_logra.train.ranks import sum_over_ranks  # noqa: E402


class Record(Callback):
    """Keeps the figures of every update."""

    def __init__(self):
        self.updates = []

    def on_step_end(self, context):
        one = {name.removeprefix("logra/"): value for name, value in context.metrics.items()}
        self.updates.append({**one, "alpha": context.outcome.alpha, "own": context.alpha, "held": context.held})


class Exact(Callback):
    """KL of whole updates by the model's own logits, all at once."""

    def __init__(self):
        self.found = []

    def logits(self, context):
        context.model.eval()
        with torch.no_grad():
            (tokens,) = {len(sequence) for sequence in context.batch.sequences}
            logits = context.forward(torch.stack(context.batch.sequences).view(-1, tokens)).logits
        return torch.cat([row[at] for row, at in zip(logits, context.batch.positions)]).double().log_softmax(-1)

    def on_update(self, context):
        self.before = self.logits(context)

    def on_step_end(self, context):
        after = self.logits(context)
        kl = float((self.before.exp() * (self.before - after)).sum())
        kl, positions = sum_over_ranks([kl, context.batch.count], context.device)
        self.found.append((context.metrics.get("logra/realized_kl"), kl / positions))


class FixedAlpha(Callback):
    """The step size that a run without control has; the figures are the controller's."""

    def __init__(self, alpha):
        self.alpha = alpha

    def on_update(self, context):
        context.alpha = self.alpha


class Measure(Callback):
    """Both estimators beside exact KL along the side path, without taking the step."""

    def __init__(self):
        self.found = []

    def on_update(self, context):
        probe, batch = Probe(context.model, context.forward), context.batch
        (positions,) = sum_over_ranks([batch.count], context.device)

        def mean(value):
            return sum_over_ranks([value], context.device)[0] / positions

        def q(variance):
            return mean(variance) / (2 * batch.temperature**2)

        before = probe.hidden(batch)
        by_tangent = q(probe.variance_by_tangent(batch, context.along))
        epsilon = math.sqrt(PROBE_KL / by_tangent)
        one = {
            "jvp": by_tangent,
            "fd": q(probe.variance_by_difference(batch, before, context.along, epsilon)[0]),
            "realised": {},
        }
        for kl in (1e-3, 1e-4):
            alpha = math.sqrt(kl / by_tangent)
            one["realised"][kl] = [
                mean(probe.divergence(batch, before, probe.hidden(batch, context.along(a))))
                for a in (alpha, alpha / 2)
            ]
        self.found.append(one)
        context.hold("measured only")


def in_float32(config: dict) -> None:
    """Let OpenRLHF and DeepSpeed build the model in float32, which has no flag: to compare estimators exactly."""
    import openrlhf.utils.utils as utils
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    if not hasattr(in_float32, "stock"):
        stock = utils.convert_to_torch_dtype, DeepspeedStrategy.get_ds_train_config, deepspeed_strategy.digests_of
        in_float32.stock = stock
    dtype, train_config, digests = in_float32.stock
    deepspeed_strategy.digests_of = (lambda parameters: {}) if config.get("float32") else digests  # of bf16 only
    utils.convert_to_torch_dtype = (lambda name: torch.float32) if config.get("float32") else dtype

    def without_bf16(self, *args, **kwargs):
        made = train_config(self, *args, **kwargs)
        if config.get("float32"):
            made["bf16"] = {"enabled": False}
        return made

    DeepspeedStrategy.get_ds_train_config = without_bf16


def update(built, step: int, config: dict) -> None:
    """One update on the global batch of this step; this rank's share of it, in micro-batches."""
    strategy, actor, optimizer, scheduler = built
    share = samples(step % config.get("batches", 10**9), config["batch"]).chunk(dist.get_world_size())[dist.get_rank()]
    actor.train()
    for ids in share.split(config["micro"]):
        mask = torch.ones_like(ids)
        actions = mask[:, 1:].clone()
        actions[:, :4] = 0  # the prompt
        if not config.get("no_responses"):
            settings, held = strategy.logra.config, strategy.responses
            missing = settings.kl_probe_responses - len(held)
            held += first_responses(ids, mask, actions, missing, settings.kl_probe_max_tokens)
        log_probs = actor(ids, actions, attention_mask=mask)
        strategy.backward(-log_probs.sum() / actions.sum(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler, name="actor")


def prepared(config: dict):
    in_float32(config)
    built = build(config)
    strategy = built[0]
    if "scale_q" in config:
        q = strategy.kl_control._q
        strategy.kl_control._q = lambda *args: config["scale_q"] * q(*args)
    if "alpha" in config:
        strategy.callbacks["fixed"] = FixedAlpha(config["alpha"])
    if config.get("measure"):
        strategy.callbacks = {"measure": Measure()}
    if config.get("exact"):
        strategy.callbacks["exact"] = Exact()
    strategy.callbacks["record"] = Record()
    return built


def run(config: dict, folder: Path) -> dict:
    built = prepared(config)
    strategy, actor = built[:2]
    before, state = whole_weights(actor.model), torch.get_rng_state()
    for step in range(config["steps"]):
        update(built, step, config)
        if config.get("exact") and step == 0:
            first = {name: weight for name, weight in whole_weights(actor.model).items() if "_proj" not in name}
        if config.get("mismatch"):
            strategy.kl_control.observe_mismatch(config["mismatch"] * (step + 1))
    result = {"updates": list(strategy.callbacks["record"].updates), "version": strategy.logra.version}
    result["moved"] = any(
        not torch.equal(old, new) for old, new in zip(before.values(), whole_weights(actor.model).values())
    )
    result["rng_moved"] = not torch.equal(state, torch.get_rng_state())
    if config.get("exact"):
        result["exact"], result["first"] = strategy.callbacks["exact"].found, first
    if config.get("measure"):
        result["found"] = strategy.callbacks["measure"].found
    if config.get("resume"):
        path = str(folder / "checkpoint")
        strategy.save_ckpt(actor.model, path, "tag", client_state={})
        ends = []
        for again in (False, True):
            if again:
                built = prepared(config)
                strategy, actor = built[:2]
                strategy.load_ckpt(actor.model, path)
            strategy.callbacks["record"].updates.clear()
            for step in range(config["steps"], config["steps"] + 2):
                update(built, step, config)
            figures = [
                {k: v for k, v in one.items() if "timing" not in k} for one in strategy.callbacks["record"].updates
            ]
            ends.append((whole_weights(actor.model), figures, strategy.kl_control.state_dict()))
        result["resumed"] = ends
    return result


if __name__ == "__main__":
    main(run)
