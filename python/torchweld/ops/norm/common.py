"""Helpers and checks that layer_norm and rms_norm share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.registry import Numerics, Op, activation, parameter

SOURCES = {
    "cpu": ("csrc/cpu/norm.cpp",),
    "triton": ("triton_kernels/norm.py",),
}


def columns(x: torch.Tensor, normalized_shape: Sequence[int], *_: Any) -> int:
    """The normalised dimensions make a row."""
    return len(normalized_shape)


# Leading sizes and normalized_shape of the contract's samples: one element, odd and prime widths,
# widths beyond every internal limit, no rows, no width, several normalised dimensions.
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), (1,)),
    ((3,), (1,)),
    ((5,), (7,)),
    ((2, 3), (31,)),
    ((33,), (64,)),
    ((4, 5), (768,)),
    ((17,), (1000,)),
    ((3, 1, 2), (4096,)),
    ((2,), (8193,)),
    ((1,), (65536,)),
    ((4,), (32771,)),
    ((0,), (64,)),
    ((2, 0, 3), (7,)),
    ((3,), (0,)),
    ((6,), (4, 5)),
    ((), (2, 3, 4)),
)
# Benchmark shapes, (rows, width): small, typical and wide.
MEASURED = ((64, 256), (4096, 1024), (8192, 1024), (2048, 4096), (256, 65536))
MEASURED_ON_GPU = ((4096, 1024), (32768, 4096), (16384, 8192), (4096, 65536))


def samples(parameters: int, *tail: Any) -> tuple[tuple[Any, ...], ...]:
    """Arguments (x, normalized_shape, parameters..., tail...) over SHAPES, then without some."""
    cases: list[tuple[Any, ...]] = []
    for leading, shape in SHAPES:
        present = [parameter(*shape)] * parameters
        cases.append((activation(*leading, *shape), list(shape), *present, *tail))
    for subset in itertools.product([None, parameter(48)], repeat=parameters):
        cases.append((activation(5, 48), [48], *subset, *tail))
    return tuple(cases)


def sized(
    parameters: int, *tail: Any
) -> Callable[[tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]:
    """Arguments as in samples, of any size."""
    return lambda leading, row: (
        activation(*leading, *row),
        list(row),
        *[parameter(*row)] * parameters,
        *tail,
    )


def benchmarks(
    shapes: Sequence[tuple[int, int]], parameters: int, *tail: Any
) -> tuple[tuple[Any, ...], ...]:
    """Arguments as in samples, over the benchmark shapes."""
    return tuple(
        (activation(rows, width), [width], *[parameter(width)] * parameters, *tail)
        for rows, width in shapes
    )


def split(
    x: torch.Tensor, normalized_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split into leading and normalised dimensions."""
    leading = x.ndim - len(normalized_shape)
    return tuple(range(leading)), tuple(range(leading, x.ndim))


def terms(
    x: torch.Tensor,
    size: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    grad_y: torch.Tensor,
    centered: bool,
) -> dict[str, torch.Tensor]:
    """For each result the sum of its terms' magnitudes, in float64; `size` has x's magnitudes."""
    grad_y = grad_y.double().abs()
    rows, dims = split(x, normalized_shape)
    scale = 1.0 if weight is None else weight.double().abs()
    mean = x.mean(dims, keepdim=True) if centered else torch.zeros_like(x)
    rstd = (x - mean).square().mean(dims, keepdim=True).add(1e-6).rsqrt()
    # The error of a mean scales with the size of its summands, even if they cancel.
    x_hat = (size + (size.mean(dims, keepdim=True) if centered else 0)) * rstd
    g = grad_y * scale
    projected = (g * x_hat).mean(dims, keepdim=True) * x_hat
    mean_g = g.mean(dims, keepdim=True) if centered else 0.0
    return {
        "y": x_hat * scale + (0.0 if bias is None else bias.double().abs()),
        "grad_input": rstd * (g + mean_g + projected),
        "grad_weight": (grad_y * x_hat).sum(rows) if rows else grad_y * x_hat,
        "grad_bias": grad_y.sum(rows) if rows else grad_y,
    }


def _terms(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    *rest: Any,
    grad_y: torch.Tensor,
    centered: bool,
) -> dict[str, torch.Tensor]:
    x, bias = x.double(), rest[:1] if centered else ()
    return terms(x, x.abs(), normalized_shape, weight, *bias, grad_y=grad_y, centered=centered)


def numerics(centered: bool) -> Numerics:
    """Roundings a term goes through: docs/numerics.md counts them."""
    return Numerics(
        fp32=dict.fromkeys(("y", "grad_input", "grad_weight", "grad_bias"), 2.0),
        terms=functools.partial(_terms, centered=centered),
    )


def check(
    op: Op, x: Any, normalized_shape: Any, eps: Any, **parameters: torch.Tensor | None
) -> None:
    """Check the arguments of both ops."""
    checks.dense(op.name, "input", x, op.dtypes, jagged=True)
    try:
        shape = tuple(int(size) for size in normalized_shape)
    except (TypeError, ValueError):
        actual = repr(normalized_shape)
        raise ArgumentError(op.name, "normalized_shape", actual, "a sequence of ints") from None
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        accepted = f"the last dimensions of input, whose shape is {list(x.shape)}"
        raise ArgumentError(op.name, "normalized_shape", list(shape), accepted)
    tensors = {name: value for name, value in parameters.items() if value is not None}
    for name, value in tensors.items():
        checks.dense(op.name, name, value, checks.parameters_beside(x), "input")
        checks.like(op.name, name, value, x, "input")
        checks.shaped(op.name, name, value, shape, "normalized_shape")
    if len({value.dtype for value in tensors.values()}) > 1:
        actual = " and ".join(f"{value.dtype}" for value in tensors.values())
        raise ArgumentError(op.name, "bias", f"of another dtype than weight: {actual}", "the same")
    checks.epsilon(op.name, eps)


def as_float32(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter in float32."""
    return None if parameter is None else parameter.float()


def statistics(x: torch.Tensor, normalized_shape: Sequence[int]) -> torch.Tensor:
    """mean or rstd as kernels return it: one number per row, in the dtype of the arithmetic."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[: x.ndim - len(normalized_shape)], dtype=dtype)


def result(x: torch.Tensor) -> torch.Tensor:
    """y as the kernels return it."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
