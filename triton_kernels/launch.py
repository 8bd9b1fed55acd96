"""A kernel launch as an object, so that the ahead-of-time tests compile exactly what runs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import triton

from .tensors import are_aligned


class Launch(NamedTuple):
    """A kernel with all arguments and options of a launch."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    options: dict[str, Any]  # the kernel's constexprs, and options of the compiler
    least_capability: int = 80  # of the GPUs that it is meant for
    spreads: bool = False  # over twice the warps, where a view is not aligned
    aligned: bool = False  # made only for tensors that Triton knows to be aligned

    def unaligned_options(self) -> dict[str, Any]:
        """The options for a view that Triton does not know to be aligned.

        Triton then loads one element at a time, and the addresses take registers. The limit is a
        multiprocessor's share for this many warps: without one ptxas spills although registers
        are free.
        """
        if not self.spreads:
            return self.options
        warps = min(32, 2 * self.options["num_warps"])
        return self.options | {"num_warps": warps, "maxnreg": min(255, 2048 // warps)}


def launch(kernel: Any, grid: int, *args: Any, **options: Any) -> Launch:
    # The default of enable_fp_fusion differs between versions of Triton.
    return Launch(kernel, grid, args, {"enable_fp_fusion": True, **options})


def start(launch: Launch, options: dict[str, Any]) -> Any:
    """Start the kernel; returns Triton's compiled one, which the interpreter does not have."""
    with _loading() if _is_captured() else contextlib.nullcontext():
        return launch.kernel[(launch.grid,)](*launch.args, **options)


def repeat(compiled: Any, grid: int, device: int) -> tuple[Callable[..., None], bool]:
    """What starts a compiled kernel again on the current device, and whether it takes addresses.

    compiled[grid] takes nine Python calls, and asks CUDA about each address. Triton's
    launcher in C takes addresses as they are. Where `_see_call` does not know what it is given,
    compiled[grid] serves.
    """
    public = compiled[(grid, 1, 1)]
    if (seen := _see_call(compiled, grid)) is None:
        return public, False
    before, after, takes_tuple = seen
    launch, hooks = compiled.run.launch, triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    find_stream = torch._C._cuda_getCurrentRawStream

    def start(*arguments: Any) -> None:
        if enter.calls or leave.calls:
            return public(*arguments)
        given = (arguments,) if takes_tuple else arguments
        return launch(*before, find_stream(device), *after, *given)

    return start, True


def _see_call(compiled: Any, grid: int) -> tuple[tuple[Any, ...], tuple[Any, ...], bool] | None:
    """What Triton's launcher hands to its function in C before the stream, and after it.

    And whether that function takes the kernel's arguments as one tuple. The order differs between
    versions of Triton, so the launcher is called once with a stand-in for the function. None if it
    hands over what differs from launch to launch, such as memory or a count.
    """
    run = compiled.run
    allocates = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if type(run).__name__ != "CudaLauncher" or any(getattr(run, name, 0) for name in allocates):
        return None
    seen: list[tuple[Any, ...]] = []
    watched = copy.copy(run)
    watched.launch = lambda *given: seen.append(given)
    stream, argument = object(), object()
    place, fixed = (grid, 1, 1), (compiled.function, compiled.packed_metadata)
    watched(*place, stream, *fixed, None, None, None, argument)
    *head, last = seen[0]
    takes_tuple = last == (argument,)
    if len(seen) > 1 or head.count(stream) != 1 or not (takes_tuple or last is argument):
        return None
    at = head.index(stream)
    before, after = tuple(head[:at]), tuple(head[at + 1 :])
    lasting = [None, *fixed, *(x for x in vars(run).values() if type(x) is not int)]
    if before[:3] != place or not all(_is_among(lasting, x) for x in (*before[3:], *after)):
        return None
    return before, after, takes_tuple


def _is_among(lasting: Iterable[Any], x: Any) -> bool:
    return any(x is each for each in lasting)


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Let this thread load kernels while a CUDA graph is captured, which CUDA forbids by default.

    A captured call may need a kernel that no call before it did: its seed is in memory.
    """
    mode = ctypes.c_int(_RELAXED)
    _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Watcher(Protocol):
    """What starts the launches of a thread in place of `start`, to repeat them later if it fits."""

    fits: bool
    traces: bool  # tensors have no addresses, and no device waits for kernels

    def start(self, launch: Launch, options: dict[str, Any]) -> None: ...


class _Watched(threading.local):
    by: Watcher | None = None


_watched = _Watched()


def watch(by: Watcher | None) -> None:
    """Let `by` start the launches of this thread with their options; None ends it."""
    _watched.by = by


def forbid_replay() -> None:
    """Say that the running call depends on more than its arguments."""
    if _watched.by is not None:
        _watched.by.fits = False


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose allocations and launches depend on nothing but its arguments.

    They may depend on the tensors' dtypes, sizes, strides, devices and alignment, and on the values
    of all other arguments, but not on a setting of torch's, on numbers in a tensor, or on a trial,
    unless the function calls `forbid_replay`.
    torchweld.dispatch.warm.plans then repeats them for calls that are alike.
    """
    function.launching = sys.modules[__name__]  # type: ignore[attr-defined]
    return function


def run(on: torch.Tensor, *launches: Launch) -> None:
    """Run the launches in order on the device of `on`, which need not be the current one."""
    if _watched.by is not None and _watched.by.traces:
        for each in launches:
            if each.grid:
                _watched.by.start(each, _choose_options(each))
        return
    with torch.cuda.device_of(on):
        for each in launches:
            if not each.grid:
                continue
            for value in each.args:
                check_allocated(getattr(value, "base", value))  # of a descriptor: its tensor
            options = _choose_options(each)
            if _watched.by is not None:
                _watched.by.start(each, options)
            else:
                start(each, options)


def _choose_options(launch: Launch) -> dict[str, Any]:
    unaligned = launch.spreads and not are_aligned(*launch.args)
    return launch.unaligned_options() if unaligned else launch.options


# Addresses of a storage that was freed are offsets in it, and lower; most GPUs' memory is higher.
FAR = 2**44


def check_allocated(value: Any) -> None:
    """Refuse a tensor whose storage was freed: a kernel that reads it ends CUDA's context."""
    if isinstance(value, torch.Tensor) and value.numel() and not value.untyped_storage().nbytes():
        raise RuntimeError(
            "The tensor has a non-zero number of elements, but its data is not allocated: its "
            "storage was freed"
        )


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere (interpreter, meta tensors) enough to divide work."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
