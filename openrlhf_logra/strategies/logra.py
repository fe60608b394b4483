"""LoGRA: sketches instead of gradients (spec sections 2 to 5; paper, Algorithm 1).

Rank 0 decides, everyone applies: sketches are reduced to rank 0, which turns them into quantised coefficients; these
are broadcast and every rank applies the same update to the elements it holds. So ranks cannot drift apart, whatever
their hardware, and the optimizer's moments exist once.
"""

import math
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..config import ConfigError, LograConfig
from ..math.direction import Direction, make_direction, squared_norm_of_product, step_size
from ..math.exact import Update, quantize
from ..math.projection import Projection, projection_index
from ..math.sketch import SketchSink, grad_anchor, sketch_linear
from ..train.coverage import Coverage, measure, projection_cache_bytes
from ..train.shards import apply_update, share_owned_bits, squared_norm
from ..train.targets import Target, check_rank, find_targets

ANCHOR = "logra_anchor"
_LARGEST_NORM = 1e19  # beyond, squares overflow float32 and would poison the moments: as good as not finite


@dataclass(frozen=True)
class StepOutcome:
    """What one accumulation boundary did.

    Attributes:
        updates: one per target, in order; empty when the step was skipped.
        skipped: whether a sketch was not finite (or too large to square), so that nothing was applied.
        version: number of updates applied so far, this one included.
        grad_norm: unbiased estimate of the global gradient norm, before clipping.
        sketch_norm: the sketches' share of it.
        alpha: step size.
        update_ratio: |step| / |W| over all targets.
        seconds: time spent.
    """

    updates: tuple[Update, ...]
    skipped: bool
    version: int
    grad_norm: float
    sketch_norm: float
    alpha: float
    update_ratio: float
    seconds: float


