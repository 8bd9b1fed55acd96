"""An activation and the following linear layer as one node, which saves z, the sum before both.

On the CPU only z is saved, and the backward pass recomputes the activation. On CUDA the activation
is saved as well. There one cuBLASLt GEMM computes the gradient of the layer and, in its epilogue,
that of the activation, if a trial found it faster than a GEMM and a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.dispatch.autograd import list_reached, make_unaliased
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.engine.judge import name_results
from torchweld.dispatch.engine.question import Results
from torchweld.ops.activation import bias_act
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, fused_choice, gemm
from torchweld.ops.gemm.fused_choice import Contest, Kind


def _fake(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    need_bias: bool,
) -> torch.Tensor:
    return x.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)


# Overwrites grad_y with grad_input; returns grad_bias.
BareOp(
    "bias_act_backward_",
    "(Tensor(a!) grad_y, Tensor input, Tensor? bias, str activation, str approximate, bool"
    " need_bias) -> Tensor",
    _fake,
)


def _fake_on_cuda(
    grad_y: torch.Tensor,
    weight: torch.Tensor,
    z: torch.Tensor,
    activation: str,
    approximate: str,
    algorithm: int,
    need_bias: bool,
) -> tuple[torch.Tensor, ...]:
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    return grad_z, z.new_empty(z.shape[-1] if need_bias else 0)


# The gradient of z, and its sum over the rows, which is the gradient of a bias in z.
BareOp(
    "act_linear_backward",
    "(Tensor grad_y, Tensor weight, Tensor z, str activation, str approximate, int algorithm,"
    " bool need_bias) -> (Tensor grad_z, Tensor grad_bias)",
    _fake_on_cuda,
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

    On CUDA `activated` is activation(z), where z already includes the bias, and `algorithm` is one
    of cuBLASLt's.
    """
    if torch.is_autocast_enabled(z.device.type):
        weight = weight.to(z.dtype)
        weight_bias = None if weight_bias is None else weight_bias.to(z.dtype)
    kind = (activation, approximate)
    return _ActLinear.apply(z, bias, weight, weight_bias, activated, algorithm, *kind)


class _ActLinear(torch.autograd.Function):
    """On the CPU, save z but not the activation: it is as large, and recomputing it is one pass.

    The backward pass allocates one more tensor of that size. On the CPU it holds the activation,
    then the activation's gradient, then z's; on CUDA only the gradient of z.
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
        return make_unaliased(gemm.linear(activated, weight, weight_bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _derivatives(ctx, grad)
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


_activate = torch.ops.torchweld.bias_act.cpu


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients that this run of the graph needs."""
    z, bias, weight, _, activated = ctx.saved_tensors
    to_z, to_bias, to_weight, to_weight_bias, *_ = goes_on = list_reached(ctx)
    gradients: list[torch.Tensor | None] = [None] * len(goes_on)
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    size = (rows.shape[0], z.shape[-1])
    buffer = None
    if to_weight:
        if activated is None:
            activated = buffer = _activate(z, bias, *ctx.kind)
        gradients[2] = gemm.weight_gradient(rows, activated.view(size))
    if to_weight_bias:
        gradients[3] = rows.sum(0)
    if to_bias and not to_z and ctx.late is not None and ctx.late[0] is grad:
        gradients[1] = ctx.late[1]  # from the run that needed z
    elif to_z or to_bias:
        need_bias = ctx.needs_input_grad[1]
        if ctx.algorithm is None:
            grad_z, grad_bias = _unfused(rows, z, bias, weight, ctx.kind, need_bias, buffer)
        else:
            in_one = torch.ops.torchweld.act_linear_backward.cuda
            grad_z, grad_bias = in_one(grad, weight, z, *ctx.kind, ctx.algorithm, need_bias)
        gradients[0], gradients[1] = grad_z, grad_bias if to_bias else None
        if need_bias and not to_bias and torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.late = (grad, grad_bias)
    return tuple(gradients)


