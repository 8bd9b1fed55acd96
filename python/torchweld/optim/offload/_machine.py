"""The machine: copies between device and host, free memory, and the thread that steps on the host.

`CudaTransfers` copies on its own streams. `SimulatedTransfers` is its counterpart for a simulated
device within the host's memory: it copies as well, and counts the bytes that the device holds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from torchweld.errors import ArgumentError

T = TypeVar("T")

# Source, destination.
Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Arrival(Protocol):
    """An event that follows some copies."""

    def synchronize(self) -> None:
        """Make the host wait for the copies."""

    def join(self, *targets: torch.Tensor) -> None:
        """Make the work that the current stream queues after this call wait for the copies.

        The memory of `targets` is not reused before that work is done.
        """


class Transfers(Protocol):
    """The copies and the memory of a device, as an offloaded step uses them."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Page-lock this host memory, so that copies from and to it run concurrently."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unlock the memory; called before it is freed."""

    def fetch(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        """Copy to the host, after the work that is queued on the device, and after `after`."""

    def give(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        """Copy to the device, after the work that is queued on it, and after `after`."""

    def join(self) -> None:
        """Make the work queued after this call wait for the copies to the device."""

    def capacity(self) -> int:
        """The usable bytes of the device."""

    def peak(self, held: int) -> int:
        """The device's peak of used bytes since the last call.

        `held` is the part that Offload counts itself.
        """


class CudaTransfers:
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
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            if after is not None:
                after.join()
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # The memory must not be reused before the copy is done, even if it is freed now.
                source.record_stream(self._out)
        return _CudaArrival(self._device, self._out)

    def give(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        # Kernels that read the parameters may still run.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            if after is not None:
                after.join()
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # If a backward pass fails, an activation may be freed before it is copied.
                target.record_stream(self._back)
        return _CudaArrival(self._device, self._back)

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


class _CudaArrival:
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


class _Arrived:
    def synchronize(self) -> None:
        pass

    def join(self, *targets: torch.Tensor) -> None:
        pass


class SimulatedTransfers:
    """A simulated device of `capacity` bytes: its tensors are on the host, copies are immediate.

    `others` returns how many bytes of the device are used besides those that Offload counts.
    """

    def __init__(self, capacity: int = 1 << 62, others: Callable[[], int] = lambda: 0) -> None:
        self._capacity, self._others = capacity, others
        self.fetched_bytes = self.given_bytes = 0
        self.pinned: dict[int, int] = {}

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned[buffer.data_ptr()] = buffer.nbytes

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.pop(buffer.data_ptr(), None)

    def fetch(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        for source, target in copies:
            target.copy_(source)
            self.fetched_bytes += source.nbytes
        return _Arrived()

    def give(self, copies: Copies, after: Arrival | None = None) -> Arrival:
        for source, target in copies:
            target.copy_(source)
            self.given_bytes += source.nbytes
        return _Arrived()

    def join(self) -> None:
        pass

    def capacity(self) -> int:
        return self._capacity

    def peak(self, held: int) -> int:
        in_use = held + self._others()
        if in_use > self._capacity:
            raise torch.OutOfMemoryError(
                f"the simulated device has {self._capacity} bytes, {in_use} are in use"
            )
        return in_use


def make_transfers(device: torch.device, pins: bool) -> Transfers:
    """Make the transfers of this device; the CPU gets a simulated device."""
    return CudaTransfers(device, pins) if device.type == "cuda" else SimulatedTransfers()


# A decorator that keeps a function out of torch.compile's graphs. `torch.compiler.disable` does the
# same, but would import the compiler together with this module.
untraced = torch._disable_dynamo


def find_cores(device: torch.device) -> set[int]:
    """Find the cores on the device's memory node that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if device.type != "cuda":
        return allowed
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    address = f"{properties.pci_domain_id:04x}:{bus}.0"
    return find_near_cores(Path("/sys"), address, allowed)


def find_near_cores(sys: Path, address: str, allowed: set[int]) -> set[int]:
    """Find the allowed cores on the PCI device's memory node; all cores if it has none."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return allowed
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores & allowed or allowed


def count_default_threads(cores: set[int]) -> int:
    """Count this rank's share of the cores, less one for the thread that feeds the device.

    OMP_NUM_THREADS is ignored: torchrun sets it to 1.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = max(1, allowed // max(1, len(cores)))
    ranks_here = -(-ranks // nodes)
    return max(1, len(cores) // ranks_here - 1)


class Worker:
    """The thread that steps on the host; its kernels use `threads` threads on `cores`."""

    def __init__(self, threads: int, cores: set[int]) -> None:
        self.threads = threads
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, "torchweld-offload")
        before = torch.get_num_threads()
        self.call(lambda: _bind_thread(threads, cores))
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


def _bind_thread(threads: int, cores: set[int]) -> None:
    # Memory is placed on the memory node of the thread that touches it first.
    if hasattr(os, "sched_setaffinity") and cores and cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
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