class LograStrategy:
    """The life of LoGRA in one trainer process: `attach` before DeepSpeed wraps the model, `bind` after, then `step`
    at every accumulation boundary, on every rank."""

    def __init__(self, config: LograConfig, model: nn.Module):
        self.config = config
        self.targets = find_targets(model, config.target_modules)
        check_rank(config.rank, self.targets)
        self.version = 0
        self._model = model
        self._cached = projection_cache_bytes(self.targets, config.rank) > 0
        self._projections: dict[str, torch.Tensor] = {}

    # ---- before DeepSpeed -------------------------------------------------------------------------------------------

    def attach(self) -> Coverage:
        """Freeze every parameter, sketch the targets, and give autograd its one trainable anchor.

        Returns:
            The coverage table of the model.
        """
        coverage = measure(self._model, self.targets, self.config)
        self._model.requires_grad_(False)
        self._sinks = [SketchSink(torch.empty(0)) for _ in self.targets]
        for target, sink in zip(self.targets, self._sinks):
            target.module.forward = partial(self._forward, target, sink)
        self._add_anchor()
        return coverage

    def _forward(self, target: Target, sink: SketchSink, x: torch.Tensor) -> torch.Tensor:
        module = target.module
        return sketch_linear(x, module.weight, module.bias, partial(self._projection, target, x.device), sink)

    def _add_anchor(self) -> None:
        # DeepSpeed does not start without a trainable parameter, and nothing would flow back to the first target.
        embeddings = self._model.get_input_embeddings()
        weight = embeddings.weight
        anchor = nn.Parameter(torch.zeros(8, dtype=weight.dtype, device=weight.device))
        embeddings.register_parameter(ANCHOR, anchor)
        embeddings.register_forward_hook(lambda module, _, output: grad_anchor(output, getattr(module, ANCHOR)))
        ignored = [name for name, parameter in self._model.named_parameters() if parameter is anchor]
        self._model._keys_to_ignore_on_save = [*(self._model._keys_to_ignore_on_save or ()), *ignored]

    # ---- after DeepSpeed --------------------------------------------------------------------------------------------

    def bind(self, device: torch.device) -> None:
        """Allocate the sketches (one flat float32 buffer) and, on rank 0, the moments, on the trainer's device."""
        rank = self.config.rank
        self._flat = torch.zeros(sum(t.rows for t in self.targets) * rank, dtype=torch.float32, device=device)
        views = self._flat.split([t.rows * rank for t in self.targets])
        for target, sink, view in zip(self.targets, self._sinks, views):
            sink.value = view.view(target.rows, rank)
        self._directions: list[Direction] = []
        if _rank() == 0:
            self._directions = [make_direction(self.config.direction(), t.rows, rank, device) for t in self.targets]

    @property
    def state_bytes(self) -> int:
        """Bytes that this rank keeps: sketches, moments, projections. (While it computes an update, rank 0 needs up to
        three more sketches' worth for directions, coefficients and their quantised form.)"""
        moments = [value for d in self._directions for value in d.state_dict().values()]
        held = [self._flat, *(m for m in moments if isinstance(m, torch.Tensor))]
        projections = projection_cache_bytes(self.targets, self.config.rank)
        return sum(tensor.numel() * tensor.element_size() for tensor in held) + projections

    def _draw(self, target: Target) -> Projection:
        index = projection_index(self.version, self.config.refresh_every)
        return Projection(
            self.config.seed, index, target.name, self.config.rank, target.width, self.config.distribution
        )

    def _projection(self, target: Target, device: torch.device) -> torch.Tensor:
        """A [r, k] in float32 of the update under way."""
        matrix = self._projections.get(target.name)
        if matrix is None:
            matrix = self._draw(target).block(device=device) / math.sqrt(self.config.rank)
            if self._cached:
                self._projections[target.name] = matrix
        return matrix

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(self, alpha: float, max_norm: float) -> StepOutcome:
        """Turn the accumulated sketches into one update and apply it. A collective: every rank must call it.

        Args:
            alpha: step size in [0, inf).
            max_norm: clips the sketches by one common factor when their global norm exceeds it; 0 does not clip.

        Raises:
            RuntimeError: a target received no gradient since the last step; its name is in the message.
        """
        start = time.perf_counter()
        self._check_contributions()
        self._reduce()
        decision = self._decide(alpha, max_norm)
        for sink in self._sinks:
            sink.clear()
        updates = self._exchange(decision)
        for target, update in zip(self.targets, updates):
            self._apply(target, update)
        if updates:
            self._advance()
        return StepOutcome(
            updates=updates,
            skipped=not decision.finite,
            version=self.version,
            grad_norm=decision.grad_norm,
            sketch_norm=decision.grad_norm,
            alpha=alpha if updates else 0.0,
            update_ratio=decision.update_ratio,
            seconds=time.perf_counter() - start,
        )

    def _check_contributions(self) -> None:
        """A target is silent when no rank's backward reached it; then every rank raises."""
        counts = torch.tensor([sink.contributions for sink in self._sinks], device=self._flat.device)
        if _world_size() > 1:
            dist.all_reduce(counts)
        silent = [t.name for t, count in zip(self.targets, counts.tolist()) if count == 0]
        if silent:
            raise RuntimeError(
                f"LoGRA: no gradient reached {silent[0]} ({len(silent)} of {len(self.targets)} targets) since the "
                "last update; is the module unused, or its input detached from the loss?"
            )

    def _reduce(self) -> None:
        """Mean of the sketches over the data-parallel (and ring-attention) ranks, on rank 0."""
        world = _world_size()
        if world > 1:
            dist.reduce(self._flat, dst=0)
            self._flat /= world

    def _decide(self, alpha: float, max_norm: float) -> "_Decision":
        """Direction, eta and coefficients on rank 0; the same scalars on every rank."""
        squared_weight = _sum_over_ranks(sum(squared_norm(t.weight) for t in self.targets), self._flat.device)
        decision, failure = None, None
        if _rank() == 0:
            try:
                decision = self._decide_alone(alpha, max_norm, squared_weight)
            except Exception as error:  # raised below on every rank, none of which is left waiting
                failure = error
        if _world_size() > 1:
            finite, norm, ratio = (
                (decision.finite, decision.grad_norm, decision.update_ratio) if decision else (0, 0, 0)
            )
            scalars = torch.tensor([failure is not None, finite, norm, ratio], dtype=torch.float64)
            scalars = scalars.to(self._flat.device)
            dist.broadcast(scalars, src=0)
            failed, finite, norm, ratio = scalars.tolist()
            if failed and failure is None:
                failure = RuntimeError("LoGRA: rank 0 could not compute the update; its own error says why")
            decision = decision or _Decision(bool(finite), norm, ratio, None)
        if failure is not None:
            raise failure
        return decision

    def _decide_alone(self, alpha: float, max_norm: float, squared_weight: float) -> "_Decision":
        norm = float(torch.linalg.vector_norm(self._flat, dtype=torch.float64))
        if not norm < _LARGEST_NORM:
            return _Decision(False, norm, 0.0, None)
        directions, squared_update = self._directions_of(norm, max_norm)
        eta = step_size(self.config.update_ratio, squared_weight, squared_update)
        scale = alpha * eta / math.sqrt(self.config.rank)
        ratio = alpha * eta * math.sqrt(squared_update / squared_weight) if squared_weight else 0.0
        return _Decision(True, norm, ratio, [direction * scale for direction in directions])

    def _directions_of(self, norm: float, max_norm: float) -> tuple[list[torch.Tensor], float]:
        if 0 < max_norm < norm:
            self._flat *= max_norm / norm
        index = projection_index(self.version, self.config.refresh_every)
        directions, squared_update = [], 0.0
        for target, sink, direction in zip(self.targets, self._sinks, self._directions):
            step = direction.step(sink.value, index)
            directions.append(step)
            squared_update += squared_norm_of_product(step, self._projection(target, step.device))
        return directions, squared_update

    def _exchange(self, decision: "_Decision") -> tuple[Update, ...]:
        """The updates of all targets, the same on every rank; none when the step is skipped."""
        if not decision.finite:
            return ()
        exact = self.config.distribution == "rademacher"
        rank, device = self.config.rank, self._flat.device
        rows = [target.rows for target in self.targets]
        q = torch.empty(sum(rows), rank, dtype=torch.int16 if exact else torch.float32, device=device)
        s = torch.empty(sum(rows) if exact else 0, dtype=torch.float32, device=device)
        if decision.coefficients is not None:
            for i, (c, part) in enumerate(zip(decision.coefficients, q.split(rows))):
                if exact:
                    quantised, scales = quantize(c)
                    part.copy_(quantised)
                    s.split(rows)[i].copy_(scales)
                else:
                    part.copy_(c)
        _broadcast_bits(q)
        if exact:
            _broadcast_bits(s)
        scales = s.split(rows) if exact else [None] * len(rows)
        return tuple(
            Update(self._draw(target), self.version, part, scale, self.config.rounding)
            for target, part, scale in zip(self.targets, q.split(rows), scales)
        )

    def _apply(self, target: Target, update: Update) -> None:
        apply_update(target.weight, update)
        if update.s is None:
            # A Gaussian product is not exact, so that its bits belong to one rank: rank 0, or the shard's owner.
            share_owned_bits(target.weight)

    def _advance(self) -> None:
        before = projection_index(self.version, self.config.refresh_every)
        self.version += 1
        if projection_index(self.version, self.config.refresh_every) != before:
            self._projections.clear()

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Plain tensors and numbers: configuration, version and, on rank 0, the moments of every target."""
        return {
            "config": asdict(self.config),
            "version": self.version,
            "directions": {t.name: d.state_dict() for t, d in zip(self.targets, self._directions)},
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict()` of a run with the same configuration.

        Raises:
            ConfigError: the configuration differs; the message names the flags and both values.
        """
        ours, theirs = asdict(self.config), state["config"]
        changed = [
            f"{key}: {theirs.get(key)} -> {ours[key]}" for key in ours if _differs(theirs.get(key), ours[key], key)
        ]
        if changed:
            raise ConfigError(
                f"the checkpoint was written with another LoGRA configuration ({'; '.join(changed)}); "
                "resume with the same flags"
            )
        self.version = int(state["version"])
        self._projections.clear()
        for target, direction in zip(self.targets, self._directions):
            direction.load_state_dict(state["directions"][target.name])


# Flags that do not enter the mathematics may change at a resume.
_FREE_TO_CHANGE = {
    "sync_mode",
    "sync_verify_every",
    "allow_untested_host",
    "eval_at_start",
}


def _differs(theirs, ours, key: str) -> bool:
    if key in _FREE_TO_CHANGE:
        return False
    return (list(theirs) if isinstance(theirs, (list, tuple)) else theirs) != (
        list(ours) if isinstance(ours, tuple) else ours
    )


@dataclass(frozen=True)
class _Decision:
    finite: bool
    grad_norm: float
    update_ratio: float
    coefficients: list[torch.Tensor] | None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_over_ranks(value: float, device: torch.device) -> float:
    if _world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total)


def _broadcast_bits(tensor: torch.Tensor) -> None:
    # As bytes: neither gloo nor NCCL knows int16, and bytes cannot be rounded.
    if _world_size() > 1:
        dist.broadcast(tensor.view(torch.uint8), src=0)
