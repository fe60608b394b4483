"""Strategies that form the full gradient of every target and keep a small optimizer state: GaLore, Fira, Flora
(docs/strategies.md).

Backward adds the gradients of all micro-batches up in float32 on every rank. At the boundary each target belongs to
one rank, its owner: the gradient is averaged there, the owner's rule turns it into a step, and every rank applies that
step to the elements it holds (as exactly as LoGRA's, math/exact.py). So optimizer states are spread over the ranks,
and no rank can drift apart.
"""

import copy
import math
import time
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import ConfigError, LograConfig
from ..math.exact import FullUpdate
from ..math.sketch import sketch_linear
from ..math.subspace import GaLore, MatrixRule, State
from ..train.coverage import Cost, Coverage, measure
from ..train.ranks import gathered_on_rank_0, of_rank_0, rank, share_bits, sum_over_ranks, world_size
from ..train.shards import apply_update, squared_norm
from ..train.step import Proposal, StepOutcome
from ..train.targets import Target
from .checks import full_name, misfit
from .targeted import TargetedStrategy, usable


class GradientStrategy(TargetedStrategy):
    """Derive from this and give every target a rule: W <- W - alpha rule(G), alpha being the host's learning rate.

    Attributes:
        rank: of the rules' states; None where they have none.
    """

    rank: int | None = None

    @classmethod
    def default_refresh(cls, optimizer: str) -> int:
        return GaLore.update_gap

    def __init__(self, config: LograConfig, model: nn.Module):
        super().__init__(config, model)
        self._rules = [self.make_rule(target) for target in self.targets]
        for rule in self._rules:
            problem = misfit(type(rule), MatrixRule)
            if problem:
                raise TypeError(f"its rule {full_name(type(rule))} {problem}")

    @abstractmethod
    def make_rule(self, target: Target) -> MatrixRule:
        """What turns the target's gradients into steps."""

    def coverage(self) -> Coverage:
        return measure(self, self._model, targets=self.targets, cost=self._cost)

    def _cost(self, target: Target) -> Cost:
        d, k = target.rows, target.width
        return Cost(gradient=4 * d * k, moments=self.make_rule(target).state_bytes(d, k), rank=self.rank)

    def columns(self, target: Target) -> int:
        return target.width

    def forward(self, index: int, input: torch.Tensor) -> torch.Tensor:
        module = self.targets[index].module
        return sketch_linear(input, module.weight, module.bias, None, self._sinks[index])

    def bind(self, device: torch.device) -> None:
        """Allocate the gradients; the rules' states come with their first steps."""
        super().bind(device)
        self._owners = _owners([target.rows * target.width for target in self.targets], world_size())
        owned = [index for index, owner in enumerate(self._owners) if owner == rank()]
        self._states: dict[int, State] = {index: {} for index in owned}  # of the targets that this rank owns

    def move(self, device: torch.device) -> None:
        super().move(device)
        for state in self._states.values():
            state.update(_on(state, device))

    @property
    def state_bytes(self) -> int:
        """Bytes that this rank keeps: all targets' gradients, and the states of those that it owns."""
        tensors = [v for state in self._states.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(tensor.nbytes for tensor in (self._flat, *tensors))

    # ---- the step ---------------------------------------------------------------------------------------------------

    def propose(self, max_norm: float, dense_norm: float = 0.0) -> Proposal:
        """The steps, in the gradients' place, on every rank.

        Raises:
            RuntimeError: a target received no gradient since the last step; its name is in the message.
        """
        start = time.perf_counter()
        self._close()
        self._reduce()
        device = self._flat.device
        squared_weight = sum(squared_norm(target.weight) for target in self.targets)
        squared_gradient, squared_weight = sum_over_ranks([self._squared_norm(), squared_weight], device)
        norm = math.hypot(math.sqrt(squared_gradient), dense_norm)
        if not usable(norm):
            return Proposal(False, norm, seconds=time.perf_counter() - start)
        failure = self._take_steps(max_norm / norm if 0 < max_norm < norm else 1.0)
        squared_step, failed = sum_over_ranks([self._squared_norm(), failure is not None], device)
        if failed:
            raise failure or RuntimeError("LoGRA: another rank could not compute its steps; its own error says why")
        finite = all(map(math.isfinite, (squared_step, squared_weight)))
        if finite:
            for part, owner in zip(self._by_target(), self._owners):
                share_bits(part, owner)
        ratio = math.sqrt(squared_step / squared_weight) if finite and squared_weight else 0.0
        return Proposal(finite, norm, ratio=ratio, seconds=time.perf_counter() - start)

    def _reduce(self) -> None:
        """Mean of each target's gradient over the ranks, on its owner."""
        if world_size() > 1:
            for part, owner in zip(self._by_target(), self._owners):
                dist.reduce(part, dst=owner)
                part /= world_size()

    def _squared_norm(self) -> float:
        """Sum of squares in what this rank owns."""
        parts = self._by_target()
        norms = [float(torch.linalg.vector_norm(parts[index], dtype=torch.float64)) for index in self._states]
        return sum(norm**2 for norm in norms)

    def _take_steps(self, clip: float) -> Exception | None:
        """Each owned gradient becomes its step, in place. An error is returned, to be raised on every rank, none of
        which is left waiting."""
        parts = self._by_target()
        try:
            for index, state in self._states.items():
                gradient = parts[index] * clip  # the rule's own: it may keep it
                parts[index].copy_(self._checked(index, self._rules[index].step(gradient, state)))
        except Exception as error:
            return error
        return None

    def _checked(self, index: int, step: Any) -> torch.Tensor:
        target = self.targets[index]
        expected = (target.rows, target.width)
        if isinstance(step, torch.Tensor) and step.is_floating_point() and step.shape == expected:
            return step
        found = f"{step.dtype} {tuple(step.shape)}" if isinstance(step, torch.Tensor) else type(step).__name__
        raise TypeError(f"LoGRA: the step of {target.name} must be floating-point {expected}; its rule gave {found}")

    def commit(self, proposal: Proposal, alpha: float | None) -> StepOutcome:
        start = time.perf_counter()
        (alpha,) = of_rank_0([math.nan if alpha is None else alpha], self._flat.device)
        applied = proposal.finite and usable(alpha) and usable(alpha * proposal.ratio)
        if applied:
            for target, step in zip(self.targets, self._by_target()):
                update = FullUpdate(
                    target.name, self.config.seed, self.version, step.mul_(alpha), self.config.rounding
                )
                apply_update(target.weight, update)
            self.version += 1
        for sink in self._sinks:
            sink.clear()
        return StepOutcome(
            updates=(),
            skipped=not applied,
            version=self.version,
            grad_norm=proposal.grad_norm,
            alpha=alpha if applied else 0.0,
            update_ratio=alpha * proposal.ratio if applied else 0.0,
            seconds=proposal.seconds + time.perf_counter() - start,
        )

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Configuration, version and, on rank 0, the rules' states by target. A collective."""
        own = {self.targets[index].name: _on(state, torch.device("cpu")) for index, state in self._states.items()}
        states: dict[str, State] = {}
        for part in gathered_on_rank_0(own):
            states.update(part)
        return {**super().state_dict(), "rules": states}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        states = [state["rules"] if rank() == 0 else None]
        if world_size() > 1:
            dist.broadcast_object_list(states, src=0)
        for index in self._states:
            name = self.targets[index].name
            saved = states[0].get(name)
            if saved is None or not all(torch.isfinite(torch.as_tensor(value)).all() for value in saved.values()):
                raise ConfigError(f"--ckpt.path: the checkpoint's optimizer state of {name} is missing or not finite")
            self._states[index] = copy.deepcopy(_on(saved, self._flat.device))


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each target, so that all have about as much to do: the largest first, to whom has least."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += sizes[index]
    return owners


def _on(state: State, device: torch.device) -> State:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
