"""What every strategy is: the few calls that the host makes, in this order."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..config import ConfigError, LograConfig
from ..math.exact import Update
from ..train.coverage import Coverage


@dataclass(frozen=True)
class StepOutcome:
    """What one accumulation boundary did. None where a strategy has no such figure.

    Attributes:
        updates: one per target, in order, where engines can repeat the update; else empty.
        skipped: whether nothing was applied: a sketch, a weight or the step was not finite (or too large to square),
            or the step was held.
        version: number of updates applied so far, this one included.
        grad_norm: unbiased estimate of the global gradient norm, before clipping; None leaves DeepSpeed's own.
        sketch_norm: the sketches' share of it, sqrt(sum |S|^2).
        alpha: step size.
        update_ratio: |step| / |W| over all targets.
        seconds: time spent on proposing and committing.
    """

    updates: tuple[Update, ...]
    skipped: bool
    version: int
    grad_norm: float | None = None
    sketch_norm: float | None = None
    alpha: float | None = None
    update_ratio: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """A step before its size is known: -alpha eta U A for each target.

    Attributes:
        finite: whether it can be taken.
        grad_norm, sketch_norm: as in StepOutcome.
        eta: so that |eta U A| over all targets is update_ratio |W|.
        ratio: |step| / |W| at alpha = 1.
        directions: U of each target, float32 [d, r], on every rank until the step is taken; empty where a strategy's
            step is no such product.
        seconds: time spent on it.
    """

    finite: bool
    grad_norm: float | None = None
    sketch_norm: float | None = None
    eta: float = 0.0
    ratio: float = 0.0
    directions: tuple[torch.Tensor, ...] = ()
    seconds: float = 0.0


class Strategy:
    """The life of one training method in one trainer process: `attach` before DeepSpeed wraps the model, `bind` after,
    then `propose` and `commit` at every accumulation boundary, on every rank.

    Args:
        config: the flags.
        model: the Hugging Face model; on the meta device for checks and `coverage` alone.

    Raises:
        ConfigError: flags and model do not fit.

    Attributes:
        trained: names of the parameters that training changes.
        dense: those among them that the host's own optimizer trains.
        exact_updates: whether rollout engines can repeat `StepOutcome.updates` bit for bit.
        sizes_steps: whether `alpha` sizes the step; False where the host's own optimizer has taken it already.
        version: number of updates applied.
        state_bytes: bytes of trainer state that this rank keeps, DeepSpeed's own apart.
    """

    trained: tuple[str, ...]
    dense: tuple[str, ...]
    exact_updates: bool
    sizes_steps: bool
    state_bytes: int

    def __init__(self, config: LograConfig, model: nn.Module):
        self.config = config
        self.version = 0
        self._model = model

    def coverage(self) -> Coverage:
        """What is trained, and what it costs."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the stock model by name, a tied one once: what a sync covers."""
        return dict(self._model.named_parameters())

    def attach(self) -> None:
        """Change the model before DeepSpeed wraps it."""

    def bind(self, device: torch.device) -> None:
        """Allocate state on the trainer's device, once DeepSpeed has wrapped the model."""

    def move(self, device: torch.device) -> None:
        """Keep the state on another device until moved back, while the trainer sleeps."""

    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        """Turn what backward left into one step, not yet taken. A collective.

        Args:
            max_norm: clips by one common factor when the global norm exceeds it; 0 does not clip.
            dense_norm: norm of the gradients of `dense`, a part of the global norm.
        """
        raise NotImplementedError

    def along(self, proposal: Proposal, how: float | str) -> AbstractContextManager:
        """For a while the model computes as if the proposed step had been taken at alpha = `how` (no weight changes),
        or, with "jvp", carries the derivative along it as tangents. Forward passes without gradient only. For
        strategies that size steps."""
        raise NotImplementedError

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        """Take the proposed step at this size, or none (alpha None). A collective; rank 0's alpha counts.

        Args:
            alpha: step size in [0, inf).
        """
        raise NotImplementedError

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
        changed = [f"{key}: {theirs.get(key)} -> {ours[key]}" for key in ours if _differs(theirs, ours, key)]
        if changed:
            raise ConfigError(
                f"the checkpoint was written with another LoGRA configuration ({'; '.join(changed)}); "
                "resume with the same flags"
            )
        self.version = int(state["version"])


# Flags that do not enter the mathematics may change at a resume.
_FREE_TO_CHANGE = {
    "callbacks",
    "sync_mode",
    "sync_verify_every",
    "sync_log_dir",
    "allow_untested_host",
    "eval_at_start",
}


def _differs(theirs: dict, ours: dict, key: str) -> bool:
    plain = [list(value) if isinstance(value, tuple) else value for value in (theirs.get(key), ours[key])]
    return key not in _FREE_TO_CHANGE and plain[0] != plain[1]
