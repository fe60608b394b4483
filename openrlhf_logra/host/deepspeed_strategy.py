"""OpenRLHF's DeepSpeed strategy with LoGRA in it: where the policy is wrapped, stepped, saved and loaded."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.utils import get_strategy as get_stock_strategy

from ..config import from_hierarchy
from ..strategies import strategy_class
from ..strategies.base import Strategy
from ..sync.trainer import digests_of
from ..train import checkpoint, host_optimizer
from ..train.buffers import restore_computed_buffers
from ..train.callbacks import Callback, UpdateContext, load_callbacks
from ..train.coverage import render
from ..train.kl_control import KLControl
from ..train.probe import ProbeBatch, Response
from ..train.step import StepOutcome
from . import cpu

_CHECKPOINT_KEY = "logra"
_SYNC_CHECKPOINT_KEY = "logra_sync"
_CALLBACKS_CHECKPOINT_KEY = "logra_callbacks"
_KL_CONTROL = "kl_control"  # its name among the callbacks


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
        if self.logra.sizes_steps and not self.logra.can_probe:
            self.print(f"[logra] {config.method}: steps are sized by the actor's learning rate")
        if config.unused_flags:
            self.print(f"[logra] {config.method} makes no use of --logra.{', .'.join(config.unused_flags)}")
        prepared = super()._ds_init_train_model(model, cfg)
        self._policy_engine = model.model
        self._max_norm = cfg.get("max_norm", 1.0)
        self.logra.bind(self._policy_engine.device)
        self.base_digests = digests_of(self.logra.parameters())  # before a checkpoint is loaded, as the engines are
        self.outcomes: list[StepOutcome] = []
        self.metrics: list[dict[str, float]] = []  # of each outcome's update, from callbacks
        self.responses: list[Response] = []  # the first of the update under way
        self.callbacks: dict[str, Callback] = {}
        if config.controls_kl:
            self.callbacks[_KL_CONTROL] = KLControl(config.kl_settings(), config.kl_probe, self.print)
        self.callbacks.update(zip(config.callbacks, load_callbacks(config.callbacks)))
        self.resumed = False
        self.sync_state: Callable[[], dict] = dict  # the sync's own state, once there is one
        self.loaded_sync_state: dict | None = None
        self.push = lambda updates, version: None  # hands an update to the sync
        return prepared

    @property
    def state_bytes(self) -> int:
        """Bytes of trainer state that this rank keeps: the strategy's, and DeepSpeed's of what it trains."""
        return self.logra.state_bytes + (host_optimizer.state_bytes(self._policy_engine) if self.logra.dense else 0)

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
        stock_step = partial(super().optimizer_step, optimizer, model, scheduler, name=name, **kwargs)
        if engine.is_gradient_accumulation_boundary():
            alpha = self.logra.scheduled(scheduler.get_last_lr()[0], scheduler.base_lrs[0])
            self._logra_step(alpha, stock_step)
        else:
            stock_step()

    def _logra_step(self, alpha: float, stock_step: Callable[[], None]) -> None:
        """One update. DeepSpeed's own part of it is not taken where ours is not, and clipped by the same factor."""
        engine, shared = self._policy_engine, self.logra.sizes_steps and bool(self.logra.dense)
        dense_norm = host_optimizer.gradient_norm(engine) if shared else 0.0
        proposal = self.logra.propose(self._max_norm, dense_norm)
        context = UpdateContext(
            version=self.logra.version,
            proposal=proposal,
            alpha=alpha,
            batch=ProbeBatch(*(tuple(zip(*self.responses)) or ((), ())), self.args.rollout.temperature),
            model=engine.module,
            device=engine.device,
            forward=partial(engine, use_cache=False),
            along=partial(self.logra.along, proposal),
        )
        if proposal.finite:
            for callback in self.callbacks.values():
                callback.on_update(context)
        outcome = self.logra.commit(proposal, context.decided())
        with contextlib.ExitStack() as stack:
            if shared and outcome.skipped:
                stack.enter_context(host_optimizer.dropping(engine))
            elif shared and 0 < self._max_norm < proposal.grad_norm:
                stack.enter_context(
                    host_optimizer.clipping_at(engine, self._max_norm * dense_norm / proposal.grad_norm)
                )
            stock_step()
        context.outcome = replace(outcome, updates=())  # figures only: the updates are the sync's business
        for callback in self.callbacks.values():
            callback.on_step_end(context)
        self.responses.clear()
        self.outcomes.append(context.outcome)
        self.metrics.append({**outcome.metrics, **context.metrics})
        if outcome.notice:
            self.print(f"[logra] {outcome.notice}")
        if outcome.skipped:
            reason = context.held or f"gradients, weights or step are not finite (gradient norm {outcome.grad_norm})"
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

    def load_ckpt(self, model, load_dir, tag=None, *args, **kwargs):
        if self.logra is None or model is not self._policy_engine:
            return super().load_ckpt(model, load_dir, tag, *args, **kwargs)
        found = checkpoint.look_into(load_dir, tag)
        difference = found and self._difference(found)
        if difference:
            self.print(
                f"[logra] {found.folder / found.tag} {difference}: its weights are continued, the state of "
                "DeepSpeed's optimizer begins anew"
            )
            path, states = str(found.folder), checkpoint.adopt(found, model, self.logra.stored())
        else:
            path, states = super().load_ckpt(model, load_dir, tag, *args, **kwargs)
        if path is not None:
            self.resumed = True
            if _CHECKPOINT_KEY in states:
                self.logra.load_state_dict(states.pop(_CHECKPOINT_KEY))
            self.loaded_sync_state = states.pop(_SYNC_CHECKPOINT_KEY, None) or None
            for name, state in states.pop(_CALLBACKS_CHECKPOINT_KEY, {}).items():
                if name in self.callbacks:
                    self.callbacks[name].load_state_dict(state)
        return path, states

    def _difference(self, found: checkpoint.Found) -> str | None:
        """Why DeepSpeed cannot continue a checkpoint, or None."""
        if _CHECKPOINT_KEY not in found.states and self.logra.sizes_steps:
            return "was written without LoGRA"
        return found.difference(self._policy_engine)
