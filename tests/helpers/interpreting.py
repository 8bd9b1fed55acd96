"""Makes Triton's interpreter faster without changing what it computes.

It repeats work that has the same outcome every time:

* It replaces the functions of `triton.language` before a launch, and again at every call of a
  device function.
* It derives a tensor's type, shape and NumPy dtype at every operation, and compares types and
  shapes that are the same object.
* It computes whether integers overflow and discards the answer, which only debug mode asserts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def make_faster() -> None:
    _patch_once_per_launch()
    _derive_types_once()
    _compare_only_what_differs()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once_per_launch() -> None:
    patch = interpreter._patch_lang
    patched: set[int] = set()  # modules whose functions are replaced for this launch

    @functools.cache
    def language(fn: Callable[..., Any]) -> frozenset[int]:
        """The modules of Triton's language that a function sees."""
        return frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)

    def patch_for_launch(fn: Callable[..., Any]) -> Any:
        patched.clear()
        patched.update(language(fn))
        return patch(fn)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language(self.fn) <= patched:
            patched.update(language(self.fn))
            patch(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_for_launch
    interpreter.InterpretedFunction.__call__ = call_device_function


def _derive_types_once() -> None:
    """Keep what depends only on a type; types of the same name are equal."""
    numpy_dtype = interpreter._get_np_dtype
    numpy_dtypes: dict[str, Any] = {}

    def known_numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    init_block_type = tl.block_type.__init__
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_known_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        # A size is an int or a constexpr of one.
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in block_types:
            init_block_type(self, element_ty, shape)
            block_types[key] = dict(vars(self))
        vars(self).update(block_types[key])

    init_tensor = tl.tensor.__init__
    tensors: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init_tensor_of_known_type(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, None, type)
            self.shape = shapes.setdefault(tuple(size.value for size in self.shape), self.shape)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle)

    interpreter._get_np_dtype = known_numpy_dtype
    tl.block_type.__init__ = init_known_block_type
    tl.tensor.__init__ = init_tensor_of_known_type


def _compare_only_what_differs() -> None:
    equal_dtypes = tl.dtype.__eq__
    broadcast = TritonSemantic.broadcast_impl_value

    def equal_or_same_dtypes(self: Any, other: Any) -> bool:
        return self is other or equal_dtypes(self, other)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    tl.dtype.__eq__ = equal_or_same_dtypes
    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
