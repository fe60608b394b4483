"""The single controller, synchronous and asynchronous: metrics and one line per step, and the running baseline.

Ray pickles inherited methods of an actor class by value, and with them the class that their `super()` names, so that
it is not the class of the instance any more. Stock methods that call `super()` are therefore named here again.
"""

import time

import ray
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils import experience_maker

from ..config import from_hierarchy
from ..math.baseline import RunningBaseline
from ..sync.trainer import SyncReport
from ..units import bytes_text
from .stock import plain

_BASELINE_CHECKPOINT_KEY = "logra_reward_baseline"


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
        parts.append(f"alpha {status['logra/alpha']:.3g}")
        parts.append(f"|step|/|W| {status['logra/update_ratio']:.1e}")
    if "logra/realized_kl" in status:
        parts.append(f"KL {status['logra/realized_kl']:.1e} of {status['logra/kl_budget']:.1e}")
    if status.get("logra/skipped"):
        parts.append(f"skipped {status['logra/skipped']:.0f}")
    if report is not None:
        parts.append(f"version {report.version}")
        full = bytes_text(report.dense_bytes)
        parts.append(f"sync {report.mode} {bytes_text(report.sync_bytes)} of {full}")
        if report.digest_ok is not None:
            parts.append(f"digest {'ok' if report.digest_ok else 'repaired'} {report.digest:016x}")
    parts.append(f"{seconds:.1f} s")
    return ", ".join(parts)


class LograPPOTrainer(_Controller, plain(ppo_trainer.PPOTrainer)):
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


class LograTrainingActor(_Controller, plain(ppo_trainer_async.TrainingActor)):
    """Training half of the asynchronous controller."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._use_running_baseline()

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()


class LograPPOTrainerAsync(plain(ppo_trainer_async.PPOTrainerAsync)):
    """Asynchronous controller."""

    def __init__(self, *args, **kwargs):
        ppo_trainer_async.TrainingActor = ray.remote(LograTrainingActor)
        super().__init__(*args, **kwargs)
