"""normalize_act: columns of given statistics, then an activation.

    y = act((x - mean) / sqrt(var + eps) * weight + bias), of each column

Read on in: python/torchweld/ops/batch_norm/columns.py, csrc/core/batch_norm.h,
csrc/cpu/batch_norm.cpp, csrc/bind/batch_norm.cpp, triton_kernels/batch_norm.py,
bench/cases/batch_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld.dispatch.call import decide
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.batch_norm.columns import SOURCES, by_torch, check, size, unlike
from torchweld.registry import (
    ELEMENTS,
    Op,
)
from torchweld.registry.cost import count_per_element


@short()
def normalize_act(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> Tensor:
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
    return decide(NORMALIZE_ACT, input, mean, var, weight, bias, eps, activation, approximate)


def _normalize_act(x: Tensor, *rest: Any) -> Tensor:
    *columns, eps, activation, approximate = rest
    if not eps >= 0 or x.ndim == 0 or unlike(x, *columns):
        _check_normalize_act(x, *rest)
    return by_torch(NORMALIZE_ACT, x, columns, False, 0.0, eps, activation, approximate)


def _check_normalize_act(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: Any, *kind: Any
) -> None:
    for name, value in (("mean", mean), ("var", var)):
        if value is None:
            raise ArgumentError(NORMALIZE_ACT.name, name, "None", "a tensor")
    pairs = {"mean": mean, "var": var}, {"weight": weight, "bias": bias}
    check(NORMALIZE_ACT, x, eps, kind, *pairs)


NORMALIZE_ACT = Op(
    name="normalize_act",
    forward="(Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps,"
    " str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias,"
    " float eps, str activation, str approximate, bool need_input, bool need_weight, bool"
    " need_bias) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_normalize_act,
    check=_check_normalize_act,
    sources=SOURCES,
    sharding=ELEMENTS,
    slower=(torch.float64,),
    sized=lambda leading, row: size(leading, row, 1e-5),
    flops=count_per_element(24, 30),
    eager_rounds=True,
)
define(NORMALIZE_ACT)
