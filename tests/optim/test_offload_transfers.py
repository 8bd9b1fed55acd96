"""The order of a GPU's copies relative to other work, without a GPU."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._machine import CudaTransfers, allocate_pages


class Machine:
    """Streams, events and page-locked memory that only record calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self.status = 0
        self.last_error = False
        machine = self

        class Stream:
            count = 0

            def __init__(self, device: Any = None) -> None:
                Stream.count += device is not None
                self.name = f"stream {Stream.count}" if device is not None else "training"

            def wait_stream(self, other: Stream) -> None:
                machine.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                machine.log.append(f"{self.name} waits for {event.name}")

            def synchronize(self) -> None:
                machine.log.append(f"host waits for {self.name}")

        class Event:
            count = 0

            def __init__(self, blocking: bool = False) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                Event.count += 1
                self.name = f"event {Event.count} on {stream.name}"
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
                if machine.status == 0:
                    machine.locked[address] = count
                machine.last_error |= machine.status != 0
                return machine.status

            @staticmethod
            def cudaHostUnregister(address: int) -> int:  # noqa: N802
                del machine.locked[address]
                machine.log.append("unlocked")
                return 0

        real_empty = torch.empty

        def empty(*size: Any, device: Any = None, **options: Any) -> Any:
            return real_empty(*size, **options)

        def fill(tensor: Any, value: float) -> None:
            if machine.last_error:  # as a launch of torch's does
                machine.last_error = False
                raise RuntimeError("CUDA error: invalid argument")

        self.on = on
        self.training, self.other = training, Stream()
        self.other.name = "other"
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running[-1])
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.Tensor, "fill_", fill)
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
        "event 1 on stream 1",
        "host waits for event 1 on stream 1",
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
        "event 1 on stream 2",
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
    waits = ["host waits for stream 1", "host waits for stream 2"]
    assert machine.log == [*waits, "unlocked"]
    ours.unpin(buffers[0])
    machine.log.clear()
    ours.fetch([(torch.ones(3), torch.ones(3))])
    del ours
    assert not machine.locked
    # What goes with a copy under way waits for it first.
    assert machine.log[-3:] == [*waits, "unlocked"]


def test_locked_memory_begins_on_a_page() -> None:
    """Two locked buffers share no page, whatever their sizes."""
    buffers = [allocate_pages(nbytes) for nbytes in (0, 1, 64, 4097, 100_000) * 3]
    assert [b.nbytes for b in buffers] == [0, 1, 64, 4097, 100_000] * 3
    pages: set[int] = set()
    for buffer in buffers:
        first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        assert buffer.nbytes == 0 or first % mmap.PAGESIZE == 0
        covered = set(range(first // mmap.PAGESIZE, -(-last // mmap.PAGESIZE)))
        assert not covered & pages
        pages |= covered if buffer.nbytes else set()
        # The page may be shared with memory that is not locked.
        assert buffer.untyped_storage().nbytes() - buffer.nbytes < mmap.PAGESIZE


@pytest.mark.parametrize("way", ["fetch", "give"])
def test_a_copy_follows_another_without_the_host(machine: Machine, way: str) -> None:
    ours = transfers()
    earlier = (ours.give if way == "fetch" else ours.fetch)([])
    machine.log.clear()
    copies = [(torch.ones(2), torch.empty(2))]
    own, others = ("stream 1", "stream 2") if way == "fetch" else ("stream 2", "stream 1")
    getattr(ours, way)(copies, earlier)
    assert machine.log == [
        f"{own} waits for training",
        f"{own} waits for event 1 on {others}",
        f"copy on {own}",
        f"memory stays for {own}",
        f"event 2 on {own}",
    ]


def _offloaded(count: int) -> tuple[Activations, list[Any]]:
    """Saved tensors that left, as the calls that return them, and who keeps them."""
    ours = Activations(transfers(), torch.device("cpu"), around=8)
    saved: list[Any] = []
    with ours.intercept(1):
        saved = [ours._pack(torch.ones(2)) for _ in range(count)]
    return ours, saved


def test_a_piece_waits_for_its_own_copy(machine: Machine) -> None:
    """Not for the piece that is prefetched behind it, and the host waits for nothing."""
    _, saved = _offloaded(3)
    machine.log.clear()
    saved[2]()
    device_waits = [line for line in machine.log if line.startswith("training waits")]
    assert device_waits == ["training waits for event 4 on stream 2"]
    machine.log.clear()
    saved[1]()  # prefetched, as event 5
    device_waits = [line for line in machine.log if line.startswith("training waits")]
    assert device_waits == ["training waits for event 5 on stream 2"]
    assert not any("host waits" in line for line in machine.log)


def test_every_reader_of_a_piece_waits(machine: Machine) -> None:
    """Two streams read one tensor: both wait for the copy, and its memory stays for both."""
    _, (saved,) = _offloaded(1)
    saved()
    machine.log.clear()
    with machine.on(machine.other):
        saved()
    assert machine.log == ["other waits for event 2 on stream 2", "memory stays for other"]


def test_a_chunk_is_filled_again_after_it_was_read(machine: Machine) -> None:
    """A copy from the host that nobody waited for, as after a failed backward pass."""
    ours, saved = _offloaded(2)
    saved[1]()  # prefetches the other one, which is never read
    saved.clear()
    machine.log.clear()
    again = [ours._pack(torch.ones(2)) for _ in range(2)]
    waits = sorted(line for line in machine.log if line.startswith("stream 1 waits for event"))
    assert waits == [f"stream 1 waits for event {at} on stream 2" for at in (3, 4)]
    del again


def test_memory_that_cannot_be_locked(machine: Machine) -> None:
    """Nor does the failure come up again in the next kernel's check."""
    machine.status = 2
    with pytest.raises(MemoryError, match=r"100 bytes .* pin_memory=False"):
        transfers().pin(torch.empty(100, dtype=torch.uint8))
    assert not machine.last_error
    assert not machine.locked
    without = transfers(pins=False)
    without.pin(torch.empty(100, dtype=torch.uint8))
    assert not machine.locked
