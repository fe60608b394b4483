"""OpenRLHF's classes with LoGRA in them: one subclass per class, each overriding only what differs.

Written against OpenRLHF 0.11.2. The classes are undecorated, so that Ray pickles them by reference and every worker
imports this module; the driver decorates them (host/plugin.py).
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ray
import torch
from openrlhf.models import Actor
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils import experience_maker
from openrlhf.trainer.ray import ppo_actor, vllm_engine
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.utils import get_strategy as get_stock_strategy
from vllm.v1.engine.exceptions import EngineDeadError

from .. import __version__
from ..config import from_hierarchy
from ..math.baseline import RunningBaseline
from ..strategies import strategy_class
from ..strategies.base import StepOutcome, Strategy
from ..sync.trainer import LograTrainerEngine, LograTrainerInitInfo, SyncReport, digests_of
from ..sync.transport import Channel, send
from ..train.buffers import restore_computed_buffers
from ..train.callbacks import Callback, SyncContext, UpdateContext, load_callbacks
from ..train.coverage import human_bytes, render
from ..train.kl_control import KLControl, controls_kl
from ..train.probe import ProbeBatch, Response, first_responses
from ..train.ranks import sum_over_ranks
from . import cpu, log_probs
from .vllm_plugin import ENABLED

_CHECKPOINT_KEY = "logra"
_SYNC_CHECKPOINT_KEY = "logra_sync"
_CALLBACKS_CHECKPOINT_KEY = "logra_callbacks"
_BASELINE_CHECKPOINT_KEY = "logra_reward_baseline"
_KL_CONTROL = "kl_control"  # its name among the callbacks
_ANSWER_SECONDS = 600  # how long the trainer waits for an engine, and for one to be started again
_REPAIR_SECONDS = 3 * _ANSWER_SECONDS  # how long a request waits: a sync that fails, a restart, a dense sync
_COPIED_TO_RAY_WORKERS = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def _plain(actor_class) -> type:
    """The Python class under a `ray.remote` one."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def _report_active(role: str) -> None:
    print(f"[logra] openrlhf_logra {__version__} active in the {role} (pid {os.getpid()})", flush=True)


# ---- DeepSpeed strategy: where the model is wrapped, stepped and saved ---------------------------------------------


def get_strategy(args) -> "LograDeepspeedStrategy":
    """Stock `get_strategy`, with our class."""
    strategy = get_stock_strategy(args)
    strategy.__class__ = LograDeepspeedStrategy
    return strategy


