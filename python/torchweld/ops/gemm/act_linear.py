"""An activation and the following linear layer as one node, which saves z, the sum before both.

It is for the CPU. Only z is saved, and the backward pass recomputes the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import state
from torchweld.dispatch.autograd import (
    carrying_tangents,
    differentiate,
    find_left_over,
    is_one_of_several,
    leave_over,
    list_reached,
    list_wanted,
    make_unaliased,
    make_views,
)
from torchweld.dispatch.bare import BareOp
from torchweld.ops.activation import BIAS_ACT
from torchweld.ops.gemm import gemm, product


def _fake(_: Any, x: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    *_, need_bias = rest
    return x.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)


# Overwrites grad_y with grad_input; returns grad_bias.
_backward_ = BareOp(
    "bias_act_backward_",
    "(Tensor(a!) grad_y, Tensor input, Tensor? bias, str activation, str approximate, bool"
    " need_bias) -> Tensor",
    _fake,
).overload("cpu")


def act_linear(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    weight_bias: torch.Tensor | None,
    *kind: str,
) -> torch.Tensor:
    """linear(activation(z + bias), weight, weight_bias)."""
    if torch.is_autocast_enabled(z.device.type):
        weight = weight.to(z.dtype)
        weight_bias = None if weight_bias is None else weight_bias.to(z.dtype)
    return _ActLinear.apply(z, bias, weight, weight_bias, *kind)


class _ActLinear(torch.autograd.Function):
    """Save z but not the activation: it is as large, and recomputing it is one pass.

    The backward pass allocates one more tensor of that size, which holds the activation, then the
    activation's gradient, then z's.
    """

    @staticmethod
    def forward(ctx: Any, z: Any, bias: Any, weight: Any, weight_bias: Any, *kind: str) -> Any:
        ctx.save_for_backward(z, bias, weight, weight_bias)
        ctx.kind, ctx.late = kind, None
        return make_unaliased(gemm.linear(_activate(z, bias, *kind), weight, weight_bias))

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not state.is_compiling():
            return _derivatives(ctx, grad)
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


_activate = torch.ops.torchweld.bias_act.cpu


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients that this run of the graph needs."""
    z, bias, weight, _ = ctx.saved_tensors
    to_z, to_bias, to_weight, to_weight_bias, *_ = goes_on = list_reached(ctx)
    gradients: list[torch.Tensor | None] = [None] * len(goes_on)
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    size = (rows.shape[0], z.shape[-1])
    is_one, buffer = is_one_of_several(ctx), None
    if to_weight:
        buffer = _activate(z, bias, *ctx.kind)
        gradients[2] = gemm.weight_gradient(rows, buffer.view(size))
    if to_weight_bias:
        gradients[3] = rows.sum(0)
    if to_bias and not to_z and is_one and (late := find_left_over(ctx, (grad,))):
        gradients[1] = late[1]  # from the run that needed z
    elif to_z or to_bias:
        need_bias = list_wanted(ctx)[1] if is_one else to_bias
        grad_z, grad_bias = _gradient_of_z(rows, z, bias, weight, ctx.kind, need_bias, buffer)
        gradients[0], gradients[1] = grad_z, grad_bias if to_bias else None
        if is_one:
            leave_over(ctx, (grad,), [None, grad_bias if need_bias else None])
    return tuple(gradients)


def _gradient_of_z(
    rows: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    kind: Sequence[str],
    need_bias: bool,
    buffer: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of z and the bias by a GEMM and a pass, in the buffer if there is one."""
    if state.is_batched(rows):  # vmap does not support out= and in-place results
        grad_y = (rows @ weight).view(z.shape)
        return torch.ops.torchweld.bias_act_backward.cpu(grad_y, z, bias, *kind, need_bias)
    grad_z = z.new_empty(z.shape) if buffer is None else buffer
    product.multiply_into(grad_z.view(rows.shape[0], z.shape[-1]), rows, weight)
    return grad_z, _backward_(grad_z, z, bias, *kind, need_bias)


def _derivatives(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Differentiable gradients, for second derivatives."""
    z, bias, *factors = saved = make_views(ctx.saved_tensors)
    y = linear(BIAS_ACT.reference(z, bias, *ctx.kind), *factors)
    return (*differentiate([y], saved, [grad]), None, None)
