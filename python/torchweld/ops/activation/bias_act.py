"""bias_act: bias and activation after a GEMM."""

from __future__ import annotations

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.errors import ArgumentError
from torchweld.ops.activation import common as activations
from torchweld.registry import ELEMENTS, Numerics, Op, activation, parameter
from torchweld.registry.cost import per_element


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "gelu",
    approximate: str = "none",
) -> torch.Tensor:
    """activation(x + bias) in one pass; the backward computes both gradients in one pass.

    Args:
        x: [*, width], or one number without a bias; float32, bfloat16, float16 (or float64).
        bias: [width], in x's dtype, or float32 beside a 16-bit x.
        activation: "gelu", "relu", "silu", "quick_gelu" (z * sigmoid(1.702 z)), "relu2" (relu's
            square), "sigmoid", "tanh" or "identity" (no activation).
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    if bias is None and isinstance(x, torch.Tensor) and x.ndim == 0:
        return call(OP, x.reshape(1), bias, activation, approximate).reshape(())
    return call(OP, x, bias, activation, approximate)


def _reference(x, bias, activation, approximate):
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


def _check_all(x, bias, activation, approximate):
    checks.dense(OP.name, "x", x, OP.dtypes, jagged=True)
    if x.ndim == 0:
        raise ArgumentError(OP.name, "x", "of no dimensions", "[*, width]")
    if bias is not None:
        checks.dense(OP.name, "bias", bias, checks.beside(x), "x")
        checks.like(OP.name, "bias", bias, x, "x")
        if bias.shape != x.shape[-1:]:
            accepted = f"the last size of x, {list(x.shape[-1:])}"
            raise ArgumentError(OP.name, "bias", f"of shape {list(bias.shape)}", accepted)
    activations.check(OP.name, activation, approximate)


def _fake(x, bias, activation, approximate):
    _check_all(x, bias, activation, approximate)
    return (torch.empty_like(x, memory_format=torch.contiguous_format),)


def _terms(x, bias, activation, approximate, grad_y):
    known = activations.ACTIVATIONS[activation, approximate]
    z = x.double().abs() + (0.0 if bias is None else bias.double().abs())
    grad_x = grad_y.double().abs() * known.slope(z)
    return {"y": known.value(z), "grad_x": grad_x, "grad_bias": grad_x.sum_to_size(x.shape[-1:])}


def _samples():
    found = [(shape, "gelu", "none") for shape in activations.SHAPES]
    found += [
        (shape, *kind) for shape in activations.SHAPES_OF_ALL for kind in activations.KINDS[1:]
    ]
    with_bias = [(activation(*s), parameter(s[-1]), *kind) for s, *kind in found]
    return (*with_bias, *((activation(5, 48), None, *kind) for kind in activations.KINDS))


def _benchmarks(shapes):
    return tuple((activation(*s), parameter(s[-1]), "gelu", "none") for s in shapes)


OP = Op(
    name="bias_act",
    forward="(Tensor x, Tensor? bias, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor x, Tensor? bias, str activation, str approximate,"
    " bool need_bias) -> (Tensor grad_x, Tensor grad_bias)",
    reference=_reference,
    check=_check_all,
    fake=_fake,
    sources=activations.SOURCES,
    sharding=ELEMENTS,
    sized=lambda leading, row: _benchmarks([(*leading, *row)])[0],
    flops=per_element(20, 25),
    samples=_samples(),
    benchmarks=_benchmarks(activations.MEASURED),
    benchmarks_on_gpu=_benchmarks(activations.MEASURED_ON_GPU),
    tiny=_benchmarks([(1, 64)])[0],
    numerics=Numerics(fp32=dict.fromkeys(("y", "grad_x", "grad_bias"), 2.0), terms=_terms),
    small=0,
)
define(OP)