class LograDeepspeedStrategy(DeepspeedStrategy):
    """Only the policy in training is treated differently; critic, reward and reference models take the stock path."""

    logra: Strategy | None = None

    def _ds_init_train_model(self, model, cfg: dict):
        if not isinstance(model, Actor):
            return super()._ds_init_train_model(model, cfg)
        config = from_hierarchy(self.args.logra)
        self.logra = strategy_class(config.method)(config, model.model)
        self.coverage = self.logra.coverage()
        self.logra.attach()
        self.print("[logra] coverage\n" + render(self.coverage))
        restored, unclear = restore_computed_buffers(model.model)
        if restored:
            self.print(f"[logra] restored to float32, as the rollout engines have them: {', '.join(restored)}")
        if unclear:
            self.print(f"[logra] possibly rounded to bf16 by ZeRO-3, and not restored: {', '.join(unclear)}")
        prepared = super()._ds_init_train_model(model, cfg)
        self._policy_engine = model.model
        self._max_norm = cfg.get("max_norm", 1.0)
        self.logra.bind(self._policy_engine.device)
        self.base_digests = digests_of(self.logra.parameters())  # before a checkpoint is loaded, as the engines are
        self.outcomes: list[StepOutcome] = []
        self.metrics: list[dict[str, float]] = []  # of each outcome's update, from callbacks
        self.responses: list[Response] = []  # the first of the update under way
        self.callbacks: dict[str, Callback] = {}
        if controls_kl(config):
            self.callbacks[_KL_CONTROL] = KLControl(config.kl_settings(), config.kl_probe, self.print)
        self.callbacks.update(zip(config.callbacks, load_callbacks(config.callbacks)))
        self.resumed = False
        self.sync_state: Callable[[], dict] = dict  # the sync's own state, once there is one
        self.loaded_sync_state: dict | None = None
        self.push = lambda updates, version: None  # hands an update to the sync
        return prepared

    @property
    def kl_control(self) -> KLControl | None:
        """The controller of alpha, where there is one."""
        return self.callbacks.get(_KL_CONTROL)

    def get_ds_train_config(self, *args, **kwargs):
        config = super().get_ds_train_config(*args, **kwargs)
        if "optimizer" in config and not cpu.has_gpu():
            config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own kernels need a compiler or a GPU
        return config

    def optimizer_step(self, optimizer, model, scheduler, name="model", **kwargs) -> None:
        engine = model.model if isinstance(model, Actor) else model
        if self.logra is None or engine is not self._policy_engine:
            return super().optimizer_step(optimizer, model, scheduler, name=name, **kwargs)
        boundary = engine.is_gradient_accumulation_boundary()
        alpha = scheduler.get_last_lr()[0] / scheduler.base_lrs[0]
        super().optimizer_step(optimizer, model, scheduler, name=name, **kwargs)
        if boundary:
            self._logra_step(alpha)

    def _logra_step(self, alpha: float) -> None:
        proposal = self.logra.propose(self._max_norm)
        context = UpdateContext(
            version=self.logra.version,
            proposal=proposal,
            alpha=alpha,
            batch=ProbeBatch(*(tuple(zip(*self.responses)) or ((), ())), self.args.rollout.temperature),
            model=self._policy_engine.module,
            device=self._policy_engine.device,
            forward=partial(self._policy_engine, use_cache=False),
            along=partial(self.logra.along, proposal),
        )
        if proposal.finite:
            for callback in self.callbacks.values():
                callback.on_update(context)
        outcome = self.logra.commit(proposal, context.decided())
        context.outcome = replace(outcome, updates=())  # figures only: the updates are the sync's business
        for callback in self.callbacks.values():
            callback.on_step_end(context)
        self.responses.clear()
        self.outcomes.append(context.outcome)
        self.metrics.append(context.metrics)
        if outcome.skipped:
            reason = context.held or f"the sketch is not finite (|S| = {outcome.sketch_norm})"
            self.print(f"[logra] update skipped: {reason}")
        else:
            self.push(outcome.updates, outcome.version)

    def get_grad_norm(self, model) -> float:
        engine = model.model if isinstance(model, Actor) else model
        ours = self.logra is not None and engine is self._policy_engine and self.outcomes
        norm = self.outcomes[-1].grad_norm if ours else None
        return super().get_grad_norm(model) if norm is None else norm

    def save_ckpt(self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, **kwargs):
        if self.logra is not None and model is self._policy_engine:
            ours = {
                _CHECKPOINT_KEY: self.logra.state_dict(),
                _SYNC_CHECKPOINT_KEY: self.sync_state(),
                _CALLBACKS_CHECKPOINT_KEY: {name: one.state_dict() for name, one in self.callbacks.items()},
            }
            client_state = {**(client_state or {}), **ours}
        return super().save_ckpt(model, save_dir, tag, max_num, max_mem, client_state, **kwargs)

    def load_ckpt(self, model, load_dir, *args, **kwargs):
        path, states = super().load_ckpt(model, load_dir, *args, **kwargs)
        if self.logra is not None and model is self._policy_engine and path is not None:
            self.resumed = True
            if _CHECKPOINT_KEY in states:
                self.logra.load_state_dict(states.pop(_CHECKPOINT_KEY))
            self.loaded_sync_state = states.pop(_SYNC_CHECKPOINT_KEY, None) or None
            for name, state in states.pop(_CALLBACKS_CHECKPOINT_KEY, {}).items():
                if name in self.callbacks:
                    self.callbacks[name].load_state_dict(state)
        return path, states


# ---- trainer actor --------------------------------------------------------------------------------------------------


