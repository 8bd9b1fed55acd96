"""softmax_dropout: scale, mask, softmax and dropout in one pass.

    softmax_dropout(x) = dropout(softmax(scale * x + mask))

Read on in: csrc/core/softmax.h, csrc/cpu/softmax.cpp, csrc/bind/softmax.cpp,
triton_kernels/softmax.py, bench/cases/softmax.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld import checks
from torchweld.dispatch.autograd import exports_a_derivative
from torchweld.dispatch.call import call, decide
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.random import Shard, draw_seed, drop, split_shard
from torchweld.registry import ROWS, SEED, Op, activation, constant, why_not_now
from torchweld.registry.cost import count_per_element


@short()
def softmax_dropout(
    input: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """dropout(softmax(input * scale + mask), p) over the last dimension.

    A fully masked row gives zeros, and zero gradients.

    Args:
        input: [*, keys] or [*, queries, keys]; float32, bfloat16, float16 (or float64).
        mask: broadcasts to input. If boolean, True takes part, as in
            torch.nn.functional.scaled_dot_product_attention. Otherwise it is added; it has input's
            dtype, or float32 for 16-bit input, and gets a gradient if it requires one.
        scale: factor of input; representable in float32, or float64 for float64 input.
        causal: the last query sees every key, and each earlier query sees one key fewer.
        p: probability that an element is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of input in a larger tensor, sharded only in leading dimensions, since a
            softmax needs whole rows.

    Returns:
        A tensor of input's shape and dtype.
    """
    inputs = _inputs(input, mask, scale, causal, p, training, seed, shard)
    if isinstance(mask, Tensor) and mask.requires_grad and torch.is_grad_enabled():
        return _with_gradient_of_mask(*inputs)
    return decide(OP, *inputs)


def _inputs(
    input: Any, mask: Any, scale: Any, causal: Any, p: Any, training: Any, seed: Any, shard: Any
) -> tuple[Any, ...]:
    p, seed = draw_seed("softmax_dropout", "input", input, p, training, seed)
    checks.factor("softmax_dropout", "scale", scale, getattr(input, "dtype", None))
    return input, mask, float(scale), causal, p, seed, *split_shard(shard)


def _with_gradient_of_mask(scores: Tensor, mask: Tensor, scale: float, *rest: Any) -> Tensor:
    """Run the op with a mask that needs a gradient, the same as the scaled scores' gradient.

    The kernels do not compute it. The scale is applied beforehand, since its product with a
    gradient may underflow. The gradient of a float32 mask is summed from float32 gradients.
    """
    _check(scores, mask, scale, *rest)
    z = scores
    if scale != 1 or mask.dtype is not scores.dtype:
        wide = torch.promote_types(scores.dtype, torch.float32)
        z, mask = scores.to(wide) * scale, mask.to(wide)
    if exports_a_derivative() or why_not_now():
        y = OP.reference(z, mask, 1.0, *rest)
    else:
        y = call(OP, _GradientOfMask.apply(z, mask), mask.detach(), 1.0, *rest)
    kind = scores.device.type
    widened = kind in OP.autocast and checks.autocasts(kind)
    return y if widened or y.dtype is scores.dtype else y.to(scores.dtype)


class _GradientOfMask(torch.autograd.Function):
    """Returns the scores unchanged; the mask gets the sum of their gradient over its broadcast."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask.shape, mask.dtype, getattr(mask, "placements", None)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (shape, dtype, placements) = grads, ctx.mask
        if not ctx.needs_input_grad[1]:
            return grad, None
        missing = grad.ndim - len(shape)
        dims = [dim for dim in range(grad.ndim) if dim < missing or shape[dim - missing] == 1]
        kind = torch.promote_types(dtype, torch.float32)
        grad_mask = (grad.sum(dims, keepdim=True, dtype=kind) if dims else grad).to(dtype)
        if placements is not None:  # the sum of a DTensor over a sharded dimension is partial
            grad_mask = grad_mask.redistribute(placements=placements)
        return grad, grad_mask.view(shape)


Place = Sequence[int] | None  # sizes of the whole tensor, or offsets in it


def add_mask(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, whole: Place, offset: Place
) -> Tensor:
    """The softmax's argument: scaled scores plus the mask."""
    z = scores if scale == 1 else scores * scale
    if mask is not None and mask.dtype == torch.bool:
        z = z.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        z = z + mask
    if causal:
        z = z.masked_fill(~_visible(scores, whole, offset), -torch.inf)
    return z


