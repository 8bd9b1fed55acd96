"""What served the calls that are like this one in everything that a choice may depend on.

A look-up here is part of every warm call on a GPU, and the reason for its form: reading a tensor's
dtype, device, sizes and so on in Python costs 40 to 100 ns each. torch's own guards of compiled
graphs compare all of them in one call. What differs in anything is looked up the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

try:
    from torch._C._dynamo import guards as _guards
except ImportError:  # a later torch's: every call is looked up the long way
    _guards = None  # type: ignore[assignment]

ALIGNMENT = 16
# Sizes of ops' inputs, and calls of one size, that are kept.
_SIZES, _ALIKE = 1024, 4
_PLAIN = (bool, int, float, str, type(None))
_grad_enabled = torch.is_grad_enabled


class _Call(NamedTuple):
    """A call, and what served it."""

    tensors: Callable[[Any], Any]  # takes a call's arguments; returns its tensors
    # Whether tensors have the same type, dtype, device, sizes, strides and requires_grad, and torch
    # the same dispatch, which a transform, a mode, tracing or autocast changes.
    alike: Callable[..., bool]
    rest: Callable[[Any], Any]
    values: Any
    train: bool
    autocast: tuple[str, torch.dtype] | None
    backend: str


class Recent:
    """What served recent calls; it has no say in which backend does."""

    def __init__(self) -> None:
        # By op and elements of the first argument, whose exact sizes the guards compare.
        self._calls: dict[tuple[Hashable, int], tuple[_Call, ...]] = {}

    def find(self, op: Hashable, inputs: Sequence[Any]) -> str | None:
        """The backend that served such a call; None if none is known."""
        if (calls := self._calls.get((op, inputs[0].numel()))) is None:
            return None
        for tensors, alike, rest, values, train, autocast, backend in calls:
            given = tensors(inputs)
            if _grad_enabled() is not train or not alike(*given):
                continue
            bits = 0
            for t in given:
                bits |= t.data_ptr()
            if (
                bits % ALIGNMENT == 0
                and rest(inputs) == values
                and forward_ad._current_level < 0
                and (autocast is None or torch.get_autocast_dtype(autocast[0]) == autocast[1])
            ):
                return backend
        return None

    def keep(self, op: Hashable, inputs: Sequence[Any], backend: str) -> None:
        """Keep what served a call; not one with tensors that are not aligned, or with objects."""
        at = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        others = [i for i in range(len(inputs)) if i not in at]
        given: list[torch.Tensor] = [inputs[i] for i in at]
        if _guards is None or not all(map(_is_aligned, given)):
            return
        if not all(_is_plain(inputs[i]) for i in others):
            return
        sizes: list[Any] = [list(t.shape) for t in given]
        strides: list[Any] = [list(t.stride()) for t in given]
        exact = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        guards = _guards.TensorGuards(*given, **exact)
        device = given[0].device.type
        autocast = torch.is_autocast_enabled(device)
        rest = itemgetter(slice(0), *others)  # a tuple, however many they are
        call = _Call(
            tensors=_picked(at),
            alike=guards.check,
            rest=rest,
            values=rest(inputs),
            train=torch.is_grad_enabled(),
            autocast=(device, torch.get_autocast_dtype(device)) if autocast else None,
            backend=backend,
        )
        if len(self._calls) >= _SIZES:
            self._calls.clear()
        size = op, inputs[0].numel()
        self._calls[size] = (call, *self._calls.get(size, ()))[:_ALIKE]


def _picked(at: Sequence[int]) -> Callable[[Any], Any]:
    """A function that returns a call's arguments at these places, as a tuple."""
    if len(at) > 1:
        return itemgetter(*at)
    only = at[0]
    return lambda inputs: (inputs[only],)


def _is_aligned(t: torch.Tensor) -> bool:
    return t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous()


def _is_plain(value: Any) -> bool:
    """Whether equality says all about the value."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
