"""Cases of layer_norm and rms_norm."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.cases.declare import CASES, Cases, vary
from torchweld.registry import parameter

# Leading sizes and normalized_shape of the contract's samples: one element, odd and prime widths,
# widths beyond every internal limit, no rows, no width, several normalised dimensions.
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), (1,)),
    ((3,), (1,)),
    ((5,), (7,)),
    ((2, 3), (33,)),  # two vectors of 16 and one column
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


def terms(
    x: Tensor,
    size: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    grad_y: Tensor,
    centered: bool,
) -> dict[str, Tensor]:
    """For each result the sum of its terms' magnitudes, in float64; `size` has x's magnitudes."""
    grad_y = grad_y.double().abs()
    leading = x.ndim - len(normalized_shape)
    rows, dims = tuple(range(leading)), tuple(range(leading, x.ndim))
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
    x: Tensor, shape: Sequence[int], *rest: Any, grad_y: Tensor, centered: bool
) -> dict[str, Tensor]:
    *parameters, _ = rest
    x = x.double()
    return terms(x, x.abs(), shape, *parameters, grad_y=grad_y, centered=centered)


def _declare(name: str, parameters: tuple[str, ...], eps: float) -> None:
    given = functools.partial(vary, name, eps=eps)
    subsets = itertools.product([None, parameter(48)], repeat=len(parameters))
    without = [given((5,), (48,), **dict(zip(parameters, s, strict=True))) for s in subsets]
    default = [vary(name, *shape, eps=None) for shape in SHAPES[:5]] if name == "rms_norm" else []
    CASES[name] = Cases(
        samples=(*(given(*shape) for shape in SHAPES), *without, *default),
        benchmarks=tuple(given((rows,), (width,)) for rows, width in MEASURED),
        benchmarks_on_gpu=tuple(given((rows,), (width,)) for rows, width in MEASURED_ON_GPU),
        tiny=given((1,), (64,)),
        terms=functools.partial(_terms, centered="bias" in parameters),
    )


_declare("layer_norm", ("weight", "bias"), 1e-5)
_declare("rms_norm", ("weight",), 1e-6)