class RayEngines:
    """Our `SyncClient` over OpenRLHF's rollout actors.

    The payload goes to Ray's object store once; with a `channel` (a process group with all workers of all engines) it
    is broadcast there once instead, as one flat buffer.
    """

    def __init__(self, engines: list, channel: Channel | None = None, seconds: float = _ANSWER_SECONDS):
        self._engines, self._channel, self._seconds = engines, channel, seconds

    def count(self) -> int:
        return len(self._engines)

    def initialise(self, engines: list[int], init_info: dict) -> list:
        deadline = time.monotonic() + self._seconds
        answers = self._call(engines, "logra_initialise", init_info, deadline)
        # An actor that Ray is starting again refuses calls until it is there.
        starting = ray.exceptions.ActorUnavailableError
        while any(isinstance(answer, starting) for answer in answers) and time.monotonic() < deadline:
            time.sleep(1)
            answers = self._call(engines, "logra_initialise", init_info, deadline)
        return answers

    def sync(self, engines: list[int], update_info: dict) -> list:
        deadline = time.monotonic() + self._seconds
        records = update_info.get("records")
        # A broadcast needs everyone: the repair of some engines goes through the object store.
        if not records or len(engines) < len(self._engines) or not self._all_join(engines, deadline):
            return self._call(engines, "logra_sync", update_info, deadline)
        info = {**update_info, "records": [], "sizes": [len(record) for record in records]}
        references = self._submit(engines, "logra_sync", info)
        sent = send(self._channel, records, torch.cuda.current_device(), deadline)
        answers = [_result(reference, deadline) for reference in references]
        if not sent or any(isinstance(answer, Exception) for answer in answers):
            self._leave_the_channel()
        return answers

    def _all_join(self, engines: list[int], deadline: float) -> bool:
        """Whether there is a channel that every engine will take part in: one that is gone would be waited for."""
        if self._channel is None:
            return False
        answers = self._call(engines, "logra_sync", {}, deadline)
        if any(isinstance(answer, Exception) for answer in answers):
            self._leave_the_channel()
        return self._channel is not None

    def _leave_the_channel(self) -> None:
        # An engine that was started again is in no group.
        print("[logra] an engine failed: from here on records travel by Ray's object store", flush=True)
        self._channel = None

    def _call(self, engines: list[int], method: str, argument: dict, deadline: float) -> list:
        return [_result(reference, deadline) for reference in self._submit(engines, method, argument)]

    def _submit(self, engines: list[int], method: str, argument: dict) -> list:
        shared = ray.put(argument)
        return [getattr(self._engines[i], method).remote(shared) for i in engines]


def _result(reference, deadline: float):
    try:
        return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.RayError as error:  # a dead actor, an exception in it, no answer in time
        return error


