"""Helpers and checks that dropout_add_layer_norm and dropout_add_rms_norm share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.errors import ArgumentError
from torchweld.ops.norm import common as norms
from torchweld.random import Shard, draw_seed, drop, split_shard
from torchweld.registry import SEED, Numerics, Op, activation, parameter, residual

SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": ("csrc/cpu/dropout_add_norm.cpp",),
    "triton": ("triton_kernels/dropout_add_norm.py",),
}


def columns(x: Any, residual: Any, normalized_shape: Sequence[int], *_: Any) -> int:
    """The normalised dimensions make a row."""
    return len(normalized_shape)


# Without dropout, x and residual have the same gradient.
SAME_GRADIENT: dict[str, tuple[str, Callable[..., bool]]] = {
    "input": (
        "grad_residual",
        lambda x, residual, *rest: (
            residual is not None and residual.dtype is x.dtype and rest[-4] is None
        ),
    )
}


def inputs(
    op: Op,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    parameters: Sequence[torch.Tensor | None],
    p: float,
    eps: float | None,
    training: bool,
    seed: torch.Tensor | int | None,
    shard: Shard | None,
    normalized_shape: Sequence[int] | None,
    y_dtype: torch.dtype | None,
    norm: Op,
) -> tuple[Any, ...]:
    """The forward's arguments from the public function's."""
    p, seed = draw_seed(op.name, "input", x, p, training, seed)
    if normalized_shape is None:  # without a shape, the check raises
        like, dims = (x, slice(-1, None)) if parameters[0] is None else (parameters[0], slice(None))
        normalized_shape = getattr(like, "shape", ())[dims]
    residual = as_wide(residual, x)
    wide_y = _wide_y(op.name, norm, x, residual, y_dtype)
    return x, residual, normalized_shape, *parameters, p, eps, seed, *split_shard(shard), wide_y


def _wide_y(function: str, norm: Op, x: Any, residual: Any, y_dtype: torch.dtype | None) -> bool:
    """Whether to return float32 for 16-bit x. Defaults to torch's type promotion.

    Under autocast torch's norm returns the dtype of x + residual, or float32 on devices whose
    autocast rule says so.
    """
    if not isinstance(x, torch.Tensor):  # the check raises
        return False
    if y_dtype is None:
        kind = x.device.type
        if x.dtype.itemsize != 2 or not checks.autocasts(kind):
            return False
        return kind in norm.autocast or getattr(residual, "dtype", None) is torch.float32
    if y_dtype not in checks.beside(x):
        raise ArgumentError(function, "y_dtype", y_dtype, checks.names(checks.beside(x)))
    return y_dtype is not x.dtype


def normalize_input(
    norm: Op,
    wide_y: bool,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    parameters: Sequence[torch.Tensor | None],
    eps: float | None,
) -> torch.Tensor:
    """Compute y without a residual and without dropout: the plain norm."""
    if wide_y:
        x, parameters = x.float(), [norms.as_float32(value) for value in parameters]
    y: torch.Tensor = call(norm, x, normalized_shape, *parameters, eps)
    return y.to(x.dtype)


def as_wide(residual: Any, x: Any) -> Any:
    """Promote a 16-bit residual to float32 if x is float32, as plain addition does."""
    dtype = getattr(residual, "dtype", None)
    if dtype is torch.bfloat16 or dtype is torch.float16:
        return residual.float() if getattr(x, "dtype", None) is torch.float32 else residual
    return residual


def is_plain_exact(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    parameters: Sequence[torch.Tensor | None],
    eps: float | None,
    whole: Sequence[int] | None,
) -> bool:
    """Whether the full check can be skipped; torch itself would accept more."""
    return (
        (residual is None or (residual.shape == x.shape and residual.dtype is x.dtype))
        and all(value is None or value.dtype is x.dtype for value in parameters)
        and (eps is None or eps >= 0)
        and not whole
        and checks.all_dense(x, residual)
    )


def stream(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    drop: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """z, contiguous as from the kernels.

    The result of dropout is not rounded before it is added to a wider residual.
    """
    if residual is None:
        return drop(x).contiguous()
    kind = torch.promote_types(x.dtype, residual.dtype)
    z = drop(x if x.dtype is kind else x.to(kind)) + residual
    return z.to(residual.dtype).contiguous()


def normalize(
    norm: Op,
    z: torch.Tensor,
    x: torch.Tensor,
    wide_y: bool,
    normalized_shape: Sequence[int],
    parameters: Sequence[torch.Tensor | None],
    eps: float | None,
) -> torch.Tensor:
    """y from the plain norm in eager torch, in x's dtype unless it is wide."""
    dtype = torch.promote_types(x.dtype, torch.float32) if wide_y else x.dtype
    kind = torch.promote_types(z.dtype, dtype)
    if kind.itemsize > 2:
        z, parameters = z.to(kind), [p if p is None else p.to(kind) for p in parameters]
    y: torch.Tensor = norm.reference(z, normalized_shape, *parameters, eps)
    return y.to(dtype)


