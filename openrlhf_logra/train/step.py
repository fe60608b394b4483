"""One accumulation boundary: what a strategy proposes, and what came of it."""

from dataclasses import dataclass, field

import torch

from ..math.exact import Update


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
        metrics: further numbers for the log, by name, as in `UpdateContext`.
        notice: what the user should be told, or None.
    """

    updates: tuple[Update, ...]
    skipped: bool
    version: int
    grad_norm: float | None = None
    sketch_norm: float | None = None
    alpha: float | None = None
    update_ratio: float | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    notice: str | None = None


@dataclass(frozen=True)
class Proposal:
    """A step before its size is known: -alpha eta U A for each target, or -alpha D.

    Attributes:
        finite: whether it can be taken.
        grad_norm, sketch_norm: as in StepOutcome.
        eta: so that |eta U A| over all targets is update_ratio |W|; unused where a step is no such product.
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
