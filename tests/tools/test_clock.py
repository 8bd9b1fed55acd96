"""The clock of a GPU, on an imitation that only keeps time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_gpu import FakeGpu
from torchweld.bench import clock
from torchweld.bench.clock import DeviceClock

MS = st.floats(0.001, 10.0)


@given(device=MS, host=MS)
def test_the_gpus_time_is_its_own(device: float, host: float) -> None:
    """Many launches from a slow host: once the clock knows the host, the GPU never waits."""
    gpu = FakeGpu()

    def call() -> None:
        for _ in range(10):
            gpu.launch(device / 10, host / 10)

    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch, clock)
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
    gpu.patch(monkeypatch, clock)
    timer = DeviceClock()
    taken = timer(gpu.call(1.0, host_ms=500.0))
    assert taken.exposed == pytest.approx(499, abs=1)
    assert timer(gpu.call(1.0)).exposed == 0


@given(st.lists(st.tuples(MS, MS), min_size=2, max_size=4), st.floats(0, 200))
def test_medians_are_of_the_larger(times: list[tuple[float, float]], budget: float) -> None:
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch, clock)
        found = clock.take_medians([gpu.call(*of) for of in times], DeviceClock(), budget)
    assert found == pytest.approx([max(of) for of in times], rel=1e-6)
    # The shortest trial is five turns behind one; the GPU waits 1.5 times as long as the host.
    turn = sum(device + 2.6 * max(1.0, host) for device, host in times) + 1
    assert gpu.host <= 3 * 1.0 + 7 * turn + budget
