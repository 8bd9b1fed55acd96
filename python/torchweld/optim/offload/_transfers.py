"""Copies between a device and the host, and free memory: the only device-specific code.

`CudaTransfers` copies on its own streams. `SimulatedTransfers` is its counterpart for a simulated
device within the host's memory: it copies as well, and counts the bytes that the device holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

# Source, destination.
Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Arrival(Protocol):
    """An event at the end of some copies."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


class Transfers(Protocol):
    """What an offloaded step needs from a device."""

    def pin(self, buffer: torch.Tensor) -> None:
        """Page-lock this host memory, so that its copies run concurrently."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unlock the memory; called before it is freed."""

    def fetch(self, copies: Copies) -> Arrival:
        """Copy to the host, after the work queued on the device so far."""

    def give(self, copies: Copies) -> Arrival:
        """Copy to the device, after the work queued on it so far."""

    def join(self) -> None:
        """Make work queued from now on wait for the copies to the device."""

    def capacity(self) -> int:
        """The usable bytes of the device."""

    def peak(self, held: int) -> int:
        """The device's peak of used bytes since the last call; `held` are counted by Offload."""


class CudaTransfers:
    """Copies on two streams, one per direction, that live as long as this object."""

    def __init__(self, device: torch.device, pins: bool) -> None:
        self._device, self._pins = device, pins
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._pinned: dict[int, torch.Tensor] = {}
        # The dict keeps the memory alive until it is unregistered.
        weakref.finalize(self, _unregister, self._pinned)

    def pin(self, buffer: torch.Tensor) -> None:
        if not self._pins or buffer.nbytes == 0:
            return
        # torch's own pinned memory is rounded up to powers of two, up to twice as much.
        runtime = torch.cuda.cudart()
        portable = 1
        status = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, portable)
        if int(status) != 0:
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

    def fetch(self, copies: Copies) -> Arrival:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # Prevent reuse of its memory before the copy is done, even if it is freed now.
                source.record_stream(self._out)
        return _recorded(self._out)

    def give(self, copies: Copies) -> Arrival:
        # Kernels that read the parameters may still run.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
                # If a backward fails, an activation may be freed before it has arrived.
                target.record_stream(self._back)
        return _recorded(self._back)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._back)

    def capacity(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        # Other processes use the rest.
        return min(allowed, free + torch.cuda.memory_reserved(self._device))

    def peak(self, held: int) -> int:
        # Allocated, not reserved: blocks that the allocator caches serve again.
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # The host sleeps while waiting: a spinning thread would take a core from the steps.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _unregister(pinned: dict[int, torch.Tensor]) -> None:
    for address in pinned:
        torch.cuda.cudart().cudaHostUnregister(address)
    pinned.clear()


class _Arrived:
    def synchronize(self) -> None:
        pass


class SimulatedTransfers:
    """A device of so many bytes: its tensors are on the host, and copies are immediate.

    `others` returns how many bytes are used there besides those that Offload counts.
    """

    def __init__(self, capacity: int = 1 << 62, others: Callable[[], int] = lambda: 0) -> None:
        self._capacity, self._others = capacity, others
        self.fetched = self.given = 0  # bytes
        self.pinned: dict[int, int] = {}

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned[buffer.data_ptr()] = buffer.nbytes

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.pop(buffer.data_ptr(), None)

    def fetch(self, copies: Copies) -> Arrival:
        for source, target in copies:
            target.copy_(source)
            self.fetched += source.nbytes
        return _Arrived()

    def give(self, copies: Copies) -> Arrival:
        for source, target in copies:
            target.copy_(source)
            self.given += source.nbytes
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


def transfers_of(device: torch.device, pins: bool) -> Transfers:
    """The transfers of this device; the CPU gets a simulated device."""
    return CudaTransfers(device, pins) if device.type == "cuda" else SimulatedTransfers()
