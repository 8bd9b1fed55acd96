"""Whether mlp's activation goes backward in cuBLASLt's GEMM, or in a pass behind torch's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from torchweld.dispatch import proof
from torchweld.dispatch.proof import Results
from torchweld.ops.activation import bias_act
from torchweld.ops.gemm import epilogue, timing
from torchweld.ops.gemm.epilogue import Made
from torchweld.ops.gemm.linear import trained
from torchweld.ops.gemm.timing import Contest, Timed

_Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


def choose(
    x: torch.Tensor,
    parameters: _Parameters,
    activation: str,
    approximate: str,
    make: Callable[[], Made],
) -> int | None:
    """cuBLASLt's algorithm; None: no gradient is wanted, or the other form is faster.

    It is chosen in the forward, which saves what is needed and no more: what `make` makes.
    """
    w1, b1, w2, _ = parameters
    if not trained(x, w1, b1) or _why_not(x, parameters) is not None:
        return None
    shapes, kind = _shapes(x, b1, w2), (activation, approximate)
    return epilogue.chosen(x, shapes, lambda: _time(shapes, make, w2, *kind))


def explain(x: torch.Tensor, parameters: _Parameters) -> str:
    """Which of the two runs, and why; nothing where no gradient is wanted."""
    w1, b1, w2, _ = parameters
    if not trained(x, w1, b1):
        return ""
    unfused = "torch's GEMM, then a pass for the gradients of bias and activation"
    return epilogue.in_words(unfused, x, _shapes(x, b1, w2), _why_not(x, parameters))


def _why_not(x: torch.Tensor, parameters: _Parameters) -> str | None:
    w1, b1, w2, b2 = parameters
    if reason := epilogue.why_not("cuda", x, w1, b1):
        return reason
    hidden = x.new_empty((), dtype=epilogue.computed_in(x)).expand(*x.shape[:-1], w1.shape[0])
    return epilogue.why_not("cuda", hidden, w2, b2)


def _shapes(x: torch.Tensor, b1: torch.Tensor | None, w2: torch.Tensor) -> str:
    """What a time depends on beside the number of rows, in words."""
    out, hidden = w2.shape
    dtype = str(epilogue.computed_in(x)).removeprefix("torch.")
    words = [f"backward of {hidden} to {out} {dtype}"]
    words += ["weight transposed"] if w2.stride(-1) != 1 else []
    need_bias = b1 is not None and b1.requires_grad
    return ", ".join([*words, "bias" if need_bias else "no bias"])


def _time(
    shapes: str, make: Callable[[], Made], weight: torch.Tensor, activation: str, approximate: str
) -> Timed | None:
    y, z, zeros = make()
    assert z is not None  # a gradient is wanted
    need_bias = zeros is not None and zeros.requires_grad
    how = (activation, approximate)
    names = ("grad_z", "grad_bias") if need_bias else ("grad_z",)
    in_a_pass = bias_act.OP.kernels[epilogue.PASSES["cuda"]].backward
    in_one = torch.ops.torchweld.act_linear_backward.cuda
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False), torch.cuda.device_of(y):
        weight = weight.to(y.dtype)
        grad = linear(y, weight)  # in its gradient's place
        (algorithm,) = epilogue.contenders("cuda", y.dtype, weight.shape[0])

        def unfused(grad: torch.Tensor, z: torch.Tensor) -> Results:
            return proof.named(in_a_pass(grad @ weight, z, zeros, *how, need_bias), *names)

        def fused(grad: torch.Tensor, z: torch.Tensor) -> Results:
            return proof.named(in_one(grad, weight, z, *how, algorithm, need_bias), *names)

        def exact(grad: torch.Tensor, z: torch.Tensor) -> Results:
            grad_y = epilogue.linear_in_float64(grad, weight.t(), None)
            grad_z = torch.ops.aten.gelu_backward(grad_y, z.double(), approximate=approximate)
            return proof.named((grad_z, grad_z.sum_to_size(z.shape[-1:])), *names)

        contest = Contest([grad, z], unfused, {algorithm: fused}, exact, unfused, weight.numel())
        return timing.time(y.device, shapes, epilogue.rows_of(y), contest)
