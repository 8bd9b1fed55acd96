"""The clock of a GPU, on an imitation that only keeps time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweld.bench import clock
from torchweld.bench.clock import DeviceClock

MS = st.floats(0.001, 10.0)
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

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace torch's GPU by this one, and the host's clock by its own."""
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
        host = SimpleNamespace(perf_counter=lambda: self.host / 1e3)
        monkeypatch.setattr(clock, "time", host)


@given(device=MS, host=MS)
def test_the_gpus_time_is_its_own(device: float, host: float) -> None:
    """Many launches from a slow host: once the clock knows the host, the GPU never waits."""
    gpu = FakeGpu()

    def call() -> None:
        for _ in range(10):
            gpu.launch(device / 10, host / 10)

    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch)
        timer = DeviceClock()
        for _ in range(2):
            timer(call)
        taken = timer(call)
    assert taken.device == pytest.approx(device)
    assert taken.host == pytest.approx(host)
    assert taken.exposed == 0


def test_a_host_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is, since it compiles."""
    gpu = FakeGpu()
    gpu.patch(monkeypatch)
    timer = DeviceClock()
    taken = timer(gpu.call(1.0, host_ms=500.0))
    assert taken.exposed == pytest.approx(499, abs=1)
    assert timer(gpu.call(1.0)).exposed == 0


@given(st.lists(st.tuples(MS, MS), min_size=2, max_size=4), st.floats(0, 200))
def test_medians_are_of_the_larger(times: list[tuple[float, float]], budget: float) -> None:
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch)
        found = clock.take_medians([gpu.call(*of) for of in times], DeviceClock(), budget)
    assert found == pytest.approx([max(of) for of in times], rel=1e-6)
    # The shortest trial is five turns behind one; the GPU waits 1.5 times as long as the host.
    turn = sum(device + 2.6 * max(1.0, host) for device, host in times) + 1
    assert gpu.host <= 3 * 1.0 + 7 * turn + budget
