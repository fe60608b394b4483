"""The trainer's Ray actor: stock PPO on the policy, with syncs of records and the metrics of every update."""

import torch
from openrlhf.trainer.ray import ppo_actor

from ..sync.trainer import LograTrainerEngine, LograTrainerInitInfo, SyncReport
from ..train.callbacks import SyncContext
from ..train.probe import first_responses
from ..train.ranks import sum_over_ranks
from . import cpu, log_probs
from .engine_client import RayEngines
from .stock import plain, report_active


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
                dense=strategy.logra.dense,
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

    def training_step(self, experience, kl_ctl, step, *args, **kwargs) -> dict:
        config, held = self.strategy.logra.config, self.strategy.responses
        if self.args.train.dynamic_batch_enable:
            # DeepSpeed takes every backward pass for an update's last; ZeRO 1 and 2 then keep its gradients alone.
            self.actor.model.set_gradient_accumulation_boundary(bool(self.replay_buffer.dynamic_optimizer_step[step]))
        held += first_responses(
            experience.sequences,
            experience.attention_mask,
            experience.action_mask,
            config.kl_probe_responses - len(held),
            config.kl_probe_max_tokens,
        )
        return super().training_step(experience, kl_ctl, step, *args, **kwargs)

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
            "logra/state_bytes": float(self.strategy.state_bytes + self._sync.state_bytes),
            "timing/logra_update": sum(outcome.seconds for outcome in outcomes),
        }
        measured: dict[str, list[float]] = {}
        for name in ("alpha", "sketch_norm", "update_ratio"):
            values = [getattr(outcome, name) for outcome in applied if getattr(outcome, name) is not None]
            measured[f"logra/{name}"] = values
        for name in dict.fromkeys(name for update in self.strategy.metrics for name in update):
            measured[name] = [update[name] for update in self.strategy.metrics if update.get(name) is not None]
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


class LograPolicyModelActor(plain(ppo_actor.PolicyModelActor)):
    """Trainer actor."""

    @staticmethod
    def _get_free_port() -> int:
        return plain(ppo_actor.PolicyModelActor)._get_free_port() if cpu.has_gpu() else cpu.quiet_port()

    def init_model_from_pretrained(self, *args, **kwargs):
        report_active("trainer actor")
        ppo_actor.ActorPPOTrainer = LograActorPPOTrainer
        super().init_model_from_pretrained(*args, **kwargs)
        if self.strategy.args.ds.enable_sleep:  # the stock method has put DeepSpeed to sleep
            self.strategy.logra.move(torch.device("cpu"))

    def offload_states(self) -> None:
        super().offload_states()
        self.strategy.logra.move(torch.device("cpu"))

    def reload_states(self) -> None:
        super().reload_states()
        self.strategy.logra.move(self.actor.model.device)

    def sync_report(self) -> SyncReport | None:
        """What the last sync did."""
        return self.trainer.sync_report
