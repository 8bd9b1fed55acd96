"""layer_norm: normalise the last dimensions, then scale and shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.ops.norm import common as norms
from torchweld.registry import Cases, Op, Rows
from torchweld.registry.cost import count_per_element


@short(small=True)
def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation with the semantics of torch.nn.functional.layer_norm.

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        normalized_shape: the last dimensions of input, which are normalised.
        weight, bias: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        eps: added to the variance, >= 0.

    Returns:
        A tensor of input's shape and dtype.
    """
    return call(OP, input, normalized_shape, weight, bias, eps)


def _reference(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if not eps >= 0:
        raise ArgumentError("layer_norm", "eps", repr(eps), "a number >= 0")
    parameter = bias if weight is None else weight
    if parameter is not None and parameter.dtype is not x.dtype:  # eager cannot differentiate this
        _check(x, normalized_shape, weight, bias, eps)
        weight, bias = norms.as_float32(weight), norms.as_float32(bias)
        return _reference(x.float(), normalized_shape, weight, bias, eps).to(x.dtype)
    if weight is None and bias is not None:  # torch has no second derivative of a bias only
        weight = torch.ones_like(bias)
    return torch.layer_norm(x, normalized_shape, weight, bias, eps)


def _check(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    norms.check(OP, x, normalized_shape, eps, weight=weight, bias=bias)


def _fake(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    statistics = norms.statistics(x, normalized_shape)
    return norms.result(x), statistics, torch.empty_like(statistics)


OP = Op(
    name="layer_norm",
    forward="(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    backward="(Tensor grad_y, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor?"
    " bias, float eps, Tensor mean, Tensor rstd, bool need_weight, bool need_bias)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_reference,
    check=_check,
    fake=_fake,
    sharding=Rows(norms.columns),
    cases=Cases(
        sized=norms.sized(2, 1e-5),
        flops=count_per_element(8, 12),
        samples=norms.samples(2, 1e-5),
        benchmarks=norms.benchmarks(norms.MEASURED, 2, 1e-5),
        benchmarks_on_gpu=norms.benchmarks(norms.MEASURED_ON_GPU, 2, 1e-5),
        tiny=norms.benchmarks([(1, 64)], 2, 1e-5)[0],
        numerics=norms.numerics(centered=True),
    ),
    sources=norms.SOURCES,
    small=2**19,
    # torch's variance in 16 bits is so inexact that equal elements give results up to 1, not 0.
    eager_rounds=True,
    autocast={"cuda": torch.float32},
)
define(OP)
