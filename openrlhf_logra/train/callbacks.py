"""What a run lets others see and decide: the callback protocol (docs/kl.md).

Every trainer rank makes its own object of each class and calls the same methods in the same order; what `state_dict`
returns is in the checkpoint (rank 0's; under ZeRO 3 each rank's own). The driver makes each once too, to see that it
can be made. The predicted-KL controller (kl_control.py) is one of them, called first.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import ConfigError, one_line
from .probe import Along, ProbeBatch
from .step import Proposal, StepOutcome

if TYPE_CHECKING:
    from ..sync.trainer import SyncReport


@dataclass
class UpdateContext:
    """One update, from its proposal to its end.

    Attributes:
        version: number of updates applied before it.
        proposal: direction and norms; its size is open until `on_update` of the last callback has returned.
        alpha: the step's size; a callback may change it. Rank 0's counts.
        held: why the step is not taken, or None.
        batch: the first responses of this update on this rank.
        model: the Hugging Face model.
        device: where it is.
        forward: runs tokens, int64 [B, L], through the model as the host wrapped it. A collective under ZeRO 3.
        along: `Strategy.along` of this proposal.
        outcome: what the step did; None until `on_step_end`.
        metrics: further numbers for the log, by name. One PPO phase logs the mean of each over its updates, or the
            sum where the name begins with `timing/`.
    """

    version: int
    proposal: Proposal
    alpha: float
    batch: ProbeBatch
    model: nn.Module
    device: torch.device
    forward: Callable[[torch.Tensor], object]
    along: Along
    held: str | None = None
    outcome: StepOutcome | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def hold(self, reason: str) -> None:
        """Do not take this step; the log says why. Every rank must say so. Moments of the optimizer have seen its
        gradient all the same. (Where the host's own optimizer takes it, `--logra.method dense`, neither this nor alpha
        has an effect.)"""
        self.held = reason

    def decided(self) -> float | None:
        """The step's size, or None: held, or alpha is no size."""
        if self.held is None and not (isinstance(self.alpha, Real) and 0 <= self.alpha < math.inf):
            self.hold(f"alpha is {self.alpha!r}; set by a callback?")
        return None if self.held is not None else float(self.alpha)


@dataclass(frozen=True)
class SyncContext:
    """One sync of the rollout engines.

    Attributes:
        version: number of updates applied.
        report: what the sync did; None on ranks other than 0.
    """

    version: int
    report: "SyncReport | None"


class Callback:
    """Derive from this and override what you need; `--logra.callbacks package.module:Class` makes an object without
    arguments on every trainer rank."""

    def on_update(self, context: UpdateContext) -> None:
        """The step is known and finite, and not yet taken."""

    def on_step_end(self, context: UpdateContext) -> None:
        """The step was taken, or skipped (`context.outcome.skipped`)."""

    def on_sync(self, context: SyncContext) -> None:
        """The rollout engines have been brought to the trainer's version."""

    def state_dict(self) -> dict:
        """What a checkpoint keeps: plain tensors and numbers."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()`; not called where the checkpoint has none of this class."""


def load_callbacks(paths: tuple[str, ...]) -> list[Callback]:
    """An object of each class.

    Args:
        paths: "package.module:Class" each.

    Raises:
        ConfigError: one cannot be imported or made, is no Callback, or is named twice.
    """
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ConfigError(f"--logra.callbacks {twice[0]}: is named twice")
    return [_load(path) for path in paths]


def _load(path: str) -> Callback:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"--logra.callbacks {path}: must be package.module:Class")
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ConfigError(f"--logra.callbacks {path}: cannot be made: {one_line(error)}") from error
    if not isinstance(made, Callback):
        raise ConfigError(f"--logra.callbacks {path}: must derive from openrlhf_logra.train.callbacks.Callback")
    return made
