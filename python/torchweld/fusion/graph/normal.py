"""Normal forms: operations that compute the same bits are recorded as one operation.

Each rule rewrites a call of ATen into another call with the same result, bit for bit, on every
device and dtype that it accepts. tests/pytorch/test_graph_normal.py tries each of them. Sums and
products may also be proven with their two arguments in the other order (`COMMUTE`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

# a + b == b + a and a * b == b * a, also for NaN's place, since no result carries a NaN's payload.
COMMUTE = {aten.add.Tensor, aten.mul.Tensor}

_ARITHMETIC = {aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor}
_DIMS = ("dim", "dim0", "dim1", "dims")
_EXTRA = {aten.unsqueeze.default: 1, aten.stack.default: 1}  # the result has one dimension more


def square(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """x ** 2 and square(x) are x * x."""
    is_power = func is aten.pow.Tensor_Scalar and args[1] == 2 and not _is_symbol(args[1])
    if (is_power or func is aten.square.default) and args[0].is_floating_point():
        return aten.mul.Tensor, (args[0], args[0]), {}
    return None


def root(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """x ** -0.5 is rsqrt(x), as torch's kernels compute it; of float16 zero's sign differs."""
    is_root = func is aten.pow.Tensor_Scalar and type(args[1]) is float and args[1] == -0.5
    is_wide = is_root and args[0].dtype in (torch.float32, torch.float64)
    return (aten.rsqrt.default, args[:1], {}) if is_wide else None


def whole_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A whole number is a float where the tensor has floats: x * 2 is x * 2.0."""
    if func not in _ARITHMETIC or len(args) != 2 or not isinstance(args[0], torch.Tensor):
        return None
    if type(args[1]) is int and args[0].is_floating_point() and abs(args[1]) <= 2**24:
        return func, (args[0], float(args[1])), kwargs
    return None


def power_of_two(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """x / 2**n is x * 2**-n, since both only change the exponent."""
    if func is not aten.div.Tensor or len(args) != 2 or kwargs or type(args[1]) is not float:
        return None
    number = args[1]
    if not args[0].is_floating_point() or not math.isfinite(number) or not number:
        return None
    exact = abs(math.frexp(number)[0]) == 0.5 and 2**-14 <= abs(number) <= 2**14
    return (aten.mul.Tensor, (args[0], 1 / number), {}) if exact else None


def dimension(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Dimensions count from the first."""
    first = args[0] if args else None
    first = first[0] if isinstance(first, (list, tuple)) and first else first  # of cat
    if not isinstance(first, torch.Tensor):
        return None
    rank = first.dim() + _EXTRA.get(func, 0)
    made = list(args)
    for at, argument in enumerate(func._schema.arguments[: len(args)]):
        if argument.name in _DIMS:
            made[at] = _from_first(args[at], rank)
    return None if made == list(args) else (func, tuple(made), kwargs)


def _from_first(value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_from_first(each, rank) for each in value]
    return value + rank if type(value) is int and value < 0 else value


def turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Matrices have one transposition: t(), mT, transpose(0, 1), permute(1, 0)."""
    if func is aten.t.default and args[0].dim() == 2:
        return aten.transpose.int, (args[0], 0, 1), {}
    if func is aten.permute.default and list(args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2]):
        return aten.transpose.int, (args[0], 0, 1), {}
    if func is aten.transpose.int and type(args[1]) is int and type(args[2]) is int:
        rank = args[0].dim()
        first, second = sorted(at % rank for at in args[1:3])
        if (first, second) != args[1:3]:
            return func, (args[0], first, second), {}
    return None


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """_unsafe_view is a view of a result that nobody else has. A view names all its sizes."""
    if func not in (aten.view.default, aten._unsafe_view.default):
        return None
    sizes, rest = args[1], math.prod(each for each in args[1] if not _is_open(each))
    if _is_symbol(rest) or rest:  # a size that is data is no question
        sizes = [args[0].numel() // rest if _is_open(each) else each for each in sizes]
    is_new = func is aten._unsafe_view.default or any(map(_is_open, args[1]))
    return (aten.view.default, (args[0], sizes), kwargs) if is_new else None


def _is_open(size: Any) -> bool:
    return type(size) is int and size == -1


def cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A cast to a dtype; the device and the layout, if named, are its input's."""
    if func is not aten._to_copy.default or not kwargs:
        return None
    x, left = args[0], dict(kwargs)
    same = {"device": x.device, "layout": x.layout, "pin_memory": False, "non_blocking": False}
    for name, value in same.items():
        if name in left and left[name] == value:
            del left[name]
    if left.get("memory_format") is torch.preserve_format:
        del left["memory_format"]
    return (func, args, left) if left != kwargs else None


def part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A slice names its whole range: x[2:] is x[2:len(x)]."""
    if func is not aten.slice.Tensor or kwargs:
        return None
    given: list[Any] = [*args, *(0, None, None, 1)[len(args) - 1 :]]
    x, dim, start, end, step = given
    total = x.shape[dim]
    if any(_is_symbol(each) for each in (total, start, end, step)):
        return None
    start, end, step = slice(start, end, step).indices(total)
    whole = (x, dim, start, max(start, end), *([step] if step != 1 else []))
    return None if whole == args else (func, whole, {})


RULES: tuple[Callable[..., Call | None], ...] = (
    square,
    root,
    whole_number,
    power_of_two,
    dimension,
    part,
    turn,
    view,
    cast,
)


def normalize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The normal form of a call: one call, or one for each of its results."""
    for rule in RULES:
        func, args, kwargs = rule(func, args, kwargs) or (func, args, kwargs)
    return divide(func, args, kwargs) or [(func, args, kwargs)]


def divide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call] | None:
    """The parts of a split are slices."""
    if func not in (aten.split.Tensor, aten.split_with_sizes.default) or kwargs:
        return None
    x, sizes, dim = (*args, 0)[:3]
    total = x.shape[dim]
    if type(total) is not int:
        return None
    ends = (
        list(itertools.accumulate(sizes))
        if isinstance(sizes, (list, tuple))
        else [min(end, total) for end in range(sizes, total + sizes, sizes)]
    )
    if not all(type(end) is int for end in ends):
        return None
    pairs = zip([0, *ends[:-1]], ends, strict=True)
    return [(aten.slice.Tensor, (x, dim % x.dim(), start, end), {}) for start, end in pairs]


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))
