"""Guards: whether two calls agree in everything that may decide what they do.

Guards run in every warm call and must be fast: reading a tensor's dtype, device or sizes in Python
costs 40 to 100 ns each. torch's guards for compiled graphs compare all of them in one call, and
generated code compares the other arguments without a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.warm.generate import compile_function
from torchweld.dispatch.warm.objects import make_safe
from torchweld.dispatch.warm.sizes import Varying

try:
    from torch._C._dynamo import guards
except ImportError:  # a later torch: every call takes the whole path
    guards = None  # type: ignore[assignment]

ALIGNMENT = 16
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_SINGLETONS = (None, True, False)
# What a comparison raises for arguments that it cannot compare: NumPy arrays, proxies, lists.
INCOMPARABLE = (KeyError, AttributeError, TypeError, RuntimeError, ValueError)
Guard = Callable[..., bool]


def is_constant(value: Any) -> bool:
    """Whether comparing the value by == is enough."""
    if isinstance(value, (list, tuple)):
        return all(map(is_constant, value))
    return type(value) in _CONSTANTS


def copy_constant(value: Any) -> Any:
    """The value, which its owner cannot change."""
    if isinstance(value, list):
        return [copy_constant(one) for one in value]
    return tuple(map(copy_constant, value)) if isinstance(value, tuple) else value


def is_plain(t: torch.Tensor) -> bool:
    """Whether guards notice all that may matter of a tensor; meta has no autocast to compare.

    Gradients that autograd has batched (is_grads_batched) have no address.
    """
    return (
        type(t) in state.PLAIN
        and t.layout is torch.strided
        and not (t.is_nested or t.is_meta or state.is_legacy_batchedtensor(t))
    )


def is_lazy(value: Any) -> bool:
    """Whether the dispatcher first computes a tensor's numbers: -x, or zeros without memory."""
    return isinstance(value, torch.Tensor) and (value.is_neg() or value._is_zerotensor())


def has_lazy(values: Sequence[Any]) -> bool:
    """Whether any of the values is such a tensor."""
    return any(map(is_lazy, values))


def are_comparable(values: Sequence[Any]) -> bool:
    """Whether guards may recognise calls with these tensors, which then need no dispatcher."""
    if state.is_watched():
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(map(is_plain, tensors)) and not has_lazy(tensors)


def make_guard(
    given: Sequence[Any],
    *,
    aligned: bool = False,
    shaped: type | None = None,
    seed_at: int | None = None,
    varying: Varying | None = None,
    conditions: Sequence[str] = (),
) -> Guard | None:
    """Make a function that says whether its arguments are like the given ones.

    It compares types, dtypes, devices, sizes, strides and requires_grad of tensors, grad mode, and
    torch's dispatch state: transforms, tracing and autocast. Other arguments are equal. With modes
    no call is like another. It raises one of INCOMPARABLE for what it cannot compare.

    None if such a call cannot be recognised: an argument is a tensor subclass, or an object that is
    not `shaped`; those are compared by their `form`. So on a torch without guards. `aligned`:
    tensors must also be aligned, since Triton specializes kernels on alignment. The number at
    `seed_at` may be any seed. Sizes and strides of `varying` that are None may differ. `conditions`
    are code on the arguments a0, a1, ...
    """
    places = {at: value for at, value in enumerate(given) if isinstance(value, torch.Tensor)}
    if guards is None or not places or state.has_modes():
        return None
    if not all(map(is_plain, places.values())):
        return None
    if aligned and any(t.data_ptr() % ALIGNMENT for t in places.values()):
        return None
    first_at: dict[int, int] = {}  # by tensor, which may be given several times
    kinds: list[str] = []
    values: list[Any] = []
    for at, value in enumerate(given):
        if at in places:
            first = first_at.setdefault(id(value), at)
            kinds.append("t" if first == at else f"a{first}")
        elif any(value is one for one in _SINGLETONS):
            kinds.append({None: "n", True: "y", False: "f"}[value])
        elif at == seed_at and type(value) is int:
            kinds.append("s")
        elif shaped is not None and type(value) is shaped:
            kinds.append("o")
            values.append(value.form)  # type: ignore[attr-defined]
        elif is_constant(value):
            kinds.append("v")
            values.append(copy_constant(value))
        else:
            return None
    tensors = {at: places[at] for at in first_at.values()}
    sizes, strides = (
        [[*t.shape] for t in tensors.values()],
        [[*t.stride()] for t in tensors.values()],
    )
    if varying is not None:
        conditions = (*varying.conditions, *conditions)
        sizes, strides = ([each[at] for at in tensors] for each in varying[:2])  # type: ignore[assignment]
    kind = next(iter(places.values())).device.type
    autocast = torch.is_autocast_enabled(kind)
    elements: dict[str, type] = {}
    for i, value in enumerate(given):
        _add_elements(elements, f"a{i}", value)
    classes = [type(v) for v, kind in zip(given, kinds, strict=True) if kind in ("v", "o")]
    return _write_guard((*kinds,), aligned, (*elements,), (*conditions,))(
        _compare(tensors.values(), sizes, strides),
        tuple(values),
        tuple(classes),
        (*elements.values(),),
        torch.is_grad_enabled(),
        (kind, torch.get_autocast_dtype(kind)) if autocast else None,
    )


