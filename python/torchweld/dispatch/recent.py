"""What served the calls that are like this one in everything that a choice may depend on.

A look-up here is part of every warm call on a GPU, and the reason for its form: reading a tensor's
dtype, device, sizes and so on in Python costs 40 to 100 ns each. torch's own guards of compiled
graphs compare all of them in one call, and the comparison of the rest is made for the call's
arguments, without a loop. A call that differs in anything is looked up the long way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C._dynamo import guards as _guards
except ImportError:  # a later torch's: every call is looked up the long way
    _guards = None  # type: ignore[assignment]

ALIGNMENT = 16
# Sizes of an op's inputs, and calls of one size, that are kept.
_SIZES, _ALIKE = 1024, 4
_PLAIN = (bool, int, float, str, type(None))
_IsLike = Callable[[Sequence[Any]], bool]


class Recent:
    """What served recent calls; it has no say in which backend does."""

    def __init__(self) -> None:
        # By op and elements of the first argument, whose exact sizes the guards compare.
        self._calls: dict[Hashable, dict[int, tuple[tuple[_IsLike, str], ...]]] = {}

    def find(self, op: Hashable, inputs: Sequence[Any]) -> str | None:
        """The backend that served such a call; None if none is known."""
        try:
            calls = self._calls[op][inputs[0].numel()]
        except KeyError:
            return None
        for is_like, backend in calls:
            if is_like(inputs):
                return backend
        return None

    def keep(self, op: Hashable, inputs: Sequence[Any], backend: str) -> None:
        """Keep what served a call; not one with tensors that are not aligned, or with objects."""
        at = tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
        others = tuple(i for i in range(len(inputs)) if i not in at)
        given: list[torch.Tensor] = [inputs[i] for i in at]
        if _guards is None or not all(map(_is_aligned, given)):
            return
        if not all(_is_plain(inputs[i]) for i in others):
            return
        sizes: list[Any] = [list(t.shape) for t in given]
        strides: list[Any] = [list(t.stride()) for t in given]
        exact = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        device = given[0].device.type
        autocast = torch.is_autocast_enabled(device)
        is_like = _comparison(at, tuple(i for i in at if inputs[i].numel() > 1), others)(
            _guards.TensorGuards(*given, **exact).check,
            tuple(inputs[i] for i in others),
            torch.is_grad_enabled(),
            (device, torch.get_autocast_dtype(device)) if autocast else None,
        )
        of_op = self._calls.setdefault(op, {})
        if len(of_op) >= _SIZES:
            of_op.clear()
        size = inputs[0].numel()
        of_op[size] = ((is_like, backend), *of_op.get(size, ()))[:_ALIKE]


@functools.cache
def _comparison(
    tensors: tuple[int, ...], addressed: tuple[int, ...], others: tuple[int, ...]
) -> Callable[..., _IsLike]:
    """Makes functions that compare calls with arguments at these places.

    It is generated: a loop over the arguments takes as long as all that is compared. `alike` tells
    whether tensors have the same type, dtype, device, sizes, strides and requires_grad, and torch
    the same dispatch, which a transform, a mode, tracing or autocast changes. Tensors with more
    than one element are `addressed`, since their alignment matters.
    """
    addresses = " | ".join(f"given[{i}].data_ptr()" for i in addressed) or "0"
    made: Callable[..., _IsLike] = eval(
        "lambda alike, values, train, autocast: lambda given: ("
        " is_grad_enabled() is train"
        f" and alike({', '.join(f'given[{i}]' for i in tensors)})"
        f" and ({addresses}) % ALIGNMENT == 0"
        f" and ({''.join(f'given[{i}], ' for i in others)}) == values"
        " and forward_ad._current_level < 0"
        " and (autocast is None or get_autocast_dtype(autocast[0]) == autocast[1]))",
        {
            "is_grad_enabled": torch.is_grad_enabled,
            "get_autocast_dtype": torch.get_autocast_dtype,
            "forward_ad": forward_ad,
            "ALIGNMENT": ALIGNMENT,
        },
    )
    return made


def _is_aligned(t: torch.Tensor) -> bool:
    return t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous()


def _is_plain(value: Any) -> bool:
    """Whether equality says all about the value."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
