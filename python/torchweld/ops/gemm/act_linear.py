"""An activation and the following linear layer as one node, which saves z, the sum before both.

On the CPU only z is saved, and the backward recomputes the activation. On CUDA the activation is
saved as well. There one cuBLASLt GEMM takes the gradient back through the layer and, in its
epilogue, through the activation, if a trial found it faster than a GEMM and a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.dispatch import proof
from torchweld.dispatch.autograd import unaliased, where_it_goes
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.proof import Results
from torchweld.ops.activation import bias_act
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gemm, timing
from torchweld.ops.gemm.timing import Contest


def _fake(grad_y, x, bias, activation, approximate, need_bias):
    return x.new_empty(0) if bias is None or not need_bias else torch.empty_like(bias)


# Overwrites grad_y with grad_x; returns grad_bias.
BareOp(
    "bias_act_backward_",
    "(Tensor(a!) grad_y, Tensor x, Tensor? bias, str activation, str approximate, bool need_bias)"
    " -> Tensor",
    _fake,
)


def _fake_on_cuda(grad_y, weight, z, activation, approximate, algorithm, need_bias):
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

    The backward allocates one more tensor of that size. It holds the activation, then the
    activation's gradient, then z's. On CUDA it holds only the gradient of z.
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
        return unaliased(gemm.linear(activated, weight, weight_bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _derivatives(ctx, grad)
        with torch.autocast(grad.device.type, enabled=False):
            return _gradients(ctx, grad)


_activate = torch.ops.torchweld.bias_act.cpu


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Which gradients this run of the graph needs."""
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
        found[1] = ctx.late[1]  # from the run that needed z
    elif to_z or to_bias:
        need_bias = ctx.needs_input_grad[1]
        if ctx.algorithm is None:
            grad_z, grad_bias = _unfused(rows, z, bias, weight, ctx.kind, need_bias, buffer)
        else:
            in_one = torch.ops.torchweld.act_linear_backward.cuda
            grad_z, grad_bias = in_one(grad, weight, z, *ctx.kind, ctx.algorithm, need_bias)
        found[0], found[1] = grad_z, grad_bias if to_bias else None
        if need_bias and not to_bias and torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.late = (grad, grad_bias)
    return tuple(found)


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
    if _is_batched(rows):  # vmap knows no results in place
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
    """The gradients with a graph of their own."""
    z, bias, *factors = saved = ctx.saved_tensors[:4]
    if ctx.algorithm is not None:
        bias = layers.zeros_with_graph(bias)
    y = linear(bias_act.OP.reference(z, bias, *ctx.kind), *factors)
    needs = [at for at, need in enumerate(ctx.needs_input_grad) if need]
    wanted = torch.autograd.grad(y, [saved[at] for at in needs], grad, create_graph=True)
    found = dict(zip(needs, wanted, strict=True))
    return tuple([found.get(at) for at in range(len(ctx.needs_input_grad))])


# --- Choice ---------------------------------------------------------------------------------------
# The forward chooses, so that it saves only what the chosen backward needs.


def algorithm_for(
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
    given = (x, w1, b1, w2, b2)
    if not gemm.wants_gradient(x, w1, b1) or _why_not(*given) is not None:
        return None

    def contest() -> Contest:
        return _contest(*given, activation, approximate)

    return timing.fastest(x, _shapes(x, b1, w2), contest)


def explain(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
) -> str:
    """Which form of the backward runs, and why; empty if no gradient is needed."""
    if not gemm.wants_gradient(x, w1, b1):
        return ""
    unfused = "torch's GEMM, then a pass for the gradients of bias and activation"
    return timing.explain(unfused, x, _shapes(x, b1, w2), _why_not(x, w1, b1, w2, b2))


def _why_not(x, w1, b1, w2, b2) -> str | None:
    if reason := epilogue.why_not("cuda", x, w1, b1):
        return reason
    hidden = x.new_empty((), dtype=gemm.computed_in(x)).expand(*x.shape[:-1], w1.shape[0])
    return epilogue.why_not("cuda", hidden, w2, b2)


def _shapes(x: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor) -> str:
    """What a timing depends on besides the number of rows, in words."""
    out, hidden = w2.shape
    dtype = str(gemm.computed_in(x)).removeprefix("torch.")
    words = [f"backward of {hidden} to {out} {dtype}"]
    words += ["weight transposed"] if w2.stride(-1) != 1 else []
    need_bias = b1 is not None and b1.requires_grad
    return ", ".join([*words, "bias" if need_bias else "no bias"])


def _contest(x, w1, b1, w2, b2, activation, approximate) -> Contest:
    """cuBLASLt's GEMM against torch's and a pass, on the forward's results for these."""
    dtype, need_bias = gemm.computed_in(x), b1 is not None and b1.requires_grad
    x, w1, weight = (t.detach().to(dtype) for t in (x, w1, w2))
    b1 = None if b1 is None else b1.detach().to(dtype)
    how = (activation, approximate)
    names = ("grad_z", "grad_bias") if need_bias else ("grad_z",)
    in_one = torch.ops.torchweld.act_linear_backward.cuda
    algorithm = epilogue.cublaslts_algorithm(dtype)
    with torch.autocast(x.device.type, enabled=False):
        z = linear(x, w1, b1)
        grad = linear(activations.ACTIVATIONS[how].function(z), weight)  # instead of y's gradient

    def unfused(grad: torch.Tensor, z: torch.Tensor) -> Results:
        return proof.named(epilogue.gradients(grad @ weight, z, b1, *how, need_bias), *names)

    def fused(grad: torch.Tensor, z: torch.Tensor) -> Results:
        return proof.named(in_one(grad, weight, z, *how, algorithm, need_bias), *names)

    def exact(grad: torch.Tensor, z: torch.Tensor) -> Results:
        grad_y = epilogue.linear_in_float64(grad, weight.t(), None)
        grad_z = torch.ops.aten.gelu_backward(grad_y, z.double(), approximate=approximate)
        return proof.named((grad_z, grad_z.sum_to_size(z.shape[-1:])), *names)

    return Contest([grad, z], unfused, {algorithm: fused}, exact, unfused, weight.numel())
