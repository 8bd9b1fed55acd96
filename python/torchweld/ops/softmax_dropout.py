"""softmax_dropout: scale, mask, softmax and dropout in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import exports_a_derivative
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.random import Shard, draw_seed, drop, split_shard
from torchweld.registry import (
    ROWS,
    SEED,
    Cases,
    Numerics,
    Op,
    activation,
    boolean,
    constant,
    why_not_now,
)
from torchweld.registry.cost import count_per_element


@short()
def softmax_dropout(
    input: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
    """dropout(softmax(input * scale + mask), p) over the last dimension.

    A fully masked row gives zeros, and zero gradients.

    Args:
        input: [*, keys] or [*, queries, keys]; float32, bfloat16, float16 (or float64).
        mask: broadcasts to input. If boolean, True takes part, as in
            torch.nn.functional.scaled_dot_product_attention. Otherwise it is added; it has input's
            dtype, or float32 for 16-bit input, and gets a gradient if it requires one.
        scale: factor of input; representable in float32, or float64 for float64 input.
        causal: the last query sees every key, each one before it one key less.
        p: probability that an element is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of input in a larger tensor, sharded only in leading dimensions, since a
            softmax needs whole rows.

    Returns:
        A tensor of input's shape and dtype.
    """
    inputs = _inputs(input, mask, scale, causal, p, training, seed, shard)
    if isinstance(mask, torch.Tensor) and mask.requires_grad and torch.is_grad_enabled():
        return _with_gradient_of_mask(*inputs)
    return call(OP, *inputs)


def _inputs(
    input: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    training: bool,
    seed: torch.Tensor | int | None,
    shard: Shard | None,
) -> tuple[Any, ...]:
    p, seed = draw_seed("softmax_dropout", "input", input, p, training, seed)
    checks.factor("softmax_dropout", "scale", scale, getattr(input, "dtype", None))
    return input, mask, float(scale), causal, p, seed, *split_shard(shard)


def _with_gradient_of_mask(
    scores: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    """Run the op with a mask that needs a gradient, the same as the scaled scores' gradient.

    The kernels do not compute it. The scale is applied beforehand, since its product with a
    gradient may underflow. The gradient of a float32 mask is summed from float32 gradients.
    """
    _check(scores, mask, scale, causal, p, seed, whole, offset)
    rest = (1.0, causal, p, seed, whole, offset)
    z = scores
    if scale != 1 or mask.dtype is not scores.dtype:
        wide = torch.promote_types(scores.dtype, torch.float32)
        z, mask = scores.to(wide) * scale, mask.to(wide)
    if exports_a_derivative() or why_not_now():
        y = OP.reference(z, mask, *rest)
    else:
        y = call(OP, _GradientOfMask.apply(z, mask), mask.detach(), *rest)
    kind = scores.device.type
    widened = kind in OP.autocast and checks.autocasts(kind)
    return y if widened or y.dtype is scores.dtype else y.to(scores.dtype)


class _GradientOfMask(torch.autograd.Function):
    """Returns the scores unchanged; the mask gets the sum of their gradient over its broadcast."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
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


