"""bias_act: bias and activation after a GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.registry import ELEMENTS, Cases, Numerics, Op, activation, parameter
from torchweld.registry.cost import count_per_element


@short()
def bias_act(
    input: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> torch.Tensor:
    """activation(input + bias) in one pass; one more pass computes both gradients.

    Args:
        input: [*, width], or one number without a bias; float32, bfloat16, float16 (or float64).
        bias: [width], in input's dtype, or float32 for 16-bit input.
        activation: "gelu", "relu", "silu", "quick_gelu" (z * sigmoid(1.702 z)), "relu2" (relu's
            square), "sigmoid", "tanh" or "identity" (no activation).
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A contiguous tensor of input's shape and dtype.
    """
    if bias is None and isinstance(input, torch.Tensor) and input.ndim == 0:
        return call(OP, input.reshape(1), bias, activation, approximate).reshape(())
    return call(OP, input, bias, activation, approximate)


def _reference(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
) -> torch.Tensor:
    z = x
    if bias is not None:
        if bias.shape != x.shape[-1:] or bias.dtype is not x.dtype:
            _check_all(x, bias, activation, approximate)
        z = x + bias
    if x.ndim == 0:
        _check_all(x, bias, activation, approximate)
    y = activations.activate(OP, z, activation, approximate)
    if y is x:
        return x.clone(memory_format=torch.contiguous_format)
    y = y.contiguous()
    return y if y.dtype is x.dtype else y.to(x.dtype)


def _check_all(x: Any, bias: Any, activation: Any, approximate: Any) -> None:
    checks.dense(OP.name, "input", x, OP.dtypes, jagged=True)
    if x.ndim == 0:
        raise ArgumentError(OP.name, "input", "0-dimensional", "[*, width]")
    if bias is not None:
        checks.dense(OP.name, "bias", bias, checks.beside(x), "input")
        checks.like(OP.name, "bias", bias, x, "input")
        if bias.shape != x.shape[-1:]:
            accepted = f"the last size of input, {list(x.shape[-1:])}"
            raise ArgumentError(OP.name, "bias", f"of shape {list(bias.shape)}", accepted)
    activations.check(OP.name, activation, approximate)


def _fake(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
) -> tuple[torch.Tensor, ...]:
    _check_all(x, bias, activation, approximate)
    return (torch.empty_like(x, memory_format=torch.contiguous_format),)


def _terms(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    known = activations.ACTIVATIONS[activation, approximate]
    z = x.double().abs() + (0.0 if bias is None else bias.double().abs())
    grad_input = grad_y.double().abs() * known.slope(z)
    return {
        "y": known.value(z),
        "grad_input": grad_input,
        "grad_bias": grad_input.sum_to_size(x.shape[-1:]),
    }


def _samples() -> tuple[tuple[Any, ...], ...]:
    cases = [(shape, "gelu", "none") for shape in activations.SHAPES]
    cases += [
        (shape, *kind) for shape in activations.SHAPES_OF_ALL for kind in activations.KINDS[1:]
    ]
    with_bias = [(activation(*s), parameter(s[-1]), *kind) for s, *kind in cases]
    return (*with_bias, *((activation(5, 48), None, *kind) for kind in activations.KINDS))


def _benchmarks(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[Any, ...], ...]:
    return tuple((activation(*s), parameter(s[-1]), "gelu", "none") for s in shapes)


OP = Op(
    name="bias_act",
    forward="(Tensor input, Tensor? bias, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor? bias, str activation, str approximate,"
    " bool need_bias) -> (Tensor grad_input, Tensor grad_bias)",
    reference=_reference,
    check=_check_all,
    fake=_fake,
    sources=activations.SOURCES,
    sharding=ELEMENTS,
    cases=Cases(
        sized=lambda leading, row: _benchmarks([(*leading, *row)])[0],
        flops=count_per_element(20, 25),
        samples=_samples(),
        benchmarks=_benchmarks(activations.MEASURED),
        benchmarks_on_gpu=_benchmarks(activations.MEASURED_ON_GPU),
        tiny=_benchmarks([(1, 64)])[0],
        numerics=Numerics(fp32=dict.fromkeys(("y", "grad_input", "grad_bias"), 2.0), terms=_terms),
    ),
    small=0,
)
define(OP)
