"""The thread that steps on the host, and the threads and cores it may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def cores_beside(device: torch.device) -> set[int]:
    """The cores of the device's memory node that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if device.type != "cuda":
        return allowed
    of: Any = torch.cuda.get_device_properties(device)
    address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
    return near(Path("/sys"), address, allowed)


def near(sys: Path, address: str, allowed: set[int]) -> set[int]:
    """The allowed cores of the PCI device's memory node; all if it has none."""
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


def default_threads(cores: set[int]) -> int:
    """This rank's share of the cores, less one for the thread that feeds the device.

    OMP_NUM_THREADS is ignored: torchrun sets it to 1.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = max(1, allowed // max(1, len(cores)))
    ranks_here = -(-ranks // nodes)
    return max(1, len(cores) // ranks_here - 1)


class Worker:
    """One thread whose kernels run on this many threads on these cores."""

    def __init__(self, threads: int, cores: set[int]) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(1, "torchweld-offload")
        before = torch.get_num_threads()
        self.call(lambda: _take(threads, cores))
        # The count applies to the calling thread and to threads started later.
        torch.set_num_threads(before)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        # Grad mode is per thread.
        return self._pool.submit(torch.no_grad()(function))

    def call(self, function: Callable[[], T]) -> T:
        return self.submit(function).result()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _take(threads: int, cores: set[int]) -> None:
    # Memory is placed on the node of the thread that touches it first.
    if hasattr(os, "sched_setaffinity") and cores and cores != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
    torch.get_num_threads()  # the first call in a thread adopts the process's count
    torch.set_num_threads(threads)
