"""Calls a CPU kernel without torch's dispatcher, which takes half of a small call's time.

A short way (cache.py) has compared all that the dispatcher would look at. `make_direct` returns a
function of libtorchweld_python.so, which calls the kernel itself; arguments that need the
dispatcher, and a library that does not load here or fails its test, leave the overload in place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from torchweld.dispatch import native
from torchweld.dispatch.warm.objects import HINT, LIBRARY, open_prepared

# The letters of csrc/python/direct.cpp.
_KINDS = {
    "Tensor": "T",
    "List[Tensor]": "A",
    "List[int]": "L",
    "float": "F",
    "int": "I",
    "bool": "B",
    "str": "S",
    "ScalarType": "D",
}


def make_direct(overload: Any, twin: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what `twin` does with the overload of a CPU kernel."""
    make = _load()
    return twin if make is None else make(overload, twin)


@functools.cache
def _load() -> Callable[..., Any] | None:
    """What makes direct calls; None, with the reason in native.missing, where they cannot be."""
    with torch.device("cpu"):  # whatever the default device is
        make = native.try_library(LIBRARY, _open, HINT)
        is_right = make is None or _is_right(make)
    if not is_right:
        native.missing[LIBRARY] = "its calls differ from calls of torch's dispatcher"
        return None
    return make


def _open() -> Callable[..., Any]:
    if native.cpu_isa is None:
        raise OSError("it needs the CPU kernels")
    cpu, make_call = native.open_library("torchweld_cpu"), open_prepared().torchweld_make_call
    cpu.torchweld_find_kernel.argtypes = [ctypes.c_char_p]
    cpu.torchweld_find_kernel.restype = ctypes.c_void_p

    def make(overload: Any, twin: Callable[..., Any]) -> Any:
        schema = overload._schema
        name = f"{schema.name.removeprefix('torchweld::')}.{schema.overload_name}"
        address = cpu.torchweld_find_kernel(name.encode())
        kinds = "".join(_find_letter(argument) for argument in schema.arguments)
        return make_call((address, kinds, len(schema.returns), twin)) if address else twin

    return make


def _find_letter(argument: Any) -> str:
    kind = str(argument.real_type)
    inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("O") else kind
    inner = "List[int]" if inner == "List[int" else inner
    is_gradient = inner == "Tensor" and argument.name.startswith("grad_")
    letter = "G" if is_gradient else _KINDS[inner]
    return letter if inner == kind else letter.lower()


def _is_right(make: Callable[..., Any]) -> bool:
    """Whether calls with all kinds of arguments have the dispatcher's results."""
    ops = torch.ops.torchweld
    x = torch.linspace(-1, 1, 24, dtype=torch.float32).reshape(3, 8).bfloat16()
    seed, row = torch.tensor([3]), x.new_ones(8, dtype=torch.float32)
    given = (x, x.float(), [8], row, None, 0.5, 1e-5, seed, (6, 8), (3, 0), False)
    act = (x, row.bfloat16(), "gelu", "none")
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.dropout_add_layer_norm.cpu, given),
        (ops.bias_act.cpu, act),
    ]
    z, _, mean, rstd = ops.dropout_add_layer_norm.cpu(*given)
    back = (None, z, z, *given[2:10], mean, rstd, torch.bfloat16, True, True, True, False)
    calls.append((ops.dropout_add_layer_norm_backward.cpu, back))

    def refuse(*_: Any) -> None:
        raise TypeError("it was not called")

    def step(call: Callable[..., None]) -> torch.Tensor:
        """A call with lists of tensors, which writes to them."""
        p, count, rate = row[:5].clone(), row.new_zeros(()), row.new_tensor(0.5).double()
        lists = [p], [row[:5]], *[[]] * 4, [count], *[[]] * 3
        call(*lists, rate, *[None] * 6, [], 0.0, 0.0, 0.0, False)
        return p

    with torch.no_grad():
        try:
            if not torch.equal(step(make(ops.sgd.cpu, refuse)), step(ops.sgd.cpu)):
                return False
        except (TypeError, RuntimeError):
            return False
        for overload, inputs in calls:
            try:
                found = make(overload, refuse)(*inputs)
            except (TypeError, RuntimeError):
                return False
            wanted = overload(*inputs)
            pairs = zip(found, wanted, strict=True) if type(found) is tuple else [(found, wanted)]
            if not all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs):
                return False
    return True
