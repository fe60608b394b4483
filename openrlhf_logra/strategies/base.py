"""What every strategy is: the few calls that the host makes, in this order."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import asdict

import torch
from torch import nn

from ..config import ConfigError, LograConfig, flag_of
from ..train.coverage import Coverage
from ..train.shards import Computed
from ..train.step import Proposal, StepOutcome


class Strategy(ABC):
    """The life of one training method in one trainer process: `attach` before DeepSpeed wraps the model, `bind` after,
    then `propose` and `commit` at every accumulation boundary, on every rank. A class of one's own has to have the
    abstract methods, and `__init__` to set `trained` and `dense`.

    Args:
        config: the flags.
        model: the Hugging Face model; on the meta device for checks and `coverage` alone.

    Raises:
        ConfigError: flags and model do not fit.

    Attributes:
        trained: names of the parameters that training changes.
        dense: those among them that the host's own optimizer trains.
        exact_updates: whether rollout engines can repeat `StepOutcome.updates` bit for bit.
        sizes_steps: whether `alpha` sizes the step; False where the host's own optimizer takes it.
        can_probe: whether predicted KL can be measured: the strategy has `along`.
        version: number of updates applied.
        unused_flags: flags, without "--logra.", that the class makes no use of, beside those of predicted KL where it
            cannot be probed: a run names them.
        default_growth_limit: where `--logra.norm_growth_limit` is not given; None where there is nothing to limit.
        state_bytes: bytes of trainer state that this rank keeps, DeepSpeed's own apart.
    """

    trained: tuple[str, ...]
    dense: tuple[str, ...]
    exact_updates: bool = False
    sizes_steps: bool = False
    can_probe: bool = False
    unused_flags: tuple[str, ...] = ()
    default_growth_limit: float | None = None
    state_bytes: int = 0

    @classmethod
    def default_refresh(cls, optimizer: str) -> int:
        """`--logra.refresh_every` where it is not given, for this `--logra.optimizer`."""
        return 1

    def __init__(self, config: LograConfig, model: nn.Module):
        self.config = config
        self.version = 0
        self._model = model

    @abstractmethod
    def coverage(self) -> Coverage:
        """What is trained, and what it costs."""

    def parameters(self) -> dict[str, torch.Tensor | Computed]:
        """Parameters by the names of the stock model, a tied one once: what a sync covers."""
        return dict(self._model.named_parameters())

    def stored(self) -> dict[str, nn.Parameter]:
        """Parameters by the names that a checkpoint of the trainer has for them."""
        return self.parameters()

    def attach(self) -> None:
        """Change the model before DeepSpeed wraps it."""

    def bind(self, device: torch.device) -> None:
        """Allocate state on the trainer's device, once DeepSpeed has wrapped the model."""

    def move(self, device: torch.device) -> None:
        """Keep the state on another device until moved back, while the trainer sleeps."""

    def scheduled(self, lr: float, peak: float) -> float:
        """alpha by the host's schedule, where no callback sets it: here its learning rate.

        Args:
            lr, peak: of this update, and the largest.
        """
        return lr

    @abstractmethod
    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        """Turn what backward left into one step, not yet taken. A collective.

        Args:
            max_norm: clips by one common factor when the global norm exceeds it; 0 does not clip.
            dense_norm: norm of the gradients of `dense`, a part of the global norm.
        """

    def along(self, proposal: Proposal, how: float | str) -> AbstractContextManager:
        """For a while the model computes as if the proposed step had been taken at alpha = `how` (no weight changes),
        or, with "jvp", carries the derivative along it as tangents. Forward passes without gradient only. For
        strategies that can be probed."""
        raise NotImplementedError

    @abstractmethod
    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        """Take the proposed step at this size, or none (alpha None). A collective; rank 0's alpha counts.

        Args:
            alpha: step size in [0, inf).
        """

    def step(self, alpha: float, max_norm: float) -> StepOutcome:
        """`propose`, then `commit`."""
        return self.commit(self.propose(max_norm), alpha)

    def state_dict(self) -> dict:
        """Plain tensors and numbers; with the configuration, which a resume must repeat."""
        return {"config": asdict(self.config), "version": self.version}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()` of a run with the same configuration.

        Raises:
            ConfigError: the configuration differs; the message names the flags and both values.
        """
        ours, theirs = asdict(self.config), state["config"]
        changed = [f"{flag_of(key)}: {theirs.get(key)} -> {ours[key]}" for key in ours if _differs(theirs, ours, key)]
        if changed:
            raise ConfigError(
                f"the checkpoint was written with another LoGRA configuration ({'; '.join(changed)}); "
                "resume with the same flags"
            )
        self.version = int(state["version"])


class HostTrained(Strategy):
    """The host's own optimizer trains; updates are counted, and their changes synchronised."""

    unused_flags = (
        *("rank", "seed", "distribution", "refresh_every", "target_modules", "optimizer", "beta1", "beta2", "eps"),
        *("update_ratio", "non_target", "rounding"),
    )

    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        return Proposal(finite=True)

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        self.version += 1
        return StepOutcome(updates=(), skipped=False, version=self.version)


# Flags that do not enter the mathematics may change at a resume.
_FREE_TO_CHANGE = {
    "callbacks",
    "kl_probe",
    "sync_mode",
    "sync_verify_every",
    "sync_log_dir",
    "allow_untested_host",
    "eval_at_start",
}


def _differs(theirs: dict, ours: dict, key: str) -> bool:
    plain = [list(value) if isinstance(value, tuple) else value for value in (theirs.get(key), ours[key])]
    return key not in _FREE_TO_CHANGE and plain[0] != plain[1]