def gradients(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    normalized_shape: Sequence[int],
    parameters: Sequence[torch.Tensor | None],
    p: float,
    eps: float | None,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    input_dtype: torch.dtype,
    *,
    centered: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, residual and the parameters in eager torch, for second derivatives."""
    kind = torch.promote_types(z.dtype, torch.float32)
    dropping = (p, seed, whole, offset, len(normalized_shape))
    if grad_y is None:  # only z was used; zero times infinity would be NaN
        assert grad_z is not None
        nothing = [None if value is None else torch.zeros_like(value) for value in parameters]
        return drop(grad_z.to(kind), *dropping).to(input_dtype), grad_z, *nothing
    rows, dims = norms.split(z, normalized_shape)
    wide, grad = z.to(kind), grad_y.to(kind)
    if centered:
        wide = wide - wide.mean(dims, keepdim=True)
    eps = torch.finfo(kind).eps if eps is None else eps
    rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
    x_hat = wide * rstd
    g = grad if parameters[0] is None else grad * parameters[0].to(kind)
    total = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
    if centered:
        total = total - g.mean(dims, keepdim=True)
    total = total * rstd
    if grad_z is not None:
        total = total + grad_z
    grad_input = drop(total, *dropping).to(input_dtype)
    sums = [
        None if value is None else (term.sum(rows) if rows else term).to(value.dtype)
        for value, term in zip(parameters, (grad * x_hat, grad), strict=False)
    ]
    return grad_input, total.to(z.dtype), *sums


def check(
    op: Op,
    x: Any,
    residual: Any,
    normalized_shape: Any,
    eps: Any,
    seed: Any,
    whole: Any,
    offset: Any,
    **parameters: torch.Tensor | None,
) -> None:
    """Check the arguments of both ops."""
    checks.dense(op.name, "input", x, op.dtypes, jagged=seed is None)
    if (weight := parameters["weight"]) is not None:  # normalized_shape may come from it
        checks.dense(op.name, "weight", weight, checks.parameters_beside(x), "input")
        meaning = f"the last dimensions of input, whose shape is {list(x.shape)}: for instance"
        checks.shaped(op.name, "weight", weight, x.shape[x.ndim - weight.ndim :], meaning)
    norms.check(op, x, normalized_shape, eps, **parameters)
    if residual is not None:
        checks.dense(op.name, "residual", residual, checks.beside(x), "input", jagged=x.is_nested)
        checks.like(op.name, "residual", residual, x, "input")
        checks.shaped(op.name, "residual", residual, x.shape, "input's shape")
    checks.dropout(op.name, "input", x, seed, whole, offset)
    if whole and list(whole[x.ndim - len(normalized_shape) :]) != list(normalized_shape):
        accepted = f"whole rows: ending in {list(normalized_shape)}"
        raise ArgumentError(op.name, "shard", f"of sizes {list(whole)}", accepted)


def fake(
    x: torch.Tensor, residual: torch.Tensor | None, normalized_shape: Sequence[int], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, y and a statistic."""
    z = norms.result(x if residual is None else residual)
    statistic = norms.statistics(x, normalized_shape)
    y = x.new_empty(x.shape, dtype=statistic.dtype if rest[-1] else x.dtype)
    return z, y, statistic


def _terms(
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    *rest: Any,
    grad_z: torch.Tensor,
    grad_y: torch.Tensor,
    centered: bool,
) -> dict[str, torch.Tensor]:
    """For each result the sum of its terms' magnitudes, in float64."""
    *bias, p, _, seed, whole, offset, _ = rest
    kept = functools.partial(
        drop, p=p, seed=seed, whole=whole, offset=offset, trailing=len(normalized_shape)
    )
    z, size = kept(x.double()), kept(x.double().abs())
    if residual is not None:
        z, size = z + residual, size + residual.double().abs()
    terms = norms.terms(z, size, normalized_shape, weight, *bias, grad_y=grad_y, centered=centered)
    grad = terms["grad_input"] + grad_z.double().abs()
    return terms | {"z": size, "grad_residual": grad, "grad_input": kept(grad)}


def numerics(centered: bool) -> Numerics:
    """Roundings a term goes through: docs/numerics.md counts them."""
    results = ("y", "grad_input", "grad_residual", "grad_weight", "grad_bias")
    return Numerics(
        fp32={"z": 2.0, **dict.fromkeys(results, 2.5)},
        terms=functools.partial(_terms, centered=centered),
        rounding={"grad_weight": 2.0},  # z was saved in 16 bits
    )


def _arguments(
    leading: tuple[int, ...],
    shape: tuple[int, ...],
    parameters: Sequence[Any],
    p: float,
    eps: float | None,
    *,
    with_residual: bool = True,
    whole: Sequence[int] = (),
    offset: Sequence[int] = (),
    wide_y: bool = False,
) -> tuple[Any, ...]:
    added = residual(*leading, *shape) if with_residual else None
    seed = SEED if p else None
    x = activation(*leading, *shape)
    return (x, added, list(shape), *parameters, p, eps, seed, list(whole), list(offset), wide_y)


def samples(parameters: int, eps: float | None) -> tuple[tuple[Any, ...], ...]:
    """The norms' shapes, with and without dropout; absent arguments; a shard; a wide y."""
    cases = [
        _arguments(leading, shape, [parameter(*shape)] * parameters, p, eps)
        for (leading, shape), p in zip(norms.SHAPES, itertools.cycle((0.1, 0.0, 0.5)))
    ]
    for with_residual, p, rows in ((False, 0.25, 110), (True, 0.25, 5), (True, 0.0, 5)):
        for subset in itertools.product([None, parameter(48)], repeat=parameters):
            cases.append(_arguments((rows,), (48,), subset, p, eps, with_residual=with_residual))
    part = [parameter(4, 5)] * parameters
    shard = ((2, 6, 9, 4, 5), (0, 3, 5, 0, 0))
    cases.append(_arguments((2, 2, 4), (4, 5), part, 0.3, eps, whole=shard[0], offset=shard[1]))
    wide = [parameter(96)] * parameters
    cases += [_arguments((110,), (96,), wide, p, eps, wide_y=True) for p in (0.0, 0.1)]
    cases.append(_arguments((110,), (96,), wide, 0.1, eps, with_residual=False, wide_y=True))
    return tuple(cases)


def sized(
    parameters: int, eps: float | None
) -> Callable[[tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]:
    """Arguments of any size, with dropout."""
    return lambda leading, row: _arguments(leading, row, [parameter(*row)] * parameters, 0.1, eps)


def benchmarks(
    shapes: Sequence[tuple[int, int]], parameters: int, eps: float | None
) -> tuple[tuple[Any, ...], ...]:
    """Arguments over the benchmark shapes, with dropout and without."""
    return tuple(
        _arguments((rows,), (width,), [parameter(width)] * parameters, p, eps)
        for rows, width in shapes
        for p in (0.0, 0.1)
    )
