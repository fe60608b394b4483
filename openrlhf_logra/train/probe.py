"""Forward passes that measure how a low-rank step would change the policy, before it is taken (docs/kl.md).

A probe changes nothing: no weight, no sketch, no random state. Targets run as if W were W + epsilon D, through the
low-rank side path of math/sketch.py; what is kept of a pass is the input of the output head at the positions asked
for, and logits are formed from that a few positions at a time, in float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as functional
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..math.kl import kl_divergence, rate_variance
from .shards import gathered

POSITIONS_AT_ONCE = 128
TOKENS_AT_ONCE = 4096

Along = Callable[[float | str], AbstractContextManager]  # `Strategy.along` of one proposal


@dataclass(frozen=True)
class ProbeBatch:
    """Where the policy is looked at on this rank: some responses and the positions that predict their tokens.

    Attributes:
        sequences: int64 [L] each, without padding.
        positions: int64 [n] each, increasing indices into the sequence.
        temperature: T of the rollout.
        idle: passes to be made beside those of `passes`: ranks must make equally many.
    """

    sequences: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    temperature: float
    idle: int = 0

    @property
    def count(self) -> int:
        """Number of positions."""
        return sum(len(positions) for positions in self.positions)

    def passes(self) -> list[list[int]]:
        """Indices of the responses that go through the model together: short ones, beside each other."""
        lengths = [len(sequence) for sequence in self.sequences]
        groups: list[list[int]] = []
        for index, length in enumerate(lengths):
            longest = max([length, *(lengths[i] for i in groups[-1])]) if groups else length
            if not groups or longest * (len(groups[-1]) + 1) > TOKENS_AT_ONCE:
                groups.append([])
            groups[-1].append(index)
        return groups


Response = tuple[torch.Tensor, torch.Tensor]
HeadWeights = tuple[torch.Tensor, torch.Tensor | None]  # W [V, d] and bias [V]


def first_responses(
    sequences: torch.Tensor, attention_mask: torch.Tensor, action_mask: torch.Tensor, count: int, max_tokens: int
) -> list[Response]:
    """Sequence and positions, as in `ProbeBatch`, of the first responses of a padded batch that have a token.

    Args:
        sequences, attention_mask: int64 [B, L].
        action_mask: [B, A], for the log-probabilities of the last A tokens.
        count: how many responses at most.
        max_tokens: positions taken of each at most; the sequence ends with the last of them.
    """
    found = []
    for tokens, valid, actions in zip(sequences, attention_mask.bool(), action_mask.bool()):
        if len(found) == count:
            break
        # The log-probability of token i is read at position i - 1.
        predicting = torch.zeros_like(valid)
        predicting[-1 - len(actions) : -1] = actions
        positions = predicting[valid].nonzero().flatten()[:max_tokens]
        if len(positions):
            found.append((tokens[valid][: int(positions[-1]) + 1].clone(), positions))
    return found


class Head:
    """The output head of a causal language model: logits from the head's inputs, in float32.

    Args:
        model: Hugging Face model whose logits are a linear map of the head's input, scaled and capped.

    Attributes:
        scale: what the model multiplies the map with (`Probe.learn_head`).
    """

    def __init__(self, model: nn.Module):
        self._module = model.get_output_embeddings()
        self._cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.scale = 1.0

    @contextmanager
    def captured(self, value: float | None = None) -> Iterator[list[torch.Tensor]]:
        """For a while the head only collects its inputs. `value`: what it gives instead of logits."""
        inputs: list[torch.Tensor] = []

        def collect(hidden: torch.Tensor) -> torch.Tensor:
            inputs.append(hidden)
            one = hidden[..., :1]
            return one if value is None else torch.full_like(one, value, dtype=torch.float32)

        before = self._module.__dict__.get("forward")
        self._module.forward = collect
        try:
            yield inputs
        finally:
            if before is None:
                del self._module.forward
            else:
                self._module.forward = before

    def copy(self) -> HeadWeights | None:
        """W and bias as they are now, in host memory; None where they are frozen. A collective under ZeRO 3."""
        if not self._module.weight.requires_grad:
            return None
        with self.weights() as (weight, bias):
            return weight.to("cpu", copy=True), bias if bias is None else bias.to("cpu", copy=True)

    @contextmanager
    def weights(self) -> Iterator[HeadWeights]:
        """W [V, d] and bias of the head on this rank. A collective under ZeRO 3."""
        bias = getattr(self._module, "bias", None)
        with gathered(self._module.weight) as weight:
            if bias is None:
                yield weight, None
                return
            with gathered(bias) as vector:
                yield weight, vector

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """float32 [n, V] of hidden [n, d]."""
        z = _in_float32(hidden, weight)
        if bias is not None:
            z += bias.to(z)
        z *= self.scale
        return z if self._cap is None else self._cap * torch.tanh(z / self._cap)

    def rates(self, logits: torch.Tensor, tangent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """float32 [n, V]: how `logits` change where the head's input changes along `tangent` [n, d]."""
        z = _in_float32(tangent, weight).mul_(self.scale)
        return z if self._cap is None else z * (1 - (logits / self._cap).square())


