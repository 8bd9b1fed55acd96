"""The limit set by memory: streams with an op's mix of reads and writes, timed with the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.bench.measure.timing import Clock, interleaved, last_level_cache
from torchweld.registry.cost import Traffic

# Operations with 16 bits of a multiprocessor's tensor cores in a cycle, by compute capability.
_OPERATIONS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
# A smaller stream measures the overhead of its two or three torch calls, not memory.
LEAST_BYTES = 2**20


def stream(traffic: Traffic, device: str) -> Callable[[], Any] | None:
    """A call that moves as many bytes as the op must, with the best mix of torch's simplest loops.

    Three loops make any mix: a + b -> c (2 reads per write), a copy (1:1), and a sum (reads) or a
    fill (writes) for the rest. In place, a CPU has already read the lines that it writes and need
    not fetch them. The loops are then a + 1 -> a (1:1) and a sum.
    """
    if traffic.total < LEAST_BYTES:
        return None
    reads, writes = traffic.reads // 4, traffic.writes // 4
    if traffic.in_place:
        source = torch.ones(reads - writes, device=device)
        target = torch.ones(writes, device=device)
        return lambda: (target.add_(1), source.sum())
    added, copied, summed, filled = mix(reads, writes)
    source = torch.ones(reads, device=device)
    target = torch.empty(writes, device=device)
    # Disjoint pieces, so that no loop finds data in a cache.
    a, b, c, s = source.split([added, added, copied, summed])
    a_b, c_c, f = target.split([added, copied, filled])

    def run() -> None:
        if added:
            torch.add(a, b, out=a_b)
        if copied:
            c_c.copy_(c)
        if summed:
            s.sum()
        if filled:
            f.fill_(1)

    return run


def mix(reads: int, writes: int) -> tuple[int, int, int, int]:
    """The numbers of elements to add (two reads and a write each), to copy, to sum and to fill."""
    added = max(0, min(reads - writes, writes))
    copied = min(reads - 2 * added, writes - added)
    return added, copied, reads - 2 * added - copied, writes - added - copied


def tensor_tflops(mhz: int) -> float | None:
    """The most that this GPU's tensor cores reach with 16 bits at a clock; None if not known."""
    about = torch.cuda.get_device_properties()
    operations = _OPERATIONS.get((about.major, about.minor))
    return operations and operations * about.multi_processor_count * mhz / 1e6


def copy_gbps(clock: Clock, device: str) -> float:
    """The bandwidth of a large copy, counting reads and writes, for the record."""
    half = 2**29 if device == "cuda" else 2 * last_level_cache()
    run = stream(Traffic(half, half), device)
    assert run is not None
    (times,) = interleaved([lambda clock: clock(run)], clock, seconds=0.5, at_least=9, at_most=99)
    return 2 * half / times.quantile(0.5) / 1e6
