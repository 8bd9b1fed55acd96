"""measure_link: the latency and the bandwidth of a group's link.

An exchange in which every rank sends b bytes in k rounds takes k * latency + b / bandwidth.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchweld.collectives.wire import Wire
from torchweld.ops.quantize_one_bit import dequantize_one_bit, quantize_into

_SECONDS = 0.3  # duration of an exchange that measures bandwidth


@dataclass(frozen=True)
class Link:
    """The link of a group: bytes per second from each rank, and seconds of latency."""

    ranks: int
    bandwidth: float
    latency: float
    quantising: float = 0.0  # seconds for each element of a 1-bit exchange

    def seconds(self, sent: float, rounds: int) -> float:
        """The seconds of an exchange."""
        return rounds * self.latency + sent / self.bandwidth


def measure_link(group: Any = None) -> Link:
    """Measure the link of a group, which takes seconds; every rank calls it."""
    wire = Wire("torchweld link", group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def seconds(size: int, times: int) -> float:
        message = torch.zeros(wire.size, size, dtype=torch.uint8, device=device)
        durations = []
        for _ in range(times):
            wire.gather(message[0, :8]).wait()  # a barrier
            began = time.perf_counter()
            received = wire.to_all(message).wait()
            received[-1, -1].item()
            durations.append(time.perf_counter() - began)
        # The slowest rank's numbers, the same on every rank.
        median = torch.tensor([sorted(durations)[times // 2]], dtype=torch.float64, device=device)
        return wire.gather(median).wait().max().item()

    latency = seconds(8, 21)
    size, took = 1 << 16, 0.0
    while took < _SECONDS and size < 1 << 28:
        size *= 4
        took = seconds(size, 1)
    bandwidth = (wire.size - 1) * size / max(took - latency, 1e-9)
    return Link(wire.size, bandwidth, latency, _time_quantising(device))


def _time_quantising(device: torch.device) -> float:
    """Seconds per element on this process: two quantisations and the dequantisation."""
    x = torch.ones(1 << 22, device=device)
    error = torch.zeros_like(x)
    durations = []
    for _ in range(3):
        began = time.perf_counter()
        bits, scale = quantize_into(x, error, error, x.numel())
        dequantize_one_bit(bits, scale, x.numel())[-1].item()
        durations.append(time.perf_counter() - began)
    return 2 * min(durations) / x.numel()
