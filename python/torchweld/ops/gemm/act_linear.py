"""An activation and the linear layer behind it, of which the sum before the activation is saved.

On the CPU that alone, and the activation is computed again in the backward. On CUDA the activation
as well; the backward's first GEMM is cuBLASLt's, whose epilogue is the activation's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.dispatch.autograd import where_it_goes
from torchweld.dispatch.bare import BareOp
from torchweld.ops.activation import bias_act
from torchweld.ops.gemm import linear as gemm


def _fake(grad_y, x, bias, activation, approximate, need_bias):
    return x.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)


# grad_x in grad_y's place; returns grad_bias.
BareOp(
    "bias_act_backward_",
    "(Tensor(a!) grad_y, Tensor x, Tensor? bias, str activation, str approximate, bool need_bias)"
    " -> Tensor",
    _fake,
)


def _fake_in_one(grad_y, weight, z, activation, approximate, algorithm, need_bias):
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    return grad_z, z.new_empty(z.shape[-1] if need_bias else 0)


# The gradient of z, and its sum over rows, that of a bias in it.
BareOp(
    "act_linear_backward",
    "(Tensor grad_y, Tensor weight, Tensor z, str activation, str approximate, int algorithm,"
    " bool need_bias) -> (Tensor grad_z, Tensor grad_bias)",
    _fake_in_one,
    backends=("cuda",),
)


def act_linear(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    weight_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    activated: torch.Tensor | None = None,
    algorithm: int | None = None,
) -> torch.Tensor:
    """linear(activation(z + bias), weight, weight_bias).

    On CUDA, where `activated` is activation(z), the bias is zeros that a gradient is wanted of, and
    `algorithm` is one of cuBLASLt's.
    """
    if torch.is_autocast_enabled(z.device.type):
        weight = weight.to(z.dtype)
        weight_bias = None if weight_bias is None else weight_bias.to(z.dtype)
    kind = (activation, approximate)
    return _ActLinear.apply(z, bias, weight, weight_bias, activated, algorithm, *kind)


class _ActLinear(torch.autograd.Function):
    """On the CPU it saves z, whose activation is a pass, and not that, which is as large.

    In its backward there is one tensor more of that size: the activation, then, in its place, its
    gradient, then that of z. On CUDA the one more is the gradient of z.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Any, bias: Any, weight: Any, weight_bias: Any, activated: Any, *how: Any
    ) -> Any:
        ctx.save_for_backward(z, bias, weight, weight_bias, activated)
        ctx.algorithm, *ctx.kind = how
        ctx.late = None
        if activated is None:
            activated = _activate(z, bias, *ctx.kind)
        return gemm.linear(activated, weight, weight_bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _derivatives(ctx, grad)
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


_activate = torch.ops.torchweld.bias_act.cpu


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Those of them that this run of the graph goes on to."""
    z, bias, weight, _, activated = ctx.saved_tensors
    to_z, to_bias, to_weight, to_weight_bias, *_ = goes_on = where_it_goes(ctx)
    found: list[torch.Tensor | None] = [None] * len(goes_on)
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    size = (rows.shape[0], z.shape[-1])
    buffer = None
    if to_weight:
        if activated is None:
            activated = buffer = _activate(z, bias, *ctx.kind)
        found[2] = gemm.weight_gradient(rows, activated.view(size))
    if to_weight_bias:
        found[3] = rows.sum(0)
    if to_bias and not to_z and ctx.late is not None and ctx.late[0] is grad:
        found[1] = ctx.late[1]  # from the run that went on to z
    elif to_z or to_bias:
        need_bias = ctx.needs_input_grad[1]
        if ctx.algorithm is None:
            grad_z = z.new_empty(z.shape) if buffer is None else buffer
            torch.mm(rows, weight, out=grad_z.view(size))
            in_place = torch.ops.torchweld.bias_act_backward_.cpu
            grad_bias = in_place(grad_z, z, bias, *ctx.kind, need_bias)
        else:
            in_one = torch.ops.torchweld.act_linear_backward.cuda
            grad_z, grad_bias = in_one(grad, weight, z, *ctx.kind, ctx.algorithm, need_bias)
        found[0], found[1] = grad_z, grad_bias if to_bias else None
        if need_bias and not to_bias and torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.late = (grad, grad_bias)
    return tuple(found)


def _derivatives(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The same with a graph of their own."""
    z, bias, *factors = saved = ctx.saved_tensors[:4]
    y = linear(bias_act.OP.reference(z, bias, *ctx.kind), *factors)
    needs = [at for at, need in enumerate(ctx.needs_input_grad) if need]
    wanted = torch.autograd.grad(y, [saved[at] for at in needs], grad, create_graph=True)
    found = dict(zip(needs, wanted, strict=True))
    return tuple([found.get(at) for at in range(len(ctx.needs_input_grad))])
