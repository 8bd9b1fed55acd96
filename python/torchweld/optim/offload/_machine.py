"""The machine: copies between device and host, host memory, and the thread that steps there."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from torchweld.errors import ArgumentError

T = TypeVar("T")

# Source, destination.
Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Arrival:
    """An event that follows some copies. On the host copies are immediate."""

    def synchronize(self) -> None:
        """Make the host wait for the copies."""

    def join(self, *targets: torch.Tensor) -> None:
        """Make the work that the current stream queues after this call wait for the copies.

        The memory of `targets` is not reused before that work is done.
        """


class Transfers:
    """The copies and the memory of a device, as an offloaded step uses them.

    This class simulates a device: its tensors are on the host, and copies are immediate.
    """

    def pin(self, buffer: torch.Tensor) -> None:
        """Page-lock this host memory, so that copies from and to it run concurrently."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unlock the memory; called before it is freed."""

    def fetch(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        """Copy to the host, after the work that is queued on the device, and after `after`."""
        for source, target in copies:
            target.copy_(source)
        return Arrival()

    def give(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        """Copy to the device, after the work that is queued on it, and after `after`."""
        return self.fetch(copies, after)

    def join(self) -> None:
        """Make the work queued after this call wait for the copies to the device."""

    def capacity(self) -> int:
        """The usable bytes of the device."""
        return 1 << 62

    def peak(self, held: int) -> int:
        """The device's peak of used bytes since the last call.

        `held` is the part that Offload counts itself.
        """
        return held


class CudaTransfers(Transfers):
    """Copies on two streams, one per direction, with the lifetime of this object."""

    def __init__(self, device: torch.device, pins: bool) -> None:
        self._device, self._pins = device, pins
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._pinned: dict[int, torch.Tensor] = {}
        # The dict keeps the memory alive until it is unregistered.
        weakref.finalize(self, _unregister, self._pinned, (self._out, self._back))

    def pin(self, buffer: torch.Tensor) -> None:
        if not self._pins or buffer.nbytes == 0:
            return
        # torch rounds its own pinned memory up to a power of two.
        runtime = torch.cuda.cudart()
        portable = 1
        status = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable)
        if int(status) != 0:
            _clear_last_error(self._device)
            raise MemoryError(
                f"Offload: {buffer.nbytes} bytes of host memory cannot be pinned (CUDA error "
                f"{int(status)}): raise the limit of locked memory, or set pin_memory=False"
            )
        self._pinned[buffer.data_ptr()] = buffer

    def unpin(self, buffer: torch.Tensor) -> None:
        if self._pinned.pop(buffer.data_ptr(), None) is not None:
            self._out.synchronize()
            self._back.synchronize()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def fetch(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        return self._copy(self._out, copies, after)

    def give(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        return self._copy(self._back, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Copies, after: Arrival | None) -> Arrival:
        # Kernels that write the sources or read the targets may still run.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.join()
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # The memory must not be reused before the copy is done, even if it is freed now:
                # a gradient on its way out, or an activation of a backward pass that fails.
                (source if stream is self._out else target).record_stream(stream)
        return _CudaArrival(self._device, stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._back)

    def capacity(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        # Other processes use the rest of the memory.
        return min(allowed, free + torch.cuda.memory_reserved(self._device))

    def peak(self, held: int) -> int:
        # Allocated, not reserved, bytes: the allocator reuses its cached blocks.
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class _CudaArrival(Arrival):
    """An event on a stream of copies."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # The host sleeps while waiting: a spinning thread would take a core from the steps.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def synchronize(self) -> None:
        self._event.synchronize()

    def join(self, *targets: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for target in targets:
            target.record_stream(stream)


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that a failed call has left for the next check of a kernel launch.

    torch binds no cudaGetLastError; a launch of torch's reads the error, raises and clears it.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def _unregister(pinned: dict[int, torch.Tensor], streams: Iterable[torch.cuda.Stream]) -> None:
    try:
        if pinned:
            for stream in streams:  # their copies may still use the memory
                stream.synchronize()
    finally:
        for address in pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        pinned.clear()


def allocate_pages(nbytes: int) -> torch.Tensor:
    """Allocate host memory that begins on a page.

    Memory is locked by pages: two locked buffers must not share one.
    """
    whole = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % mmap.PAGESIZE
    return whole[start : start + nbytes]


# A decorator that keeps a function out of torch.compile's graphs. `torch.compiler.disable` does the
# same, but would import the compiler together with this module.
untraced = torch._disable_dynamo


def count_default_threads() -> int:
    """Count this rank's share of the cores, less one for the thread that feeds the device.

    OMP_NUM_THREADS is ignored: torchrun sets it to 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)


class Worker:
    """The thread that steps on the host; its kernels use `threads` threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, "torchweld-offload")
        before = torch.get_num_threads()
        self.call(lambda: _set_threads(threads))
        # Setting the count in a thread also changes it for threads that start later.
        torch.set_num_threads(before)

    def check_process(self) -> None:
        """Raise an error in a forked process, which lacks the thread."""
        if os.getpid() != self._process:
            raise ArgumentError(
                "Offload",
                "self",
                f"made in process {self._process}, from which this one was forked",
                "an Offload that was made in this process: threads do not survive a fork",
            )

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call in the thread."""
        self.check_process()
        # Grad mode is per thread.
        return self._pool.submit(torch.no_grad()(function))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, and wait for its result."""
        return self.submit(function).result()

    def stop(self) -> None:
        """Cancel queued calls, and end the thread after the running one."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _set_threads(threads: int) -> None:
    torch.get_num_threads()  # the first call in a thread adopts the process's count
    torch.set_num_threads(threads)


def has_processes() -> bool:
    """Whether other processes take part in the training."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