def _mask(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    """The softmax's argument: scaled scores plus the mask."""
    z = scores if scale == 1 else scores * scale
    if mask is not None and mask.dtype == torch.bool:
        z = z.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        z = z + mask
    if causal:
        z = z.masked_fill(~_visible(scores, whole, offset), -torch.inf)
    return z


def _visible(
    scores: torch.Tensor, whole: Sequence[int] | None, offset: Sequence[int] | None
) -> torch.Tensor:
    queries, keys = scores.shape[-2:] if scores.ndim > 1 else (1, scores.shape[-1])
    first, all_queries = 0, queries
    if whole and offset and scores.ndim > 1:
        first, all_queries = offset[-2], whole[-2]
    query = torch.arange(queries, device=scores.device)[:, None] + first
    visible = torch.arange(keys, device=scores.device) <= query + (keys - all_queries)
    return visible if scores.ndim > 1 else visible[0]


def _softmax(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    """Softmax with zeros in fully masked rows, where torch's has NaN."""
    z = _mask(scores, mask, scale, causal, whole, offset)
    if mask is None and not causal:
        return torch.softmax(z, -1)
    blank = (z == -torch.inf).all(-1, keepdim=True)
    result = torch.softmax(z.masked_fill(blank, 0), -1).masked_fill(blank, 0)
    return result if z.dtype == scores.dtype else result.to(scores.dtype)


def _reference(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    bare = mask is None and seed is None and not causal and not whole
    if bare and scores.ndim and scores.dtype in OP.dtypes:
        return torch.softmax(scores if scale == 1 else scores * scale, -1)
    _check(scores, mask, scale, causal, p, seed, whole, offset)  # torch would accept more
    y = _softmax(scores, mask, scale, causal, whole, offset)
    return drop(y, p, seed, whole, offset)


def _plain(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    y = torch.softmax(_mask(scores, mask, scale, causal, whole, offset), -1)
    return torch.nn.functional.dropout(y, p) if seed is not None else y


def _backward_reference(
    grad_y: torch.Tensor,
    y: torch.Tensor,
    scores: torch.Tensor,
    statistics: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    if seed is not None:
        y = _softmax(scores, mask, scale, causal, whole, offset)
        grad_y = drop(grad_y, p, seed, whole, offset)
    return y * (grad_y - (y * grad_y).sum(-1, keepdim=True)) * scale


def _unsaved(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> Collection[str]:
    """Save only the result if nothing is dropped: the product with the values saves it anyway."""
    return ("input", "statistics", "mask") if seed is None else ("y",)


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


def _fake(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> tuple[torch.Tensor, ...]:
    kind = torch.float64 if scores.dtype == torch.float64 else torch.float32
    statistics = [*scores.shape[:-1], 2] if seed is not None else [0]
    y = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return y, scores.new_empty(statistics, dtype=kind)


def _terms(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    *,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sums of magnitudes: an absolute error of z is a relative error of its exponential."""
    scores = scores.double()
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    s = _softmax(scores, mask, scale, causal, whole, offset)
    z = _mask(scores, mask, scale, causal, whole, offset)
    highest = z.amax(-1, keepdim=True) if z.shape[-1] else z.sum(-1, keepdim=True)
    exponent = (scores * scale).abs() + (z - highest).abs()
    if mask is not None and mask.dtype != torch.bool:
        exponent = exponent + mask.abs()
    exponent = torch.where(s > 0, exponent, 0)
    relative = s * (1 + exponent + (s * exponent).sum(-1, keepdim=True))
    g = drop(grad_y.double().abs(), p, seed, whole, offset)
    projected = (relative * g).sum(-1, keepdim=True)
    inner = relative * (g + (s * g).sum(-1, keepdim=True)) + s * projected
    return {"y": drop(relative, p, seed, whole, offset), "grad_input": inner * abs(scale)}


# Masks with every kind of broadcast, queries that see nothing, odd, prime and wide rows, shards, no
# rows, no keys.
_WHOLE: tuple[list[int], list[int]] = ([], [])


def _sized(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    return activation(*leading, *row), constant(*row), 0.7, False, 0.1, SEED, *_WHOLE


_SAMPLES = (
    _sized((5,), (48,)),
    (activation(1), None, 1.0, False, 0.0, None, *_WHOLE),
    (activation(3, 1), None, 1.0, False, 0.5, SEED, *_WHOLE),
    (activation(5, 7), boolean(5, 7), 0.5, False, 0.0, None, *_WHOLE),
    (activation(5, 7), boolean(5, 1), 0.5, False, 0.25, SEED, *_WHOLE),
    (activation(2, 4, 7), None, 0.5, True, 0.25, SEED, *_WHOLE),
    (activation(2, 7, 4), None, -0.5, True, 0.0, None, *_WHOLE),
    (activation(7, 4), None, 0.5, True, 0.5, SEED, *_WHOLE),
    (activation(2, 3, 5, 31), boolean(2, 1, 1, 31), 0.2, False, 0.1, SEED, *_WHOLE),
    (activation(2, 3, 5, 31), constant(3, 5, 31), 0.2, True, 0.9, SEED, *_WHOLE),
    (activation(2, 3, 5, 31), constant(2, 1, 5, 1), 0.2, False, 0.0, None, *_WHOLE),
    (activation(2, 3, 2, 3, 5, 9), boolean(2, 1, 2, 1, 5, 9), 1.0, True, 0.1, SEED, *_WHOLE),
    (activation(33, 64), constant(33, 64), 0.125, True, 0.0, None, *_WHOLE),
    (activation(4, 50, 768), None, 0.3, True, 0.0, None, *_WHOLE),
    (activation(4, 5, 1000), None, 1.0, False, 0.3, SEED, *_WHOLE),
    (activation(3, 4096), constant(4096), 1.0, False, 0.1, SEED, *_WHOLE),
    (activation(2, 8193), boolean(1), 1.0, False, 0.1, SEED, *_WHOLE),
    (activation(1, 65536), None, 1.0, False, 0.0, None, *_WHOLE),
    (activation(2, 65539), None, 1.0, True, 0.1, SEED, *_WHOLE),
    (activation(2, 2, 4, 16), None, 1.0, True, 0.3, SEED, [2, 6, 9, 16], [0, 3, 5, 0]),
    (activation(0, 64), None, 1.0, True, 0.1, SEED, *_WHOLE),
    (activation(2, 0, 7), boolean(7), 1.0, False, 0.0, None, *_WHOLE),
    (activation(3, 0), None, 1.0, False, 0.1, SEED, *_WHOLE),
)


def _measured(*shapes: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Only scale and mask; only dropout; both, causal."""
    for shape in shapes:
        batch, keys = shape[0], shape[-1]
        yield activation(*shape), boolean(batch, 1, 1, keys), 0.125, False, 0.0, None, *_WHOLE
        yield activation(*shape), None, 1.0, False, 0.1, SEED, *_WHOLE
        yield activation(*shape), None, 0.125, True, 0.1, SEED, *_WHOLE


OP = Op(
    name="softmax_dropout",
    forward="(Tensor input, Tensor? mask, float scale, bool causal, float p, Tensor? seed,"
    " SymInt[]? whole, SymInt[]? offset) -> (Tensor y, Tensor statistics)",
    backward="(Tensor grad_y, Tensor? y, Tensor? input, Tensor? statistics, Tensor? mask,"
    " float scale, bool causal, float p, Tensor? seed, SymInt[]? whole, SymInt[]? offset)"
    " -> Tensor grad_input",
    inputs=_inputs,
    reference=_reference,
    cases=Cases(
        plain=_plain,
        sized=_sized,
        flops=count_per_element(20, 10),
        samples=_SAMPLES,
        benchmarks=tuple(_measured((2, 4, 64, 64), (4, 8, 512, 512), (1, 4, 2048, 2048))),
        benchmarks_on_gpu=tuple(
            _measured((8, 16, 512, 512), (4, 32, 2048, 2048), (1, 4, 8192, 8192))
        ),
        tiny=(activation(1, 64), None, 1.0, False, 0.1, SEED, *_WHOLE),
        numerics=Numerics(
            fp32={"y": 2.0, "grad_input": 2.0},
            terms=_terms,
            rounding={"grad_input": 2.0},  # y was saved in 16 bits
        ),
    ),
    backward_reference=_backward_reference,
    unsaved=_unsaved,
    check=_check,
    fake=_fake,
    sharding=ROWS,
    sources={
        "cpu": ("csrc/cpu/softmax.cpp",),
        "triton": ("triton_kernels/softmax.py",),
    },
    small=2**14,
    eager_rounds=True,
    autocast={"cuda": torch.float32},
)
define(OP)
