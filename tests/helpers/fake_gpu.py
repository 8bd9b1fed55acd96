"""A fake GPU that only keeps time: launches, events and sleeps on one stream, and a host clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CYCLES_A_MS = 1_500_000


class FakeGpu:
    """Clocks, in milliseconds, of a host and of a GPU that runs the work it queues."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def launch(self, ms: float, host_ms: float = 0.005) -> None:
        """Queue a kernel of `ms` milliseconds, which takes the host `host_ms`."""
        self.host += host_ms
        self.busy_until = max(self.busy_until, self.host) + ms

    def call(self, ms: float, host_ms: float = 0.005) -> Callable[[], None]:
        return lambda: self.launch(ms, host_ms)

    def patch(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        """Replace torch's GPU by this one, and these modules' clock by its host clock."""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.busy_until = max(gpu.busy_until, gpu.host)

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / CYCLES_A_MS))
        for module in modules:
            clock = SimpleNamespace(perf_counter=lambda: self.host / 1e3)
            monkeypatch.setattr(module, "time", clock)