def compare_exactly(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What compares tensors, which differ from one another, as a guard does, and nothing else."""
    return _compare(tensors, [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors])


def _compare(
    tensors: Collection[torch.Tensor], sizes: Sequence[Any], strides: Sequence[Any]
) -> Callable[..., bool]:
    exact: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return make_safe(guards.TensorGuards(*tensors, **exact).check)


def _add_elements(to: dict[str, type], name: str, value: Any) -> None:
    """Add the classes of a sequence's elements, by what they are called in code."""
    if isinstance(value, (list, tuple)):
        for at, element in enumerate(value):
            to[f"{name}[{at}]"] = type(element)
            _add_elements(to, f"{name}[{at}]", element)


@functools.lru_cache(4096)
def _write_guard(
    kinds: tuple[str, ...],
    aligned: bool,
    elements: tuple[str, ...],
    more: tuple[str, ...],
) -> Callable[..., Guard]:
    """Make a function that makes guards of calls with such arguments.

    `check` is torch's of the tensors; `elements` has the classes in sequences; `more` are
    conditions in code.
    """
    names = [f"a{i}" for i in range(len(kinds))]

    def select(*wanted: str) -> list[str]:
        return [name for name, own in zip(names, kinds, strict=True) if own in wanted]

    conditions = ["is_grad_enabled() is train"]
    for kind, singleton in (("n", None), ("y", True), ("f", False)):
        conditions += [f"{name} is {singleton}" for name in select(kind)]
    # An optimizer's guard has a thousand tensors, which need no names.
    given = "*all" if {*kinds} == {"t"} and not (aligned or more) else ", ".join(names)
    conditions.append(f"check({'*all' if given == '*all' else ', '.join(select('t'))})")
    again = zip(names, kinds, strict=True)
    conditions += [f"{name} is {first}" for name, first in again if first[0] == "a"]
    if aligned:
        addresses = " | ".join(f"{name}.data_ptr()" for name in select("t"))
        conditions.append(f"({addresses}) % ALIGNMENT == 0")
    if compared := select("v", "o"):
        # True is equal to 1.0, and so is a tensor, which the whole path may refuse.
        conditions.append(f"({', '.join(f'{name}.__class__' for name in compared)},) == classes")
        forms = [f"{name}.form" if name in select("o") else name for name in compared]
        conditions.append(f"({', '.join(forms)},) == values")
    if elements:
        conditions.append(f"({'.__class__, '.join(elements)}.__class__,) == inner")
    conditions += [f"{name}.__class__ is int and 0 <= {name} < 2**63" for name in select("s")]
    conditions += more
    conditions.append("not modes() and not function_modes()")
    conditions.append("forward_ad._current_level < 0")  # has_forward_ad() without its call
    conditions.append("(autocast is None or get_autocast_dtype(autocast[0]) == autocast[1])")
    source = (
        "def make(check, values, classes, inner, train, autocast):\n"
        f"    return lambda {given}: (\n        " + "\n        and ".join(conditions) + "\n    )\n"
    )
    scope = {
        "is_grad_enabled": torch.is_grad_enabled,
        "get_autocast_dtype": torch.get_autocast_dtype,
        "modes": state.count_dispatch_modes,
        "function_modes": state.count_function_modes,
        "forward_ad": state.forward_ad,
        "ALIGNMENT": ALIGNMENT,
    }
    return compile_function("make", source, scope, "a guard")
