"""Checks that ops share. Each raises an ArgumentError that names the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError

# A module-level tuple: a union would be built at every call. numbers.Real admits NumPy's numbers.
NUMBER: Any = (int, float, numbers.Real)
INTEGER: Any = (int, numbers.Integral)


def names(dtypes: Sequence[torch.dtype]) -> str:
    """List dtypes in words."""
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dense(
    function: str,
    name: str,
    value: Any,
    dtypes: Sequence[torch.dtype],
    beside: str = "",
    *,
    jagged: bool = False,
) -> None:
    """Check for a dense tensor of one of these dtypes; with `jagged`, also a jagged one.

    `beside` names the argument that the dtypes depend on.
    """
    if not isinstance(value, torch.Tensor):
        accepted = "a tensor"
        if isinstance(value, torch.fx.Proxy):
            accepted = "a tensor; torch.fx traces only calls written as torchweld.functional.NAME"
        raise ArgumentError(function, name, f"a {type(value).__name__}", accepted)
    is_jagged = value.layout == torch.jagged
    strided = value.layout == torch.strided and not value.is_nested
    if value.is_quantized or not (strided or (is_jagged and jagged)):
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        kind = f"{kind} nested" if value.is_nested and not is_jagged else kind
        accepted = "a dense or jagged tensor" if jagged else "a dense tensor"
        raise ArgumentError(function, name, f"a {kind} tensor", accepted)
    if value.dtype not in dtypes:
        accepted = names(dtypes) + (f", to go with {beside}" if beside else "")
        raise ArgumentError(function, name, f"of dtype {value.dtype}", accepted)


def all_dense(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether torch's GEMMs accept the tensors: all strided, and all or none on meta."""
    strided, meta = torch.strided, x.is_meta
    if x.layout is not strided:
        return False
    for t in others:  # a generator would take longer than the comparisons
        if t is not None and (t.layout is not strided or t.is_meta is not meta or t.is_nested):
            return False
    return True


def like(function: str, name: str, value: torch.Tensor, x: torch.Tensor, x_name: str) -> None:
    """Check that value is on the device of x."""
    if value.device != x.device:
        accepted = f"the device of {x_name}, {x.device}"
        raise ArgumentError(function, name, f"on {value.device}", accepted)


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for this type of device; torch raises if asked about meta."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def beside(x: torch.Tensor) -> list[torch.dtype]:
    """Dtypes accepted together with x: its own, and float32 for 16-bit x."""
    return [x.dtype] if x.dtype.itemsize != 2 else [x.dtype, torch.float32]


_BESIDE_FLOAT32 = [torch.float32, torch.bfloat16, torch.float16]


def parameters_beside(x: torch.Tensor) -> list[torch.dtype]:
    """Dtypes of a norm's parameters and statistics: also 16-bit dtypes for float32 x."""
    return _BESIDE_FLOAT32 if x.dtype is torch.float32 else beside(x)


def shaped(
    function: str, name: str, value: torch.Tensor, shape: Sequence[int], meaning: str
) -> None:
    """Check the shape; `meaning` names the expected one."""
    if tuple(value.shape) != tuple(shape):
        accepted = f"{meaning}, {list(shape)}"
        raise ArgumentError(function, name, f"of shape {list(value.shape)}", accepted)


def epsilon(function: str, eps: Any) -> None:
    """Check for a number that is neither negative nor NaN."""
    if not isinstance(eps, NUMBER) or math.isnan(eps) or eps < 0:
        raise ArgumentError(function, "eps", repr(eps), "a number >= 0")


def probability(function: str, p: Any, name: str = "p") -> None:
    """Check for a number from 0 to 1."""
    if not isinstance(p, NUMBER) or not 0 <= p <= 1:
        raise ArgumentError(function, name, repr(p), "a probability from 0 to 1")


_LARGEST = {kind: torch.finfo(kind).max for kind in (torch.float32, torch.float64)}


def factor(function: str, name: str, value: Any, dtype: torch.dtype | None = None) -> None:
    """Check for a factor that is finite in float32, or in float64 if dtype is float64."""
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    if not isinstance(value, NUMBER) or not abs(value) <= _LARGEST[kind]:
        accepted = f"a number that {names([kind])} holds"
        raise ArgumentError(function, name, repr(value), accepted)


def fits(function: str, name: str, value: Any, does_fit: bool, accepted: str) -> None:
    """Raise an error about the value unless it fits."""
    if not does_fit:
        raise ArgumentError(function, name, repr(value), accepted)


def number(
    function: str, name: str, value: Any, does_fit: Callable[[Any], bool], accepted: str
) -> None:
    """Raise an error about the value unless it is a number that fits; NaN never is."""
    is_number = isinstance(value, NUMBER) and not math.isnan(value)
    fits(function, name, value, is_number and does_fit(value), accepted)


def count(function: str, name: str, value: Any, least: int = 0) -> None:
    """Check for an int, not below `least`."""
    is_int = isinstance(value, INTEGER) and not isinstance(value, bool) and value >= least
    fits(function, name, value, is_int, f"an int >= {least}")


def flag(function: str, name: str, value: Any) -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(function, name, repr(value), "True or False")


def flags(function: str, **values: Any) -> None:
    """Check for True or False, by name."""
    for name, value in values.items():
        flag(function, name, value)


def companion(
    function: str,
    name: str,
    value: Any,
    dtypes: Sequence[torch.dtype],
    x: torch.Tensor,
    x_name: str,
    *,
    beside: str | None = None,
    shape: Sequence[int] | None = None,
    meaning: str = "",
) -> None:
    """Check for a dense tensor on the device of x, of one of these dtypes, and of a shape."""
    dense(function, name, value, dtypes, x_name if beside is None else beside)
    like(function, name, value, x, x_name)
    if shape is not None:
        shaped(function, name, value, shape, meaning)


def broadcasts(function: str, name: str, value: torch.Tensor, x: torch.Tensor, x_name: str) -> None:
    """Check that the shape broadcasts to x's."""
    missing = x.ndim - value.ndim
    sizes = zip(value.shape, x.shape[max(missing, 0) :], strict=False)
    if missing < 0 or any(size not in (1, wanted) for size, wanted in sizes):
        accepted = f"one that broadcasts to {x_name}, {list(x.shape)}"
        raise ArgumentError(function, name, f"of shape {list(value.shape)}", accepted)


def dropout(
    function: str,
    x_name: str,
    x: torch.Tensor,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> None:
    """Check that x's device can take the seed, and that x fits into the whole at this offset."""
    if seed is not None and not seed.is_cpu:
        like(function, "seed", seed, x, x_name)
    whole, offset = whole or (), offset or ()
    if not whole and not offset:
        return
    actual = f"of sizes {list(whole)} and offsets {list(offset)}"
    if len(whole) != x.ndim or len(offset) != x.ndim:
        accepted = f"{x.ndim} of each, as {x_name} has dimensions"
        raise ArgumentError(function, "shard", actual, accepted)
    if any(o < 0 or o + n > w for o, n, w in zip(offset, x.shape, whole, strict=True)):
        accepted = f"a place that {x_name}, {list(x.shape)}, fits into"
        raise ArgumentError(function, "shard", actual, accepted)
