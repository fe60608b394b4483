"""LoGRA: sketches instead of gradients (docs/training.md; paper, Algorithm 1).

Rank 0 decides, everyone applies: sketches are reduced to rank 0, which turns them into directions; these are broadcast
and every rank quantises them (element by element, in IEEE arithmetic that no hardware does otherwise) and applies the
same update to the elements it holds. So ranks cannot drift apart, and the optimizer's moments exist once.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..config import LograConfig
from ..math.direction import (
    Direction,
    make_direction,
    moment_bytes,
    move,
    squared_norm_of_product,
    step_size,
)
from ..math.exact import Update, quantize
from ..math.limiter import limited
from ..math.projection import Projection, projection_index
from ..math.sketch import side_linear, side_rate, sketch_linear
from ..train.coverage import Cost, Coverage, measure, projection_cache_bytes
from ..train.ranks import of_rank_0, rank, share_bits, sum_over_ranks, world_size
from ..train.shards import apply_update, share_owned_bits, squared_norm
from ..train.step import Proposal, StepOutcome
from ..train.targets import Target, check_rank
from . import register_strategy
from .targeted import TargetedStrategy, usable


@register_strategy("logra")
class LograStrategy(TargetedStrategy):
    """Sketches in backward, one low-rank update of the targets at the boundary."""

    exact_updates = True
    can_probe = True
    default_growth_limit = math.inf

    @classmethod
    def default_refresh(cls, optimizer: str) -> int:
        return 20 if optimizer == "adam" else 1

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        check_rank(config.rank, self.targets)
        self.exact_updates = config.distribution == "rademacher"
        self._cached = projection_cache_bytes(self.targets, config.rank) > 0
        self._projections: dict[str, torch.Tensor] = {}
        self._probed: tuple[Proposal, float | str] | None = None
        self._last_ratio: float | None = None  # |step| / |W| of the last step that was not zero

    def coverage(self) -> Coverage:
        projections = projection_cache_bytes(self.targets, self.config.rank)
        return measure(self, self._model, targets=self.targets, cost=self._cost, projections=projections)

    def _cost(self, target: Target) -> Cost:
        d, r = target.rows, self.config.rank
        factors = d * (2 * r + 4) if self.exact_updates else 0
        return Cost(sketch=4 * d * r, moments=moment_bytes(self.config.optimizer, d, r), factors=factors, rank=r)

    def forward(self, index: int, input: torch.Tensor) -> torch.Tensor:
        target = self.targets[index]
        weight, bias = target.module.weight, target.module.bias
        if self._probed is None:
            projection = partial(self._projection, target, input.device)
            return sketch_linear(input, weight, bias, projection, self._sinks[index])
        proposal, how = self._probed
        side = self._projection(target, input.device), proposal.directions[index] * proposal.eta
        return side_rate(input, weight, bias, *side) if how == "jvp" else side_linear(input, weight, bias, *side, how)

    @contextmanager
    def along(self, proposal: Proposal, how: float | str) -> Iterator[None]:
        before, self._probed = self._probed, (proposal, how)
        try:
            yield
        finally:
            self._probed = before

    def columns(self, target: Target) -> int:
        return self.config.rank

    def bind(self, device: torch.device) -> None:
        """Allocate the sketches and, on rank 0, the moments."""
        super().bind(device)
        self._directions: list[Direction] = []
        if rank() == 0:
            make = partial(make_direction, self.config.direction(), rank=self.config.rank, device=device)
            self._directions = [make(rows=target.rows) for target in self.targets]

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

    def scheduled(self, lr: float, peak: float) -> float:
        return lr / peak

    # ---- the step ---------------------------------------------------------------------------------------------------

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._projections.clear()
        for direction in self._directions:
            move(direction, device)

    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        """Direction and eta, the same on every rank; the directions take the sketches' place in memory.

        Raises:
            RuntimeError: a target received no gradient since the last step; its name is in the message.
        """
        start = time.perf_counter()
        self._close()
        self._reduce()
        proposal = self._decide(max_norm, dense_norm)
        if proposal.finite:
            share_bits(self._flat)
            proposal = replace(proposal, directions=self._by_target())
        return replace(proposal, seconds=time.perf_counter() - start)

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        start, updates = time.perf_counter(), ()
        (alpha,) = of_rank_0([math.nan if alpha is None else alpha], self._flat.device)
        if proposal.finite and usable(alpha * proposal.eta) and usable(alpha * proposal.ratio):
            alpha *= limited(alpha * proposal.ratio, self._last_ratio, self.config.norm_growth_limit)
            self._last_ratio = alpha * proposal.ratio or self._last_ratio
            scale = alpha * proposal.eta / math.sqrt(self.config.rank)
            updates = tuple(self._update(t, u * scale) for t, u in zip(self.targets, proposal.directions))
            for target, update in zip(self.targets, updates):
                self._apply(target, update)
            self._advance()
        for sink in self._sinks:
            sink.clear()
        return StepOutcome(
            updates=updates,
            skipped=not updates,
            version=self.version,
            grad_norm=proposal.grad_norm,
            sketch_norm=proposal.sketch_norm,
            alpha=alpha if updates else 0.0,
            update_ratio=alpha * proposal.ratio if updates else 0.0,
            seconds=proposal.seconds + time.perf_counter() - start,
        )

    def _update(self, target: Target, coefficients: torch.Tensor) -> Update:
        """C of one target as its holders receive it: quantised, or (Gaussian) as it is."""
        q, s = (coefficients, None) if self.config.distribution == "gaussian" else quantize(coefficients)
        return Update(self._draw(target), self.version, q, s, self.config.rounding)

    def _reduce(self) -> None:
        """Mean of the sketches over the data-parallel (and ring-attention) ranks, on rank 0."""
        if world_size() > 1:
            dist.reduce(self._flat, dst=0)
            self._flat /= world_size()

    def _decide(self, max_norm: float, dense_norm: float) -> Proposal:
        """Directions in the place of the sketches on rank 0; the same scalars on every rank."""
        (squared_weight,) = sum_over_ranks([sum(squared_norm(t.weight) for t in self.targets)], self._flat.device)
        if world_size() == 1:
            return self._decide_alone(max_norm, dense_norm, squared_weight)
        proposal, failure = Proposal(False), None
        if rank() == 0:
            try:
                proposal = self._decide_alone(max_norm, dense_norm, squared_weight)
            except Exception as error:  # raised below on every rank, none of which is left waiting
                failure = error
        norms = [proposal.grad_norm or 0.0, proposal.sketch_norm or 0.0]
        scalars = [failure is not None, proposal.finite, *norms, proposal.eta, proposal.ratio]
        failed, finite, *figures = of_rank_0(scalars, self._flat.device)
        if failed:
            raise failure or RuntimeError("LoGRA: rank 0 could not compute the update; its own error says why")
        return Proposal(bool(finite), *figures)

    def _decide_alone(self, max_norm: float, dense_norm: float, squared_weight: float) -> Proposal:
        sketch_norm = float(torch.linalg.vector_norm(self._flat, dtype=torch.float64))
        norm = math.hypot(sketch_norm, dense_norm)
        if not usable(norm):
            return Proposal(False, norm, sketch_norm)
        squared_update = self._turn_into_directions(norm, max_norm)
        eta = step_size(self.config.update_ratio, squared_weight, squared_update)
        if not all(map(math.isfinite, (eta, squared_weight, squared_update))):
            return Proposal(False, norm, sketch_norm)
        ratio = eta * math.sqrt(squared_update / squared_weight) if squared_weight else 0.0
        return Proposal(True, norm, sketch_norm, eta, ratio)

    def _turn_into_directions(self, norm: float, max_norm: float) -> float:
        """Each sketch becomes its direction U, in place; returns the sum of |U A|^2."""
        if 0 < max_norm < norm:
            self._flat *= max_norm / norm
        index = projection_index(self.version, self.config.refresh_every)
        squared_update = 0.0
        for target, sink, direction in zip(self.targets, self._sinks, self._directions):
            step = direction.step(sink.value, index)
            squared_update += squared_norm_of_product(step, self._projection(target, step.device))
            sink.value.copy_(step)
        return squared_update

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
        """Configuration, version and, on rank 0, the moments of every target."""
        return {
            **super().state_dict(),
            "last_ratio": self._last_ratio,
            "directions": {t.name: d.state_dict() for t, d in zip(self.targets, self._directions)},
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self._projections.clear()
        self._last_ratio = state["last_ratio"]
        for target, direction in zip(self.targets, self._directions):
            direction.load_state_dict(state["directions"][target.name])