class LograActorPPOTrainer(ppo_actor.ActorPPOTrainer):
    """Stock PPO on the policy; the broadcast of all weights becomes a sync of records."""

    def __init__(self, strategy, actor, *args, **kwargs):
        super().__init__(strategy, actor, *args, **kwargs)
        config = strategy.logra.config
        self.sync_report = None
        self._observes = log_probs.use(self.args, config)
        if log_probs.wanted(config) and not self._observes:
            self._no_mismatch("engines do not give those of the policy at this temperature with this top-p")
        self._sync = LograTrainerEngine.trainer_init(
            LograTrainerInitInfo(
                rank=torch.distributed.get_rank(),
                mode=config.sync_mode,
                exact_updates=strategy.logra.exact_updates,
                refresh_every=config.refresh_every,
                verify_every=config.sync_verify_every,
                log_dir=config.sync_log_dir,
                trained=strategy.logra.trained,
                base_digests=strategy.base_digests,
                version=strategy.logra.version,
                loaded_version=None if strategy.resumed else 0,
                state=strategy.loaded_sync_state,
            ),
            client=RayEngines(self.vllm_engines, getattr(self, "_model_update_group", None)),
            source=strategy.logra.parameters(),
        )
        strategy.push = self._sync.push
        strategy.sync_state = self._sync.state_dict

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Called by the stock class where trainer and engines do not share GPUs. One group with NCCL, as stock has it;
        otherwise none: records travel by Ray."""
        if backend == "nccl" and cpu.has_gpu() and not self.strategy.args.vllm.sync_with_ray:
            super()._init_vllm_sync_group(backend)

    def training_step(self, experience, *args, **kwargs) -> dict:
        config, held = self.strategy.logra.config, self.strategy.responses
        held += first_responses(
            experience.sequences,
            experience.attention_mask,
            experience.action_mask,
            config.kl_probe_responses - len(held),
            config.kl_probe_max_tokens,
        )
        return super().training_step(experience, *args, **kwargs)

    def ppo_train(self, kl_ctl: float) -> dict:
        self.strategy.outcomes.clear()
        self.strategy.metrics.clear()
        self._observe_mismatch()
        status = super().ppo_train(kl_ctl)
        status.update(self._update_metrics())
        return status

    def _observe_mismatch(self) -> None:
        """Rollout minus trainer log-probability per generated token of the completed responses of all ranks."""
        if not self._observes:
            return
        total, tokens, without = 0.0, 0, 0
        for item in self.replay_buffer.items:
            if item.rollout_log_probs is None:
                without += 1
            elif not item.truncated:
                difference = item.rollout_log_probs.float() - item.action_log_probs.float()
                total += float(difference[item.action_mask.bool()].sum())
                tokens += int(item.action_mask.sum())
        total, tokens, without = sum_over_ranks([total, tokens, without], torch.device(torch.cuda.current_device()))
        if without:
            self._no_mismatch("responses came without them")
        elif tokens:
            self.strategy.kl_control.observe_mismatch(total / tokens)

    def _no_mismatch(self, reason: str) -> None:
        self._observes = False
        self.strategy.kl_control.observe_mismatch(None)
        self.strategy.print(f"[logra] no rollout log-probabilities ({reason}): no mismatch is taken off the KL budget")

    def _update_metrics(self) -> dict[str, float]:
        """Means over the updates of one PPO phase; `skipped` counts, `version` is the last."""
        outcomes = self.strategy.outcomes
        if not outcomes:
            return {}
        applied = [outcome for outcome in outcomes if not outcome.skipped]
        metrics = {
            "logra/skipped": float(len(outcomes) - len(applied)),
            "logra/version": float(outcomes[-1].version),
            "logra/dense_state_bytes": float(self.strategy.coverage.dense_adam),
            "timing/logra_update": sum(outcome.seconds for outcome in outcomes),
        }
        if self.strategy.logra.state_bytes is not None:
            metrics["logra/state_bytes"] = float(self.strategy.logra.state_bytes + self._sync.state_bytes)
        measured: dict[str, list[float]] = {}
        for name in ("alpha", "sketch_norm", "update_ratio"):
            values = [getattr(outcome, name) for outcome in applied if getattr(outcome, name) is not None]
            measured[f"logra/{name}"] = values
        for name in dict.fromkeys(name for update in self.strategy.metrics for name in update):
            measured[name] = [update[name] for update in self.strategy.metrics if name in update]
        for name, values in measured.items():
            if values:
                metrics[name] = sum(values) / (1 if name.startswith("timing/") else len(values))
        return metrics

    def broadcast_to_vllm(self) -> None:
        self.sync_report = self._sync.send_weights()
        context = SyncContext(self.strategy.logra.version, self.sync_report)
        for callback in self.strategy.callbacks.values():
            callback.on_sync(context)
        torch.distributed.barrier()


class LograPolicyModelActor(_plain(ppo_actor.PolicyModelActor)):
    """Trainer actor."""

    @staticmethod
    def _get_free_port() -> int:
        return _plain(ppo_actor.PolicyModelActor)._get_free_port() if cpu.has_gpu() else cpu.quiet_port()

    def init_model_from_pretrained(self, *args, **kwargs):
        _report_active("trainer actor")
        ppo_actor.ActorPPOTrainer = LograActorPPOTrainer
        return super().init_model_from_pretrained(*args, **kwargs)

    def sync_report(self) -> SyncReport | None:
        """What the last sync did."""
        return self.trainer.sync_report


# ---- rollout actor --------------------------------------------------------------------------------------------------


class LograRolloutRayActor(_plain(vllm_engine.RolloutRayActor)):
    """Rollout actor whose workers hold a LoGRA weight-transfer engine; a stale engine does not generate."""

    async def __init__(self, *args, **kwargs):
        _report_active("rollout actor")
        os.environ[ENABLED] = "1"  # inherited by the engine core and its workers, copied to Ray workers
        copied = os.environ.get(_COPIED_TO_RAY_WORKERS, "")
        os.environ[_COPIED_TO_RAY_WORKERS] = ",".join(filter(None, (copied, ENABLED)))
        self._stale: str | None = None
        self._closed = 0  # how often the gate was
        self._known_version = asyncio.Event()
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._stale = "it was started again, with the base model"
        else:
            self._known_version.set()
        self._log_probs = os.environ.get(log_probs.VARIABLE)
        if self._log_probs:
            kwargs["logprobs_mode"] = self._log_probs
        kwargs["weight_transfer_config"] = {"backend": "logra"}
        kwargs["worker_extension_cls"] = "openrlhf_logra.host.vllm_worker.LograWorkerExtension"
        if not cpu.has_gpu():
            kwargs["distributed_executor_backend"] = cpu.EXECUTORS[kwargs["distributed_executor_backend"]]
            if kwargs["tensor_parallel_size"] > 1:
                cpu.give_each_worker_a_core(kwargs["tensor_parallel_size"])
        await super().__init__(*args, **kwargs)

    async def logra_initialise(self, init_info: dict) -> list[dict]:
        """Layouts of all workers (`LograWeightTransferEngine.describe_layout`)."""
        if init_info["version"] is None:
            self._close("its weights are no version of this run")
        return await self._on_workers("logra_initialise", init_info)

    async def logra_sync(self, update_info: dict) -> list[dict]:
        """Apply the records of one message on all workers; their reports. The engine generates again once a sync has
        ended and no worker is stale."""
        asks_only = not (update_info.get("records") or update_info.get("sizes"))
        if not asks_only:
            self._close("a sync did not finish")
        closed = self._closed
        reports = await self._on_workers("logra_sync", update_info)
        if asks_only or not update_info["last"]:
            return reports
        stale = next((report["stale"] for report in reports if report["stale"]), None)
        if stale is None and self.kwargs.get("enable_prefix_caching"):
            # Requests that a partial rollout keeps hold blocks of the old weights: they start again from their tokens.
            if not await self.llm.reset_prefix_cache(reset_running_requests=True):
                stale = "vLLM refused to reset its prefix cache"
                reports = [{**report, "stale": stale} for report in reports]
        if closed == self._closed:  # otherwise the trainer has given this sync up, and another one is under way
            self._stale = stale
            if stale is None:
                self._known_version.set()
        return reports

    def _close(self, reason: str) -> None:
        self._closed += 1
        self._known_version.clear()
        self._stale = reason

    async def _on_workers(self, method: str, argument: dict) -> list[dict]:
        try:
            return await self.llm.collective_rpc(method, args=(argument,))
        except EngineDeadError:
            # Nothing brings an engine core back but a new actor: leave, so that Ray starts one.
            print("[logra] the engine core died; this rollout actor ends, to be started again", flush=True)
            os._exit(1)

    async def generate_responses(self, *args, sampling_params, **kwargs):
        if self._log_probs and sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # of the sampled token only
        return await super().generate_responses(*args, sampling_params=sampling_params, **kwargs)

    async def generate(self, *args, **kwargs):
        # Requests that arrive during a sync wait for its end; those at a stale engine, for its repair.
        while not self._known_version.is_set():  # again after a wait, which others may have closed meanwhile
            try:
                await asyncio.wait_for(self._known_version.wait(), _REPAIR_SECONDS)
            except asyncio.TimeoutError:
                raise RuntimeError(f"LoGRA: this engine's weights are no known version ({self._stale})") from None
        return await super().generate(*args, **kwargs)


# ---- single controller ----------------------------------------------------------------------------------------------
#
# Ray pickles inherited methods of an actor class by value, and with them the class that their `super()` names, so that
# it is not the class of the instance any more. Stock methods that call `super()` are therefore named here again.


class LograExperienceMaker(experience_maker.RemoteExperienceMaker):
    """With the paper's advantage: reward, penalties included, minus the running mean of earlier ones (`baseline`)."""

    baseline: RunningBaseline

    def compute_advantages_and_returns(self, experiences):
        penalise, advantage = experience_maker.apply_length_penalties, self.strategy.args.algo.advantage
        stock = advantage.estimator

        def penalise_and_centre(experiences, args):
            penalise(experiences, args)  # which also keeps the rewards as they are for the log
            mean = self.baseline.take(torch.cat([experience.rewards for experience in experiences]))
            for experience in experiences:
                experience.rewards = experience.rewards - mean

        experience_maker.apply_length_penalties = penalise_and_centre
        advantage.estimator = "running"  # no name of stock's: it shapes nothing further
        try:
            return super().compute_advantages_and_returns(experiences)
        finally:
            experience_maker.apply_length_penalties, advantage.estimator = penalise, stock


