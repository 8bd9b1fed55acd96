"""linear_act and linear_gelu: a linear layer and its activation.

    linear_act(x) = act(x weight^T + bias)

Read on in: python/torchweld/ops/gemm/gemm.py, python/torchweld/ops/gemm/epilogue.py,
python/torchweld/ops/gemm/common.py, csrc/cpu/act.cpp, triton_kernels/linear_act.py,
triton_kernels/act.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.dispatch.warm.cache import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gemm
from torchweld.registry import ROWS, Composite
from torchweld.registry.cost import count_for_gemms
from torchweld.registry.processor import has_descriptors, has_units


@short()
def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> Tensor:
    """activation(linear(input, weight, bias)); one pass computes the activation's gradients.

    It saves input and the sum before the activation for the backward pass.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    return layers.decide_recomputed(recompute, OP, input, weight, bias, activation, approximate)


@short()
def linear_gelu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Approximation = "none",
    recompute: bool = False,
) -> Tensor:
    """gelu(linear(input, weight, bias)): linear_act with torch's defaults for gelu.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        approximate: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    return layers.decide_recomputed(recompute, OP, input, weight, bias, "gelu", approximate)


def linear_as_torch(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear, in 16 bits on a CPU without units for them by float32 GEMMs."""
    if gemm.is_converted(input, weight, bias):
        return linear_act(input, weight, bias, activation="identity")
    return linear(input, weight, bias)


def _plan(
    backend: str, x: Tensor, weight: Tensor, bias: Tensor | None, *kind: str
) -> Callable[..., Tensor]:
    if not layers.fits(x, weight, bias):
        _check_all(x, weight, bias, *kind)
    return epilogue.plan(backend, x, weight, bias, *kind)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, *kind: str) -> Tensor:
    if not layers.fits(x, weight, bias):
        _check_all(x, weight, bias, *kind)
    return activations.activate(OP, linear(x, weight, bias), *kind)


def _check_all(x: Any, weight: Any, bias: Any, *kind: Any) -> None:
    layers.check(OP.name, x, weight=weight, bias=bias)
    activations.check(OP.name, *kind)


def is_left_to_compiler(x: Tensor, *_: Any) -> bool:
    """Not where one kernel computes both, nor where torch's GEMM has no units for the dtype."""
    if x.is_cuda:
        return not has_descriptors(x.device)
    return x.dtype.itemsize != 2 or has_units(x.dtype)


OP = Composite(
    name="linear_act",
    forward="(Tensor input, Tensor weight, Tensor? bias, str activation, str approximate)"
    " -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, str activation,"
    " str approximate) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_reference,
    plan=_plan,
    check=_check_all,
    fake=lambda x, weight, *_: (x.new_empty((*x.shape[:-1], weight.shape[0])),),
    sharding=ROWS,
    sized=lambda leading, row: (*layers.arguments(leading, *row, *row), "gelu", "none"),
    flops=lambda x, weight, *_: count_for_gemms(x.numel() * weight.shape[0]),
    sources=epilogue.SOURCES,
    slower=(torch.float64,),
    detail=epilogue.explain,
    made_of=epilogue.MADE_OF,
    left_to_compiler=is_left_to_compiler,
)
