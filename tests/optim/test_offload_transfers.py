"""The order of a GPU's copies relative to other work, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchweld.optim.offload._transfers import CudaTransfers


class Machine:
    """Streams, events and page-locked memory that only record calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self.status = 0
        machine = self

        class Stream:
            count = 0

            def __init__(self, device: Any = None) -> None:
                Stream.count += device is not None
                self.name = f"stream {Stream.count}" if device is not None else "training"

            def wait_stream(self, other: Stream) -> None:
                machine.log.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                machine.log.append(f"host waits for {self.name}")

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                self.name = f"event on {stream.name}"
                machine.log.append(self.name)

            def synchronize(self) -> None:
                machine.log.append(f"host waits for {self.name}")

        training = Stream()
        running = [training]

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            running.append(stream)
            yield
            running.pop()

        def copy(target: Any, source: Any, non_blocking: bool = False) -> None:
            assert non_blocking
            machine.log.append(f"copy on {running[-1].name}")

        def record(tensor: Any, stream: Stream) -> None:
            machine.log.append(f"memory stays for {stream.name}")

        class Runtime:
            @staticmethod
            def cudaHostRegister(address: int, count: int, flags: int) -> int:  # noqa: N802
                machine.locked[address] = count
                return machine.status

            @staticmethod
            def cudaHostUnregister(address: int) -> int:  # noqa: N802
                del machine.locked[address]
                return 0

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running[-1])
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.Tensor, "record_stream", record)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def transfers(pins: bool = True) -> CudaTransfers:
    return CudaTransfers(torch.device("cuda", 0), pins)


def test_gradients_leave_after_what_made_them(machine: Machine) -> None:
    """And their memory is not reused before they have left."""
    transfers().fetch([(torch.ones(2), torch.empty(2))] * 2).synchronize()
    assert machine.log == [
        "stream 1 waits for training",
        *["copy on stream 1", "memory stays for stream 1"] * 2,
        "event on stream 1",
        "host waits for event on stream 1",
    ]


def test_parameters_return_after_what_reads_them(machine: Machine) -> None:
    """And what reads them next comes after that; the host goes on."""
    ours = transfers()
    ours.give([(torch.ones(2), torch.empty(2))])
    ours.join()
    assert machine.log == [
        "stream 2 waits for training",
        "copy on stream 2",
        "memory stays for stream 2",
        "event on stream 2",
        "training waits for stream 2",
    ]


def test_memory_is_locked_as_it_is(machine: Machine) -> None:
    """Not rounded to powers of two; unlocked before it is freed, or when everything is."""
    ours = transfers()
    buffers = [torch.empty(100, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8)]
    for buffer in [*buffers, torch.empty(0)]:
        ours.pin(buffer)
    assert sorted(machine.locked.values()) == [3, 100]
    ours.unpin(buffers[0])
    assert list(machine.locked.values()) == [3]
    assert machine.log == ["host waits for stream 1", "host waits for stream 2"]
    ours.unpin(buffers[0])
    del ours
    assert not machine.locked


def test_memory_that_cannot_be_locked(machine: Machine) -> None:
    machine.status = 2
    with pytest.raises(MemoryError, match=r"100 bytes .* pin_memory=False"):
        transfers().pin(torch.empty(100, dtype=torch.uint8))
    machine.locked.clear()
    without = transfers(pins=False)
    without.pin(torch.empty(100, dtype=torch.uint8))
    assert not machine.locked
