"""Recent calls and what was found for them, compared in everything that it may depend on.

Every warm call on a GPU makes a look-up here, so it has to be fast: reading a tensor's dtype,
device or sizes in Python costs 40 to 100 ns each. torch's guards for compiled graphs compare all
of them in one call, and generated code compares the other arguments without a loop. A call that
differs in anything takes the slow path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

try:
    from torch._C._dynamo import guards as _guards
except ImportError:  # a later torch: every call takes the slow path
    _guards = None  # type: ignore[assignment]

ALIGNMENT = 16
# Limits: sizes kept per op, and calls kept per size.
_SIZES, _ALIKE = 1024, 4
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_IsLike = Callable[[Sequence[Any]], bool]
_Found = TypeVar("_Found")


class Recent(Generic[_Found]):
    """What was found for recent calls: a backend, or a plan. It finds nothing itself.

    `every_address`: where a tensor of one element lies may matter, too.
    """

    def __init__(self, *, every_address: bool = False) -> None:
        # Keyed by op and by the elements of one argument; the guards compare exact sizes.
        self._calls: dict[Hashable, dict[int, tuple[tuple[_IsLike, _Found], ...]]] = {}
        self._least_addressed = 1 if every_address else 2

    def find(self, op: Hashable, inputs: Sequence[Any], at: int = 0) -> _Found | None:
        """What was found for an equal recent call; None without one. `at` is a tensor's place."""
        try:
            calls = self._calls[op][inputs[at].numel()]
        except KeyError:
            return None
        for is_like, found in calls:
            if is_like(inputs):
                return found
        return None

    def _can_keep(self, inputs: Sequence[Any]) -> bool:
        """Whether no argument is a misaligned tensor or a custom object.

        Guards match no call that has one tensor in two places.
        """
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return (
            _guards is not None
            and len({id(t) for t in tensors}) == len(tensors)
            and all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
            and all(isinstance(value, torch.Tensor) or _is_plain(value) for value in inputs)
        )

    def keep(self, op: Hashable, inputs: Sequence[Any], found: _Found, at: int = 0) -> None:
        """Keep what was found for a call, if such a call can be recognised."""
        if not self._can_keep(inputs):
            return
        tensors_at = tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor))
        others = tuple(i for i in range(len(inputs)) if i not in tensors_at)
        tensors: list[torch.Tensor] = [inputs[i] for i in tensors_at]
        addressed = tuple(i for i in tensors_at if inputs[i].numel() >= self._least_addressed)
        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        exact = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        device = tensors[0].device.type
        autocast = torch.is_autocast_enabled(device)
        is_like = _comparison(tensors_at, addressed, others)(
            _guards.TensorGuards(*tensors, **exact).check,
            tuple(inputs[i] for i in others),
            torch.is_grad_enabled(),
            (device, torch.get_autocast_dtype(device)) if autocast else None,
        )
        of_op = self._calls.setdefault(op, {})
        if len(of_op) >= _SIZES:
            of_op.clear()
        size = inputs[at].numel()
        rest = [call for call in of_op.get(size, ()) if not call[0](inputs)]
        of_op[size] = ((is_like, found), *rest)[:_ALIKE]


@functools.cache
def _comparison(
    tensors: tuple[int, ...], addressed: tuple[int, ...], others: tuple[int, ...]
) -> Callable[..., _IsLike]:
    """Make a function that makes comparisons of calls with arguments at these positions.

    Its code is generated, since a loop over the arguments would double its time. `alike` compares
    the tensors' types, dtypes, devices, sizes, strides and requires_grad, and torch's dispatch
    state: transforms, modes, tracing and autocast change it. `addressed` tensors must be aligned.
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


def _is_plain(value: Any) -> bool:
    """Whether comparing the value by == is enough."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