def _in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [n, V] in float32, without a float32 copy of all of W."""
    return torch.cat([x.float() @ rows.float().t() for rows in weight.split(16384)], dim=-1)


class Probe:
    """Runs the probes of one trainer process. Every rank must call each method the same number of times: forward
    passes and sums are collective.

    Args:
        model: Hugging Face model.
        forward: runs tokens [B, L] (int64) through the wrapped model, each attending to those before it; returns what
            the model does.
    """

    def __init__(self, model: nn.Module, forward: Callable[[torch.Tensor], Any]):
        self._model, self._head, self._forward = model, Head(model), forward

    def learn_head(self, batch: ProbeBatch) -> float:
        """Learn what the model does to its head's output, once.

        Returns:
            The largest difference of our logits from the model's own on the first tokens of this rank's batch, as a
            share of the largest logit; infinity where the model does not call its head.
        """
        tokens = self._padded(batch.sequences[:1])[:, :64]
        tiny = 2.0**-14
        with torch.no_grad(), _looking(self._model):
            with self._head.captured(tiny) as inputs:
                scaled = self._forward(tokens).logits
            own = self._forward(tokens).logits
            with self._head.weights() as weights:
                if not inputs or scaled.shape[-1] != 1:
                    return math.inf
                self._head.scale = float(scaled[0, 0, 0]) / tiny
                difference = self._head.logits(inputs[0][0], *weights) - own[0].float()
        return float(difference.abs().max() / own.float().abs().max().clamp(min=1e-9))

    def hidden(self, batch: ProbeBatch, within: AbstractContextManager | None = None) -> list[torch.Tensor]:
        """The head's inputs at the positions of each pass, [n, d]; `within`: a side path (`Strategy.along`)."""
        with torch.no_grad(), _looking(self._model), within or nullcontext(), self._head.captured() as inputs:
            return [_at(batch, group, inputs.pop()) for group in self._run(batch)]

    def variance_by_difference(
        self, batch: ProbeBatch, base: list[torch.Tensor], along: Along, epsilon: float
    ) -> tuple[float, float]:
        """Sum over this rank's positions of Var[zdot], by central differences at +-epsilon; and of the KL that a step
        of epsilon costs, by which one sees whether epsilon is short enough for them.

        Args:
            base: `hidden(batch)`.
            along: within `along(epsilon)` passes are at W + epsilon D.
        """
        forward, backward = self.hidden(batch, along(epsilon)), self.hidden(batch, along(-epsilon))
        variance = divergence = 0.0
        with torch.no_grad(), self._head.weights() as weights:
            for z, up, down in self._chunks(weights, base, forward, backward):
                variance += float(rate_variance(z, (up - down) / (2 * epsilon), batch.temperature).sum())
                divergence += float(kl_divergence(z, up, batch.temperature).sum())
        return variance, divergence

    def variance_by_tangent(self, batch: ProbeBatch, along: Along) -> float:
        """The same by forward-mode AD: one pass for all targets, exact up to rounding.

        Args:
            along: within `along("jvp")` passes carry tangents along D.
        """
        total = 0.0
        captured, direction, looking = self._head.captured(), along("jvp"), _looking(self._model)
        with torch.no_grad(), fwAD.dual_level(), looking, _forward_ad(self._model), direction, captured as inputs:
            for group in self._run(batch):
                parts = (_at(batch, group, part) for part in fwAD.unpack_dual(inputs.pop()))
                with self._head.weights() as (weight, bias):
                    for h, t in zip(*(part.split(POSITIONS_AT_ONCE) for part in parts)):
                        z = self._head.logits(h, weight, bias)
                        total += float(rate_variance(z, self._head.rates(z, t, weight), batch.temperature).sum())
        return total

    def head(self) -> HeadWeights | None:
        """The head as it is now, for a later `divergence`; None where it does not change. A collective."""
        return self._head.copy()

    def divergence(
        self,
        batch: ProbeBatch,
        before: list[torch.Tensor],
        after: list[torch.Tensor],
        head_before: HeadWeights | None = None,
    ) -> float:
        """Sum over this rank's positions of the full-vocabulary KL between two passes, the second with the head as it
        is now, the first with `head_before` where that is given."""
        with torch.no_grad(), self._head.weights() as weights:
            on_device = [value if value is None else value.to(weights[0].device) for value in head_before or weights]
            old = self._chunks(on_device, before)
            return sum(
                float(kl_divergence(p, q, batch.temperature).sum())
                for (p,), (q,) in zip(old, self._chunks(weights, after))
            )

    def _run(self, batch: ProbeBatch) -> Iterator[list[int]]:
        """Make each pass of a batch, and give the responses that were in it."""
        for group in [*batch.passes(), *[[]] * batch.idle]:
            self._forward(self._padded([batch.sequences[index] for index in group]))
            yield group

    def _padded(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, L], or one token where there is none. The model is causal: what stands behind a sequence does not reach
        it."""
        one = torch.zeros(1, dtype=torch.int64, device=next(self._model.parameters()).device)
        return nn.utils.rnn.pad_sequence(list(sequences) or [one], batch_first=True)

    def _chunks(self, weights, *passes: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Logits of several times the same passes, at a few positions at a time."""
        for times in zip(*passes):
            for parts in zip(*(hidden.split(POSITIONS_AT_ONCE) for hidden in times)):
                yield [self._head.logits(part, *weights) for part in parts]


