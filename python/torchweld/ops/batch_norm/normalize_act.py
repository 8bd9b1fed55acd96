"""normalize_act: batch normalisation with given statistics, then an activation."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.batch_norm import common as batch_norms
from torchweld.registry import (
    ELEMENTS,
    Cases,
    Numerics,
    Op,
    activation,
    constant,
    parameter,
    variance,
)
from torchweld.registry.cost import count_per_element


@short()
def normalize_act(
    input: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> torch.Tensor:
    """activation((input - mean) / sqrt(var + eps) * weight + bias), one pass in each direction.

    Args:
        input: [*, width]; float32, bfloat16, float16 (or float64).
        mean, var: [width], in input's dtype, or float32 and 16 bits in either order; they get no
            gradient.
        weight, bias: [width], in input's dtype, or float32 and 16 bits in either order.
        eps: added to the variance, >= 0.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A tensor of input's shape and dtype.
    """
    return call(OP, input, mean, var, weight, bias, eps, activation, approximate)


def _reference(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    if not eps >= 0 or x.ndim == 0 or batch_norms.unlike(x, mean, var, weight, bias):
        _check(x, mean, var, weight, bias, eps, activation, approximate)
    columns = (mean, var, weight, bias)
    return batch_norms.reference(OP, x, *columns, False, 0.0, eps, activation, approximate)


def _check(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: Any, activation: Any, approximate: Any
) -> None:
    for name, value in (("mean", mean), ("var", var)):
        if value is None:
            raise ArgumentError(OP.name, name, "None", "a tensor")
    pairs = {"mean": mean, "var": var}, {"weight": weight, "bias": bias}
    batch_norms.check(OP, x, eps, (activation, approximate), *pairs)


def _fake(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    approximate: str,
) -> tuple[torch.Tensor, ...]:
    _check(x, mean, var, weight, bias, eps, activation, approximate)
    return (torch.empty_like(x, memory_format=torch.contiguous_format),)


def _terms(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    approximate: str,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    size = x.double().abs()
    kind = (activation, approximate)
    return batch_norms.terms(x, size, mean, var, weight, bias, eps, kind, grad_y)


def _arguments(shape: tuple[int, ...], *kind: str) -> tuple[Any, ...]:
    columns = (constant(shape[-1]), variance(shape[-1]), parameter(shape[-1]), parameter(shape[-1]))
    return (activation(*shape), *columns, 1e-5, *kind)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [_arguments(shape, "gelu", "none") for shape in activations.SHAPES]
    samples += [
        _arguments(s, *kind) for s in activations.SHAPES_OF_ALL for kind in activations.KINDS[1:]
    ]
    x, mean, var, weight, bias, *rest = _arguments((5, 48), "silu", "none")
    return (*samples, *((x, mean, var, w, b, *rest) for w in (None, weight) for b in (None, bias)))


_RESULTS = ("y", "grad_input", "grad_weight", "grad_bias")

OP = Op(
    name="normalize_act",
    forward="(Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps,"
    " str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias,"
    " float eps, str activation, str approximate, bool need_input, bool need_weight, bool"
    " need_bias) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_reference,
    check=_check,
    fake=_fake,
    sources=batch_norms.SOURCES,
    sharding=ELEMENTS,
    cases=Cases(
        sized=lambda leading, row: _arguments((*leading, *row), "gelu", "none"),
        flops=count_per_element(24, 30),
        samples=_samples(),
        benchmarks=tuple(_arguments(s, "gelu", "none") for s in batch_norms.MEASURED),
        benchmarks_on_gpu=tuple(_arguments(s, "gelu", "none") for s in batch_norms.MEASURED_ON_GPU),
        tiny=_arguments((1, 64), "gelu", "none"),
        numerics=Numerics(fp32=dict.fromkeys(_RESULTS, 2.0), terms=_terms),
    ),
    small=2**15,
    eager_rounds=True,
)
define(OP)