class _Controller:
    """Adds the sync's metrics to each step's status, prints one line per step, and keeps the running baseline."""

    _baseline: RunningBaseline | None = None

    def _use_running_baseline(self) -> None:
        if from_hierarchy(self.args.logra).reward_baseline == "running":
            self._baseline = RunningBaseline()
            self.experience_maker.__class__ = LograExperienceMaker
            self.experience_maker.baseline = self._baseline

    def restore_best_checkpoint_state(self, checkpoint_states) -> None:
        super().restore_best_checkpoint_state(checkpoint_states)
        if self._baseline is not None and _BASELINE_CHECKPOINT_KEY in checkpoint_states:
            self._baseline.load_state_dict(checkpoint_states[_BASELINE_CHECKPOINT_KEY])

    def _with_baseline(self, client_states: dict | None) -> dict | None:
        if self._baseline is None:
            return client_states
        return {**(client_states or {}), _BASELINE_CHECKPOINT_KEY: self._baseline.state_dict()}

    def save_best_checkpoint(self, eval_metrics, global_step, client_states=None) -> None:
        super().save_best_checkpoint(eval_metrics, global_step, self._with_baseline(client_states))

    def train_step(self, rollout_samples, global_step: int):
        start = time.perf_counter()
        status, step = super().train_step(rollout_samples, global_step)
        report = ray.get(self.actor_model_group.async_run_method(method_name="sync_report"))[0]
        if report is not None:
            status.update(_sync_metrics(report))
        # Parts of timing/ppo_train and timing/broadcast: kept out of the sum that OpenRLHF makes of all timing/*.
        self._logra_timings = {key: status.pop(key) for key in list(status) if key.startswith("timing/logra_")}
        print(_step_line(step, status, report, time.perf_counter() - start), flush=True)
        return status, step

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        logs = {**(logs_dict or {}), **getattr(self, "_logra_timings", {})}
        super().save_logs_and_checkpoints(global_step, logs, self._with_baseline(client_states))


