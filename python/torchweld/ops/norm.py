"""layer_norm and rms_norm: normalise the last dimensions, then scale and shift.

    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    rms_norm(x) = x / sqrt(mean(x^2) + eps) * weight

Read on in: csrc/core/norm.h, csrc/cpu/norm.cpp, csrc/bind/norm.cpp, triton_kernels/norm.py,
triton_kernels/norm_rows.py, bench/cases/norm.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld import checks
from torchweld.dispatch.call import decide
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.registry import Op, Rows, activation, parameter
from torchweld.registry.cost import count_per_element

_SOURCES = {"cpu": ("csrc/cpu/norm.cpp",), "triton": ("triton_kernels/norm.py",)}


def columns(x: Any, normalized_shape: Sequence[int], *_: Any) -> int:
    """The normalised dimensions make a row."""
    return len(normalized_shape)


def check(
    op: Op, x: Any, normalized_shape: Any, parameters: Sequence[Tensor | None], eps: Any
) -> None:
    """Check the arguments of both ops; the parameters are the weight and the bias."""
    checks.dense(op.name, "input", x, op.dtypes, jagged=True)
    try:
        shape = tuple(map(operator.index, normalized_shape))
    except TypeError:
        actual = repr(normalized_shape)
        raise ArgumentError(op.name, "normalized_shape", actual, "a sequence of ints") from None
    if not shape or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        accepted = f"the last dimensions of input, whose shape is {list(x.shape)}"
        raise ArgumentError(op.name, "normalized_shape", list(shape), accepted)
    named = zip(("weight", "bias"), parameters, strict=False)
    tensors = {name: value for name, value in named if value is not None}
    for name, value in tensors.items():
        checks.dense(op.name, name, value, checks.parameters_beside(x), "input")
        checks.like(op.name, name, value, x, "input")
        checks.shaped(op.name, name, value, shape, "normalized_shape")
    if len({value.dtype for value in tensors.values()}) > 1:
        actual = " and ".join(f"{value.dtype}" for value in tensors.values())
        raise ArgumentError(op.name, "bias", f"of another dtype than weight: {actual}", "the same")
    checks.epsilon(op.name, eps)


def as_float32(parameter: Tensor | None) -> Tensor | None:
    """The parameter in float32."""
    return None if parameter is None else parameter.float()


def statistics(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """mean or rstd as kernels return it: one number per row, in the dtype of the arithmetic."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[: x.ndim - len(normalized_shape)], dtype=dtype)


def result(x: Tensor) -> Tensor:
    """y as the kernels return it."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def promote_residual(residual: Any, x: Any) -> Any:
    """Promote a 16-bit residual to float32 if x is float32, as plain addition does."""
    dtype = getattr(residual, "dtype", None)
    if dtype is torch.bfloat16 or dtype is torch.float16:
        return residual.float() if getattr(x, "dtype", None) is torch.float32 else residual
    return residual


def _size(leading: tuple[int, ...], row: tuple[int, ...], parameters: int) -> tuple[Any, ...]:
    return (activation(*leading, *row), list(row), *[parameter(*row)] * parameters, 1e-5)


# --- layer_norm -----------------------------------------------------------------------------------


@short(small=True)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation with the semantics of torch.nn.functional.layer_norm.

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        normalized_shape: the last dimensions of input, which are normalised.
        weight, bias: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        eps: added to the variance, >= 0.

    Returns:
        A tensor of input's shape and dtype.
    """
    return decide(LAYER_NORM, input, normalized_shape, weight, bias, eps)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if not eps >= 0:
        raise ArgumentError("layer_norm", "eps", repr(eps), "a number >= 0")
    parameter = bias if weight is None else weight
    if parameter is not None and parameter.dtype is not x.dtype:  # eager cannot differentiate this
        _check_layer_norm(x, shape, weight, bias, eps)
        return _layer_norm(x.float(), shape, as_float32(weight), as_float32(bias), eps).to(x.dtype)
    if weight is None and bias is not None:  # torch has no second derivative of a bias only
        weight = torch.ones_like(bias)
    return torch.layer_norm(x, shape, weight, bias, eps)


def _check_layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> None:
    check(LAYER_NORM, x, shape, (weight, bias), eps)


LAYER_NORM = Op(
    name="layer_norm",
    forward="(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    backward="(Tensor grad_y, Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor?"
    " bias, float eps, Tensor mean, Tensor rstd, bool need_weight, bool need_bias)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_layer_norm,
    check=_check_layer_norm,
    fake=lambda x, shape, *_: (result(x), statistics(x, shape), statistics(x, shape)),
    sharding=Rows(columns),
    sized=lambda leading, row: _size(leading, row, 2),
    flops=count_per_element(8, 12),
    sources=_SOURCES,
    small=2**17,
    left_to_compiler=lambda *_: True,
    # torch's variance in 16 bits is so inexact that equal elements give results up to 1, not 0.
    eager_rounds=True,
    autocast={"cuda": torch.float32},
)
define(LAYER_NORM)


# --- rms_norm -------------------------------------------------------------------------------------


@short()
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Root mean square normalisation with the semantics of torch.nn.functional.rms_norm.

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        normalized_shape: the last dimensions of input, which are normalised.
        weight: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        eps: added to the mean square, >= 0; None: as in torch, the machine epsilon of the dtype of
            the arithmetic, 2^-23, or 2^-52 for float64.

    Returns:
        A tensor of input's shape and dtype, contiguous, or channels_last if input is.
    """
    return decide(RMS_NORM, input, normalized_shape, weight, eps)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    if eps is not None and not eps >= 0:
        raise ArgumentError("rms_norm", "eps", repr(eps), "a number >= 0 or None")
    if weight is not None and weight.dtype is not x.dtype:  # eager warns about this
        _check_rms_norm(x, shape, weight, eps)
        return torch.rms_norm(x.float(), shape, weight.float(), eps).to(x.dtype)
    y = torch.rms_norm(x, shape, weight, eps)
    if y.numel() == 0:  # its fake has other strides
        return torch.layer_norm(x, shape, weight)
    return y


def _check_rms_norm(x: Any, normalized_shape: Any, weight: Any, eps: Any) -> None:
    check(RMS_NORM, x, normalized_shape, (weight,), 0.0 if eps is None else eps)


def _refuses(backend: str, arguments: Mapping[str, Any]) -> str | None:
    """torch's rms_norm keeps channels_last; the kernels write packed rows."""
    x = arguments.get("input")
    if not isinstance(x, Tensor) or x.is_contiguous():
        return None
    kept = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if kept is None or not x.is_contiguous(memory_format=kept):
        return None
    return "x is channels_last, which eager keeps"


# torch after 2.11 computes it in float32 under CUDA's autocast.
_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

RMS_NORM = Op(
    name="rms_norm",
    forward="(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps)"
    " -> (Tensor y, Tensor rstd)",
    backward="(Tensor grad_y, Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps,"
    " Tensor rstd, bool need_weight) -> (Tensor grad_input, Tensor grad_weight)",
    reference=_rms_norm,
    check=_check_rms_norm,
    fake=lambda x, shape, *_: (result(x), statistics(x, shape)),
    sharding=Rows(columns),
    sized=lambda leading, row: _size(leading, row, 1),
    flops=count_per_element(5, 10),
    sources=_SOURCES,
    refuses=_refuses,
    left_to_compiler=lambda *_: True,
    autocast={"cuda": torch.float32} if _AUTOCAST else {},
)
define(RMS_NORM)