def _unfused(
    rows: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    kind: Sequence[str],
    need_bias: bool,
    buffer: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of z and the bias by a GEMM and a pass, in the buffer if there is one."""
    if _is_batched(rows):  # vmap does not support out= and in-place results
        grad_y = (rows @ weight).view(z.shape)
        return torch.ops.torchweld.bias_act_backward.cpu(grad_y, z, bias, *kind, need_bias)
    grad_z = z.new_empty(z.shape) if buffer is None else buffer
    torch.mm(rows, weight, out=grad_z.view(rows.shape[0], z.shape[-1]))
    in_place = torch.ops.torchweld.bias_act_backward_.cpu
    return grad_z, in_place(grad_z, z, bias, *kind, need_bias)


def _is_batched(x: torch.Tensor) -> bool:
    """Whether vmap runs on x: torch.func's, or that of batched gradients."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def _derivatives(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Differentiable gradients, for second derivatives."""
    z, bias, *factors = saved = ctx.saved_tensors[:4]
    if ctx.algorithm is not None:
        bias = layers.make_zeros_with_graph(bias)
    y = linear(bias_act.OP.reference(z, bias, *ctx.kind), *factors)
    needs = [at for at, need in enumerate(ctx.needs_input_grad) if need]
    wanted = torch.autograd.grad(y, [saved[at] for at in needs], grad, create_graph=True)
    by_position = dict(zip(needs, wanted, strict=True))
    return tuple([by_position.get(at) for at in range(len(ctx.needs_input_grad))])


# --- Choice ---------------------------------------------------------------------------------------
# The choice is made in the forward pass, which saves only the tensors of the chosen backward pass.


def choose_algorithm(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> int | None:
    """cuBLASLt's algorithm for the gradient of z = linear(x, w1, b1).

    None: z needs no gradient, or torch's GEMM and a pass are faster.
    """
    tensors = (x, w1, b1, w2, b2)
    if not gemm.wants_gradient(x, w1, b1) or _why_not(*tensors) is not None:
        return None

    def contest() -> Contest:
        return _make_contest(*tensors, activation, approximate)

    def algorithms() -> Sequence[int]:
        return [epilogue.cublaslts_algorithm(gemm.find_dtype(x))]

    return fused_choice.choose_tile(x, _kind(x, b1, w2), algorithms, contest)


def explain(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
) -> str:
    """Which form of the backward pass runs, and why; empty if no gradient is needed."""
    if not gemm.wants_gradient(x, w1, b1):
        return ""
    unfused = "torch's GEMM, then a pass for the gradients of bias and activation"
    return fused_choice.explain(unfused, x, _kind(x, b1, w2), _why_not(x, w1, b1, w2, b2))


def _why_not(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
) -> str | None:
    if reason := epilogue.why_not("cuda", x, w1, b1):
        return reason
    hidden = x.new_empty((), dtype=gemm.find_dtype(x)).expand(*x.shape[:-1], w1.shape[0])
    return epilogue.why_not("cuda", hidden, w2, b2)


def _kind(x: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor) -> Kind:
    """Everything that a timing depends on besides the number of rows."""
    out, hidden = w2.shape
    return (
        ("op", "act_linear's backward in one kernel by cuda"),
        ("dtype", str(gemm.find_dtype(x)).removeprefix("torch.")),
        ("features", f"{hidden} to {out}"),
        ("weight transposed", w2.stride(-1) != 1),
        ("bias", b1 is not None and b1.requires_grad),
    )


def _make_contest(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> Contest:
    """cuBLASLt's GEMM against torch's GEMM and a pass, on the results of this forward."""
    dtype, need_bias = gemm.find_dtype(x), b1 is not None and b1.requires_grad
    x, w1, weight = (t.detach().to(dtype) for t in (x, w1, w2))
    b1 = None if b1 is None else b1.detach().to(dtype)
    how = (activation, approximate)
    names = ("grad_z", "grad_bias") if need_bias else ("grad_z",)
    in_one = torch.ops.torchweld.act_linear_backward.cuda
    algorithm = epilogue.cublaslts_algorithm(dtype)
    with torch.autocast(x.device.type, enabled=False):
        z = linear(x, w1, b1)
        grad = linear(activations.ACTIVATIONS[how].function(z), weight)  # any values will do

    def unfused(grad: torch.Tensor, z: torch.Tensor) -> Results:
        return name_results(epilogue.gradients(grad @ weight, z, b1, *how, need_bias), *names)

    def fused(grad: torch.Tensor, z: torch.Tensor) -> Results:
        return name_results(in_one(grad, weight, z, *how, algorithm, need_bias), *names)

    def exact(grad: torch.Tensor, z: torch.Tensor) -> Results:
        grad_y = epilogue.linear_in_float64(grad, weight.t(), None)
        grad_z = torch.ops.aten.gelu_backward(grad_y, z.double(), approximate=approximate)
        return name_results((grad_z, grad_z.sum_to_size(z.shape[-1:])), *names)

    return Contest([grad, z], unfused, {algorithm: fused}, exact, unfused, weight.numel())
