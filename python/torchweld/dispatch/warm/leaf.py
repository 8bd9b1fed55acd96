"""Starts a compiled Triton kernel again by one call of CUDA's driver, for plans (plans.py).

Triton's launcher looks at each argument in each call, for 1.2 to 1.7 us; a descriptor takes 5 more
in Python. csrc/python/launch.cpp has packed all parameters but addresses and the seed. The compiled
code says how large they are and where, so nothing hangs on the version of Triton. Where something
is not known, or where there is no library or driver, the plan calls Triton's launcher: its twin.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchweld.dispatch import native
from torchweld.dispatch.warm.objects import HINT, LIBRARY, open_prepared

VARIABLE = "TORCHWELD_LAUNCHER"
# What a compiled kernel takes: .param .u64 .ptr .global .align 1 x_param_0, or .b8 x_param_1[128].
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[bufs](\d+)\b[^\[]*(?:\[(\d+)\])?")
_MAP, _MAP_ALIGNMENT = 128, 128
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}
_LARGEST_CLUSTER = 8  # larger ones need a permission of the driver


class _UnknownError(Exception):
    """A launch that only Triton can start."""


class _Value(NamedTuple):
    """A parameter: its bytes, or how many it has and which argument gives them."""

    bytes: bytes
    size: int
    at: int | None = None
    map: int = -1  # the number of the argument's map


def make_leaf(
    compiled: Any,
    grid: int,
    arguments: Sequence[Any],
    given_at: Sequence[int],
    check: Callable[[Any], None],
    near: int,
    twin: Callable[..., None],
) -> Callable[..., None] | None:
    """A function of (stream, the arguments at `given_at`) that does what `twin` does with them.

    Tensors may be given by their addresses. `check` refuses freed tensors at addresses below
    `near`. None if the launch is not known.
    """
    if (make := _load()) is None:
        return None
    maps: list[tuple[Any, ...]] = []
    try:
        values = list(_list_values(compiled, arguments, given_at, maps))
        packed, places, slots = _pack(compiled, values)
    except (_UnknownError, AttributeError, KeyError, OverflowError, TypeError, struct.error):
        return None
    metadata, run = compiled.metadata, compiled.run
    how = metadata.num_ctas, bool(run.launch_cooperative_grid), bool(run.launch_pdl)
    if metadata.num_ctas > _LARGEST_CLUSTER:
        return None
    by_argument = {value.at: slot for value, slot in slots}
    ordered = tuple(by_argument[at] for at in given_at)
    sizes = grid, 32 * metadata.num_warps, metadata.shared
    told = compiled.function, *sizes, *how, packed, places, ordered, tuple(maps), near, check, twin
    return make(told)  # type: ignore[no-any-return]


@functools.cache
def _load() -> Callable[..., Any] | None:
    """What makes launches; None without the driver, or where Triton's launcher is asked for."""
    if os.environ.get(VARIABLE) == "triton":
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        entries = cuda.cuLaunchKernelEx, cuda.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in entries]
    open_with = functools.partial(_open, (*addresses, native.read_cuda_driver()))
    return native.try_library(LIBRARY, open_with, HINT)


def _open(driver: tuple[Any, ...]) -> Callable[..., Any]:
    library = open_prepared()
    for function in (library.torchweld_use_driver, library.torchweld_make_launch):
        function.argtypes, function.restype = [ctypes.py_object], ctypes.py_object
    library.torchweld_use_driver(driver)
    return library.torchweld_make_launch


def _list_values(
    compiled: Any, arguments: Sequence[Any], given_at: Sequence[int], maps: list[tuple[Any, ...]]
) -> Iterator[_Value]:
    """The parameters of the kernel's arguments, in order, and the maps of their descriptors."""
    kinds = [*compiled.src.signature.values()]
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    if len(kinds) != len(arguments):
        raise _UnknownError
    for at, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "constexpr":
            if at in given_at:
                raise _UnknownError
            continue
        if kind.startswith("tensordesc"):
            yield from _list_described(at, value, next(described, None), maps)
        elif at in given_at:
            yield _Value(b"", 8, at)
        else:
            yield _write(kind, value)


def _list_described(
    at: int, like: Any, about: Any, maps: list[tuple[Any, ...]]
) -> Iterator[_Value]:
    """A descriptor's parameters: its map or its address, then its sizes and strides."""
    sizes, strides = [*like.shape], [*like.strides]
    if about is None:
        yield _Value(b"", 8, at)
        yield from (_write("i64", number) for number in (*sizes, *strides))
        yield from (_write("i1", is_so) for is_so in (like.padding == "nan", _is_rounded(like)))
    else:
        yield _Value(b"", _MAP, at, len(maps))
        maps.append(_make_map(like, about))
    yield from (_write("i32", size) for size in sizes)
    yield from (_write("i64", stride) for stride in strides)


def _is_rounded(like: Any) -> bool:
    return bool(getattr(like, "round_f32_to_tf32", False))


def _make_map(like: Any, about: dict[str, Any]) -> tuple[Any, ...]:
    """What the driver is told of a tensor, innermost dimension first, as Triton tells it."""
    from triton.backends.nvidia import driver

    if about["fp4_padded"] or about.get("is_im2col") or like.strides[-1] != 1:
        raise _UnknownError
    size, dtype = about["elem_size"], driver.TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]]
    dtype = driver.TMA_TF32 if _is_rounded(like) else dtype
    strides = tuple(size * stride for stride in reversed(like.strides[:-1]))
    sizes, box = (tuple(reversed(x)) for x in (like.shape, about["block_size"]))
    return dtype, size, about["swizzle"], like.padding == "nan", sizes, strides, box


def _write(kind: str, value: Any) -> _Value:
    """The bytes of a number."""
    if kind in _FLOATS:
        packed = struct.pack(_FLOATS[kind], value)
    elif re.fullmatch(r"[iu]\d+", kind):
        size = max(8, int(kind[1:])) // 8
        packed = int(value).to_bytes(size, "little", signed=kind[0] == "i" and kind != "i1")
    else:
        raise _UnknownError
    return _Value(packed, len(packed))


def _pack(
    compiled: Any, values: Sequence[_Value]
) -> tuple[bytes, tuple[int, ...], list[tuple[_Value, tuple[int, int, int]]]]:
    """All parameters in a row, where each begins, and the place, size and map of those to give.

    The compiled code's last parameters are memory that Triton allocates: none here.
    """
    entry = _ENTRY.search(compiled.asm["ptx"])
    if entry is None:
        raise _UnknownError
    declared = [_PARAMETER.search(line) for line in entry[1].split(",")]
    packed, places, slots = bytearray(), [], []
    for at, each in enumerate(declared):
        if each is None:
            raise _UnknownError
        size = int(each[2]) // 8 * int(each[3] or 1)
        value = values[at] if at < len(values) else _Value(bytes(8), 8)
        if value.size != size:
            raise _UnknownError
        alignment = _MAP_ALIGNMENT if value.map >= 0 else int(each[1] or size)
        packed += bytes(-len(packed) % alignment)
        places.append(len(packed))
        if value.at is not None:
            slots.append((value, (len(packed), size, value.map)))
        packed += value.bytes or bytes(size)
    if len(declared) < len(values):
        raise _UnknownError
    return bytes(packed), tuple(places), slots