def _at(batch: ProbeBatch, group: list[int], values: torch.Tensor) -> torch.Tensor:
    """[n, d]: of values [B, L, d] of a pass those at the positions of its responses, one response after the other."""
    rows = [values[row, batch.positions[index]] for row, index in enumerate(group)]
    return torch.cat(rows) if rows else values[0, :0]


@contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    """For a while the model neither drops out nor checkpoints activations, and attends to whole sequences: flash
    attention, which has no derivative of a tangent and which the host may have taken over for a ring of ranks, makes
    way for a kernel that computes the same."""
    config, training = model.config.get_text_config(), [module for module in model.modules() if module.training]
    attention = config._attn_implementation
    model.eval()
    if "flash" in attention:
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
        config._attn_implementation = "eager" if capped or sinks else "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = attention
        for module in training:
            module.training = True


@contextmanager
def _forward_ad(model: nn.Module) -> Iterator[None]:
    """For a while forward-mode AD goes through the model: sdpa attention by its kernel that has it, and DeepSpeed's
    ZeRO-3 functions, which have none, out of the way (no backward pass follows, for which they are there)."""
    held = [
        (module, name, module.__dict__[name])
        for module in model.modules()
        for name in ("pre_bwd_fn", "post_bwd_fn")
        if name in module.__dict__
    ]
    linear = functional.linear
    for module, name, _ in held:
        setattr(module, name, _Identity)
    functional.linear = torch._C._nn.linear
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for module, name, function in held:
            setattr(module, name, function)
        functional.linear = linear


class _Identity:
    @staticmethod
    def apply(output):
        return output