def _visible(scores: Tensor, whole: Place, offset: Place) -> Tensor:
    queries, keys = scores.shape[-2:] if scores.ndim > 1 else (1, scores.shape[-1])
    first, all_queries = 0, queries
    if whole and offset and scores.ndim > 1:
        first, all_queries = offset[-2], whole[-2]
    query = torch.arange(queries, device=scores.device)[:, None] + first
    visible = torch.arange(keys, device=scores.device) <= query + (keys - all_queries)
    return visible if scores.ndim > 1 else visible[0]


def softmax(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, whole: Place, offset: Place
) -> Tensor:
    """Softmax with zeros in fully masked rows, where torch's has NaN."""
    z = add_mask(scores, mask, scale, causal, whole, offset)
    if mask is None and not causal:
        return torch.softmax(z, -1)
    blank = (z == -torch.inf).all(-1, keepdim=True)
    result = torch.softmax(z.masked_fill(blank, 0), -1).masked_fill(blank, 0)
    return result if z.dtype == scores.dtype else result.to(scores.dtype)


def _reference(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: Tensor | None,
    *place: Any,
) -> Tensor:
    bare = mask is None and seed is None and not causal and not place[0]
    if bare and scores.ndim and scores.dtype in OP.dtypes:
        return torch.softmax(scores if scale == 1 else scores * scale, -1)
    _check(scores, mask, scale, causal, p, seed, *place)  # torch would accept more
    return drop(softmax(scores, mask, scale, causal, *place), p, seed, *place)


def _backward_reference(
    grad_y: Tensor, y: Tensor, scores: Tensor, statistics: Tensor, mask: Any, *rest: Any
) -> Tensor:
    scale, causal, p, seed, *place = rest
    if seed is not None:
        y = softmax(scores, mask, scale, causal, *place)
        grad_y = drop(grad_y, p, seed, *place)
    return y * (grad_y - (y * grad_y).sum(-1, keepdim=True)) * scale


def _unsaved(*inputs: Any) -> tuple[str, ...]:
    """Save only the result if nothing is dropped: the product with the values saves it anyway."""
    return ("y",) if OP.draws(inputs) else ("input", "statistics", "mask")


def _check(
    scores: Any, mask: Any, scale: Any, causal: Any, p: Any, seed: Any, whole: Any, offset: Any
) -> None:
    name = OP.name
    checks.dense(name, "input", scores, OP.dtypes)
    if scores.ndim == 0:
        raise ArgumentError(name, "input", "0-dimensional", "at least one")
    if mask is not None:
        wide = [torch.float32] if scores.dtype.itemsize == 2 else []
        checks.dense(name, "mask", mask, [torch.bool, scores.dtype, *wide], "input")
        checks.like(name, "mask", mask, scores, "input")
        checks.broadcasts(name, "mask", mask, scores, "input")
    checks.dropout(name, "input", scores, seed, whole, offset)
    if whole and whole[-1] != scores.shape[-1]:
        accepted = f"whole rows: {scores.shape[-1]} columns"
        raise ArgumentError(name, "shard", f"of sizes {whole}", accepted)


def _fake(scores: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    kind = torch.float64 if scores.dtype == torch.float64 else torch.float32
    statistics = [*scores.shape[:-1], 2] if OP.draws((scores, *rest)) else [0]
    y = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return y, scores.new_empty(statistics, dtype=kind)


def _size(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    return activation(*leading, *row), constant(*row), 0.7, False, 0.1, SEED, [], []


OP = Op(
    name="softmax_dropout",
    forward="(Tensor input, Tensor? mask, float scale, bool causal, float p, Tensor? seed,"
    " SymInt[]? whole, SymInt[]? offset) -> (Tensor y, Tensor statistics)",
    backward="(Tensor grad_y, Tensor? y, Tensor? input, Tensor? statistics, Tensor? mask,"
    " float scale, bool causal, float p, Tensor? seed, SymInt[]? whole, SymInt[]? offset)"
    " -> Tensor grad_input",
    inputs=_inputs,
    reference=_reference,
    backward_reference=_backward_reference,
    unsaved=_unsaved,
    check=_check,
    fake=_fake,
    sharding=ROWS,
    sized=_size,
    flops=count_per_element(20, 10),
    sources={
        "cpu": ("csrc/cpu/softmax.cpp",),
        "triton": ("triton_kernels/softmax.py",),
    },
    eager_rounds=True,
    autocast={"cuda": torch.float32},
)
define(OP)