def _sync_metrics(report: SyncReport) -> dict[str, float]:
    metrics = {
        "logra/sync_bytes": float(report.sync_bytes),
        "logra/sync_dense_bytes": float(report.dense_bytes),
        "logra/sync_seconds": report.seconds,
        "timing/logra_sync": report.seconds,
    }
    if report.digest_ok is not None:
        metrics["logra/digest_ok"] = float(report.digest_ok)
    return metrics


def _step_line(step: int, status: dict, report: SyncReport | None, seconds: float) -> str:
    parts = [f"[logra] step {step}: reward {status.get('rollout/reward_mean', float('nan')):.3f}"]
    if "logra/alpha" in status:
        parts.append(f"alpha {status['logra/alpha']:.3f}")
        parts.append(f"|step|/|W| {status['logra/update_ratio']:.1e}")
    if "logra/realized_kl" in status:
        parts.append(f"KL {status['logra/realized_kl']:.1e} of {status['logra/kl_budget']:.1e}")
    if status.get("logra/skipped"):
        parts.append(f"skipped {status['logra/skipped']:.0f}")
    if report is not None:
        parts.append(f"version {report.version}")
        full = human_bytes(report.dense_bytes)
        parts.append(f"sync {report.mode} {human_bytes(report.sync_bytes)} of {full}")
        if report.digest_ok is not None:
            parts.append(f"digest {'ok' if report.digest_ok else 'repaired'} {report.digest:016x}")
    parts.append(f"{seconds:.1f} s")
    return ", ".join(parts)


class LograPPOTrainer(_Controller, _plain(ppo_trainer.PPOTrainer)):
    """Synchronous controller."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._use_running_baseline()

    def fit(self, global_step: int = 0) -> None:
        if self.args.logra.eval_at_start and self.eval_dataloader and not self.args.ckpt.load_enable:
            sampling = {
                "temperature": self.args.eval.temperature,
                "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
            }
            self.evaluate(global_step, **{**self.generate_kwargs, **sampling})
        super().fit(global_step)


class LograTrainingActor(_Controller, _plain(ppo_trainer_async.TrainingActor)):
    """Training half of the asynchronous controller."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._use_running_baseline()

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()


class LograPPOTrainerAsync(_plain(ppo_trainer_async.PPOTrainerAsync)):
    """Asynchronous controller."""

    def __init__(self, *args, **kwargs):
        ppo_trainer_async.TrainingActor = ray.remote(LograTrainingActor)
        super().__init__(*args, **kwargs)
