"""Makes Triton's interpreter stricter, and faster without changing what it computes.

A division of integers by zero is an error here. It gives 0 in NumPy and any number on a GPU, which
took rows without columns to addresses out of bounds. The place of a maximum among numbers with NaN
is one that a GPU may return, not NaN's, which NumPy returns.

The interpreter repeats work that has the same outcome every time:

* It searches `triton.language` for the functions to replace before a launch, and again at every
  call of a device function.
* It derives a tensor's type, shape and NumPy dtype at every operation, and compares types and
  shapes that are the same object.
* It promotes and broadcasts operands that already have one type, and turns the same Python number
  into the same block of numbers. It broadcasts by a function of NumPy's that is slow for small
  arrays.
* It looks for a constexpr in what is a tensor, a type or a plain number.
* It makes the handle of a result by three calls.
* It computes whether integers overflow and discards the answer, which only debug mode asserts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from torchweld.triton_kernels import chunks


def make_faster() -> None:
    _patch_once_per_launch()
    _derive_types_once()
    _compare_only_what_differs()
    _prepare_operands_once()
    _unwrap_only_what_may_be_wrapped()
    _make_handles_in_one_call()
    _add_more_columns_at_once()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def refuse_division_by_zero() -> None:
    builder = interpreter.InterpreterBuilder

    def strictly(divide: Callable[..., Any]) -> Callable[..., Any]:
        def divide_unless_zero(self: Any, lhs: Any, rhs: Any) -> Any:
            if not np.all(rhs.data):
                raise ZeroDivisionError("a kernel divides an integer by zero")
            return divide(self, lhs, rhs)

        return divide_unless_zero

    for name in ("create_idiv", "create_srem", "create_urem"):
        setattr(builder, name, strictly(getattr(builder, name)))


def find_maxima_as_a_gpu_does() -> None:
    """The place of a maximum after the last NaN: each comparison with NaN takes the right operand.

    A GPU compares in an order of its own, so a kernel must not depend on that place.
    """
    reduce = interpreter.ReduceOps.apply_impl
    signs = {
        tl.standard._argmax_combine_tie_break_left: 1,
        tl.standard._argmin_combine_tie_break_left: -1,
    }

    def find_places(self: Any, values: Any) -> Any:
        sign = signs.get(self.combine_fn)
        data = values[0].handle.data
        if sign is None or not np.isnan(data).any():
            return reduce(self, values)
        behind = np.flip(np.flip(np.isnan(data), self.axis).cumsum(self.axis), self.axis) == 0
        seen = np.where(behind, sign * data, -np.inf)
        seen = np.where(behind, seen == seen.max(self.axis, keepdims=True), False)
        seen[(slice(None),) * self.axis + (-1,)] |= ~seen.any(self.axis)  # NaN itself is last
        place = seen.argmax(self.axis)
        value = np.take_along_axis(data, np.expand_dims(place, self.axis), self.axis)
        value = value if self.keep_dims else value.squeeze(self.axis)
        place = np.expand_dims(place, self.axis) if self.keep_dims else place
        types = values[0].dtype, tl.int32
        return tuple(map(self.to_tensor, (value, place), types))

    interpreter.ReduceOps.apply_impl = find_places


@contextmanager
def fusing_products() -> Iterator[None]:
    """Round a product only after the sum that takes it, as compilers for GPUs do."""
    builder = interpreter.InterpreterBuilder
    names = ("create_fmul", "create_fadd", "create_fsub", "create_select")
    plain = {name: getattr(builder, name) for name in names}

    def multiply(self: Any, lhs: Any, rhs: Any) -> Any:
        made = plain["create_fmul"](self, lhs, rhs)
        if made.data.dtype == np.float32:
            with np.errstate(invalid="ignore"):  # as in Triton's own operations
                made.product = np.multiply(lhs.data, rhs.data, dtype=np.float64)
        return made

    def fuse(name: str, function: Any) -> Callable[..., Any]:
        def add(self: Any, lhs: Any, rhs: Any) -> Any:
            first, second = (getattr(each, "product", None) for each in (lhs, rhs))
            if first is None and second is None:
                return plain[name](self, lhs, rhs)
            operands = (lhs.data, second) if first is None else (first, rhs.data)
            with np.errstate(invalid="ignore"):
                data = function(*operands).astype(np.float32)
            return interpreter.TensorHandle(data, lhs.dtype.scalar)

        return add

    def select(self: Any, condition: Any, lhs: Any, rhs: Any) -> Any:
        if hasattr(lhs, "product") and np.all(condition.data):
            return lhs  # a condition that is always true is folded
        return plain["create_select"](self, condition, lhs, rhs)

    fused = (multiply, fuse("create_fadd", np.add), fuse("create_fsub", np.subtract), select)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in zip(names, fused, strict=True):
            patch.setattr(builder, name, function)
        yield


def _patch_once_per_launch() -> None:
    patch = interpreter._patch_lang
    patched: set[int] = set()  # modules whose functions are replaced for this launch
    kept: set[int] = set()  # and that only device functions see, whose functions stay replaced
    changes: dict[frozenset[int], list[tuple[Any, str, Any]]] = {}  # of launches, by these modules

    @functools.cache
    def language(fn: Callable[..., Any]) -> frozenset[int]:
        """The modules of Triton's language that a function sees."""
        return frozenset(id(v) for v in fn.__globals__.values() if v is tl or v is tl.core)

    def patch_for_launch(fn: Callable[..., Any]) -> Any:
        seen = language(fn)
        patched.clear()
        patched.update(kept, seen)
        if seen not in changes:
            scope = patch(fn)
            changes[seen] = [(obj, name, vars(obj)[name]) for obj, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in changes[seen]:
            scope.set_attr(*change)
        return scope

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not language(self.fn) <= patched:
            kept.update(language(self.fn) - patched)
            patched.update(kept)
            patch(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    patch_attribute = interpreter._patch_attr
    wrapper = tl.core.builtin(lambda: None).__code__

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Call what the wrapper of a builtin calls. The wrapper only asks for `_semantic`."""
        if getattr(member, "__code__", None) is not wrapper:
            patch_attribute(obj, name, member, builder, scope)
            return
        inner, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_lang = patch_for_launch
    interpreter._patch_attr = patch_builtin
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


def _unwrap_only_what_may_be_wrapped() -> None:
    unwrap = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, bool, int, float, str, type(None)}
    tl.core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)


def _make_handles_in_one_call() -> None:
    """Otherwise a dataclass calls three functions for each result."""
    post_init = interpreter.TensorHandle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not tl.dtype or 8 * data.itemsize > dtype.primitive_bitwidth:
            post_init(self)  # which raises an error unless it is a mask or a pointer

    interpreter.TensorHandle.__init__ = init


def _add_more_columns_at_once() -> None:
    """Sums over rows take a quarter of the programs: each runs by itself, and most have 32 columns.

    A column's sum is the same.
    """
    launch = chunks.launch

    def launch_wider(kernel: Any, grid: int, *args: Any, BLOCK: int, **options: Any) -> Any:  # noqa: N803
        return launch(kernel, -(-grid // 4), *args, BLOCK=4 * BLOCK, **options)

    chunks.launch = launch_wider  # type: ignore[assignment]


def _broadcast(data: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """np.broadcast_to, in a fifth of the time for an array of one number."""
    if data.size != 1:
        return np.broadcast_to(data, shape)
    block = np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    block.flags.writeable = False
    return block


# So many blocks of numbers are kept, and then forgotten.
_MOST_NUMBERS = 256


def _prepare_operands_once() -> None:
    """Keep which types two operands are promoted and broadcast to, and blocks of one number.

    Tensors of one name of a type have one type object, which is kept, see `_derive_types_once`.
    """
    prepare = TritonSemantic.binary_op_type_checking_impl
    plans: dict[tuple[int, int, tuple[bool, ...]], tuple[Any, Any]] = {}
    numbers: dict[tuple[Any, ...], Any] = {}

    def change(self: Any, operand: Any, type_: Any) -> Any:
        if operand.type is type_:
            return operand
        if operand.dtype.name != type_.scalar.name:
            operand = self.cast(operand, type_.scalar)
            if operand.type is type_:
                return operand
        data = _broadcast(operand.handle.data, tuple(type_.shape))
        return tl.tensor(interpreter.TensorHandle(data, operand.handle.dtype), type_)

    def prepare_tensors(self: Any, lhs: Any, rhs: Any, how: tuple[bool, ...]) -> Any:
        key = (id(lhs.type), id(rhs.type), how)
        if key in plans:
            left_type, right_type = plans[key]
            return change(self, lhs, left_type), change(self, rhs, right_type)
        left, right = prepare(self, lhs, rhs, *how)
        plans[key] = left.type, right.type
        return left, right

    def prepare_by_plan(self: Any, lhs: Any, rhs: Any, *how: bool) -> Any:
        of_tensors = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
        if all(of_tensors):
            return prepare_tensors(self, lhs, rhs, how)
        if not any(of_tensors):
            return prepare(self, lhs, rhs, *how)
        tensor, number = (lhs, rhs) if of_tensors[0] else (rhs, lhs)
        # -0.0 equals 0.0, and True equals 1.
        key = (id(tensor.type), type(number), repr(number), of_tensors, how)
        if key in numbers:
            changed, block = numbers[key]
            changed = change(self, tensor, changed)
            return (changed, block) if of_tensors[0] else (block, changed)
        left, right = prepare(self, lhs, rhs, *how)
        if len(numbers) == _MOST_NUMBERS:
            numbers.clear()
        numbers[key] = (left.type, right) if of_tensors[0] else (right.type, left)
        return left, right

    TritonSemantic.binary_op_type_checking_impl = prepare_by_plan
