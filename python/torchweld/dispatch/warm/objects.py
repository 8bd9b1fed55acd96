"""libtorchweld_python.so, which takes Python's objects and leaves out what is between.

It calls kernels of the CPU (direct.py), starts Triton's (leaf.py), and asks torch's guards.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch import native

LIBRARY, HINT = "torchweld_python", "it was built without Python's headers"
# torch's numbers of the kernels' dtypes.
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


@functools.cache
def open_prepared() -> ctypes.CDLL:
    """The library, which knows by now where it finds the tensor in a Python object."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise OSError("it needs Python's global lock")
    library = native.open_library(LIBRARY, ctypes.PyDLL)
    for function in (
        library.torchweld_prepare,
        library.torchweld_make_call,
        library.torchweld_make_check,
    ):
        function.argtypes, function.restype = [ctypes.py_object], ctypes.py_object
    with torch.device("cpu"):  # whatever the default device is
        example = torch.ones(3)
    wrap: Any = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # type: ignore[attr-defined]
    size = torch._C.TensorBase.__basicsize__  # type: ignore[attr-defined]
    questions = state.count_dispatch_modes, state.is_transforming, "is_neg", "_is_zerotensor"
    told = (*state.PLAIN, example, example._cdata, size, wrap, *questions, _DTYPES)
    if library.torchweld_prepare(told) is None:
        raise OSError("this torch's tensors are not where the library looks for them")
    return library


def make_safe(check: Callable[..., bool]) -> Callable[..., bool]:
    """Make torch's comparison of tensors return False where it throws.

    It throws at nested tensors, and nothing catches that: the process would end.
    """
    make = _load_checks()
    found: Callable[..., bool] | None = None if make is None else make(check)
    return found or (lambda *given: not any(t.is_nested for t in given) and check(*given))


@functools.cache
def _load_checks() -> Callable[..., Any] | None:
    return native.try_library(LIBRARY, lambda: open_prepared().torchweld_make_check, HINT)
