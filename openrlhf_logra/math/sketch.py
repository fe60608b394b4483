"""The sketch S = G A^T accumulated inside backward (docs/training.md); the full gradient G = g^T x never exists.

`sketch_linear` replaces a target's linear map. Forward computes x W^T + b and keeps only P = x A^T; backward returns g
W and adds g^T P to S.
"""

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_TOKENS_AT_ONCE = 8192  # bounds the float32 copies of activations and output gradients


class _SketchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, projected, sink):
        ctx.save_for_backward(projected)
        # A reference, not a saved tensor: under ZeRO-3 the storage is released after forward and gathered again before
        # backward, into the same Parameter.
        ctx.weight = weight
        ctx.sink = sink
        ctx.has_bias_grad = bias is not None and bias.requires_grad
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (projected,) = ctx.saved_tensors
        grad_input = grad_output @ ctx.weight if ctx.needs_input_grad[0] else None
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        ctx.sink.add(flat, projected)
        grad_bias = flat.sum(0) if ctx.has_bias_grad else None
        return grad_input, None, grad_bias, None, None


class SketchSink:
    """Where one target's backward adds its contribution.

    Attributes:
        value: S, float32 [d, r]; usually a view of the flat buffer of all targets.
        contributions: number of backward passes added since `clear`.
        closed: whether the update under way is being decided; until `clear`, adding to it is an error.
    """

    def __init__(self, value: torch.Tensor):
        self.value = value
        self.contributions = 0
        self.closed = False

    def add(self, grad_output: torch.Tensor, projected: torch.Tensor) -> None:
        """S += g^T P with float32 products and sums. grad_output [N, d] and projected [N, r], any float dtype."""
        if self.closed:
            raise RuntimeError(
                "LoGRA: a backward pass (of a callback?) while an update is being decided would change it"
            )
        for g, p in zip(grad_output.split(_TOKENS_AT_ONCE), projected.split(_TOKENS_AT_ONCE)):
            self.value.addmm_(g.float().t(), p.float())
        self.contributions += 1

    def clear(self) -> None:
        """Set S and the count to zero."""
        self.value.zero_()
        self.contributions = 0
        self.closed = False


def sketch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    projection: Callable[[], torch.Tensor] | None,
    sink: SketchSink,
) -> torch.Tensor:
    """x W^T + b; if a backward pass follows, sink.value gains G A^T of this call.

    Args:
        x: input [..., k].
        weight: W [d, k], not requiring grad.
        bias: [d] or None.
        projection: returns A [r, k] in float32; called only where a backward pass may follow. None is the identity: a
            sketch that is the full gradient.
        sink: receives the sketch, [d, r].

    Returns:
        Output [..., d], the same bits as `torch.nn.functional.linear`.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(x, weight, bias)
    x_only = x.detach()
    projected = x_only.reshape(-1, x.shape[-1]) if projection is None else project(x_only, projection())
    return _SketchLinear.apply(x, weight, bias, projected, sink)


def project(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """P = x A^T in float32: x [..., k], projection [r, k] -> [N, r]."""
    flat = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([part.float() @ projection.t() for part in flat.split(_TOKENS_AT_ONCE)])


class _GradAnchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor):
        ctx.anchor_shape, ctx.anchor_dtype = anchor.shape, anchor.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        zeros = torch.zeros(ctx.anchor_shape, dtype=ctx.anchor_dtype, device=grad_output.device)
        return (grad_output if ctx.needs_input_grad[0] else None), zeros


def grad_anchor(x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """x unchanged, but requiring grad through `anchor`, whose own gradient is always exactly zero.

    With every weight frozen, something upstream of the first target must require grad or autograd prunes the whole
    backward pass. The output does not depend on the anchor's value, so even a damaged anchor cannot reach the policy.
    """
    return _GradAnchor.apply(x, anchor)


def side_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    projection: torch.Tensor,
    coefficients: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """x (W + epsilon D)^T + b for the step direction D = -C A, without forming D: the side path of finite differences.

    Args:
        x: input [..., k].
        weight: W [d, k].
        projection: A [r, k], float32.
        coefficients: C = eta U [d, r], float32.

    Returns:
        Output [..., d] in the dtype of x W^T.
    """
    y = F.linear(x, weight, bias)
    side = project(x, projection) @ coefficients.t()
    return y.float().sub_(side.view(y.shape), alpha=epsilon).to(y.dtype)


def side_rate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    projection: torch.Tensor,
    coefficients: torch.Tensor,
) -> torch.Tensor:
    """The same linear at epsilon = 0 with its derivative along epsilon as tangent: forward-mode AD.

    Args:
        x: input, a dual tensor where something upstream has changed already.
    """
    primal, tangent = fwAD.unpack_dual(x)
    y = F.linear(primal, weight, bias)
    rate = -(project(primal, projection) @ coefficients.t()).view(y.shape)
    if tangent is not None:
        rate += F.linear(tangent, weight).float()
    return fwAD.make_dual(y, rate.to(y.dtype))
