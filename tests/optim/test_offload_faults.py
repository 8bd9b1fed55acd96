"""Offload: failures change nothing, any order of calls, and the order of a GPU's copies."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import pickle
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offloading import (
    SimulatedTransfers,
    adamw,
    assert_alike,
    assert_same_run,
    backward,
    count_sent,
    loss_of,
    offloaded,
    small_model,
    take_steps,
    train,
    values,
)
from torchweld import optim
from torchweld.errors import ArgumentError
from torchweld.optim._codecs import Codec
from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._buckets import Bucket
from torchweld.optim.offload._machine import (
    CudaTransfers,
    Worker,
    allocate_pages,
    count_default_threads,
)

# Varying numbers of backward passes before a step: gradients are sent again.
MANY = [call for micro in (1, 3, 3, 2, 1) for call in (*["backward"] * micro, "step")]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.sampled_from(["step", "backward", "zero", "clip", "fail", "skip", "save", "write"]),
        min_size=4,
        max_size=14,
    ),
    st.booleans(),
    st.sampled_from(["cpu", "auto"]),
)
@example(["break", "backward", "step"], False, "cpu")
@example(["fail", "backward", "step"], False, "auto")
@example(MANY, False, "cpu")
@example(MANY, True, "cpu")
def test_any_order_of_calls(calls: list[str], release: bool, placement: str) -> None:
    """The effect is that without offloading; with "auto" there is room for a part of the states."""
    if release:  # others cannot write a gradient that has left
        calls = [call for call in calls if call != "clip"]

    def go(model: Any, optimizer: Any) -> None:
        take_steps(model, optimizer, 0, 1, 2)
        for at, call in enumerate(calls):
            if call == "step":
                optimizer.step()
                optimizer.zero_grad()
            elif call == "backward":
                backward(model, 10 + at)
            elif call == "zero":
                optimizer.zero_grad()
            elif call == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            elif call == "fail":
                _fail(model, 10 + at)
                optimizer.zero_grad()
            elif call == "break" and not release:  # the gradients before it stay
                _fail(model, 10 + at)
                assert not isinstance(optimizer, optim.Offload) or count_sent(optimizer)
            elif call == "skip":
                model[0].requires_grad_(not model[0].weight.requires_grad)
            elif call == "save":
                optimizer.load_state_dict(optimizer.state_dict())
            elif call == "write":
                with torch.no_grad():
                    model[2].bias.add_(1)
                optimizer.refresh_masters()

    assert_alike(
        partial(adamw, max_grad_norm=None if release else 10.0),
        go,
        release_gradients=release,
        placement=placement,
        transfers=SimulatedTransfers(capacity=500_000),
    )


class _BrokenError(Exception):
    pass


def _fail(model: torch.nn.Module, seed: int) -> None:
    """A backward that fails in the middle, after some gradients."""

    def broken(_: Any) -> None:
        raise _BrokenError

    hidden: list[torch.Tensor] = []
    hook = model[0].register_forward_hook(lambda *given: hidden.append(given[2]))
    loss = loss_of(model, seed)
    hook.remove()
    if hidden[0].requires_grad:
        hidden[0].register_hook(broken)
        with pytest.raises(_BrokenError):
            loss.backward()


def test_no_room_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step, after some states: nothing has stepped, and the step can be repeated."""
    model = small_model()
    optimizer = offloaded(adamw, release_gradients=True)(list(model.parameters()))
    backward(model, 0)
    new_state, made = Codec.new_state, []

    def exhausted(self: Codec, p: torch.Tensor, moments: Any) -> Any:
        made.append(p)
        if len(made) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return new_state(self, p, moments)

    before = values(model)
    with monkeypatch.context() as patched:
        patched.setattr(Codec, "new_state", exhausted)
        with pytest.raises(MemoryError, match=r"no room for states of \d+ parameters.*Nothing was"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    optimizer.step()
    optimizer.zero_grad()
    expected = train(adamw, steps=2)
    backward(model, 1)
    optimizer.step()
    assert_same_run((model, optimizer), expected[:2])


def test_no_room_for_buffers() -> None:
    """The original optimizer is unchanged."""

    class Full(SimulatedTransfers):
        def pin(self, buffer: torch.Tensor) -> None:
            if len(self.pinned) == 3:
                raise MemoryError("pinned")
            super().pin(buffer)

    transfers = Full()
    model, given, _ = train(adamw)
    expected = train(adamw, steps=5)
    with pytest.raises(MemoryError, match="pinned"):
        optim.Offload(given, transfers=transfers, bucket_bytes=1000)
    assert not transfers.pinned
    backward(model, 4)
    given.step()
    assert_same_run((model, given), expected[:2])


def test_threads_are_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    worker = Worker(before + 1)
    assert worker.call(torch.get_num_threads) == before + 1
    assert torch.get_num_threads() == before
    worker.stop()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for ranks, expected in (("1", 63), ("8", 7), ("128", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert count_default_threads() == expected


def test_a_bucket_that_fails_leaves_the_others_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host and the device have the same parameters afterwards, and a later step steps all."""
    run = Bucket.run
    model = small_model()
    optimizer = offloaded(adamw)(list(model.parameters()))
    take_steps(model, optimizer, 0, 1)

    def fail(bucket: Any, *numbers: Any) -> None:
        if bucket is optimizer._store.buckets[1]:
            raise RuntimeError("no more threads")
        run(bucket, *numbers)

    backward(model, 2)
    before = values(model)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "run", fail)
        with pytest.raises(RuntimeError, match="no more threads"):
            optimizer.step()
    for bucket in optimizer._store.buckets:
        for m in bucket.members:
            assert torch.equal(m.param, m.twin)
    pairs = zip(values(model), before, strict=True)
    stays = [m.param for m in optimizer._store.buckets[1].members]
    for p, (now, old) in zip(model.parameters(), pairs, strict=True):
        assert torch.equal(now, old) == any(p is one for one in stays)
    optimizer.zero_grad()
    take_steps(model, optimizer, 3)


def test_no_copies_or_pickles() -> None:
    """A thread and hooks cannot be copied: an error instead of an optimizer without attributes."""
    optimizer = train(offloaded(adamw), steps=1)[1]
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match="its state_dict"):
            copies(optimizer)


def _outcome_in_a_child(action: Any) -> int:
    """Fork, run the action there, and return its exit status; -SIGKILL if it does not end."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except ArgumentError as error:
            os._exit(3 if "forked" in str(error) else 4)
        except BaseException:
            os._exit(5)
        os._exit(0)
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_forked_process_has_no_thread(has_gradients: bool) -> None:
    """step() raises an error there instead of waiting; reading states works."""
    model, optimizer, _ = train(offloaded(adamw), steps=3)
    if has_gradients:
        backward(model, 3)
    actions = [optimizer.step, optimizer.zero_grad, optimizer.state_dict]
    assert [_outcome_in_a_child(action) for action in actions] == [3, 0, 0]
    # The parent goes on.
    if not has_gradients:
        backward(model, 3)
    optimizer.step()
    assert_same_run((model, optimizer), train(adamw, steps=4)[:2])


@pytest.mark.parametrize("whole", [False, True], ids=["step", "step in a function"])
def test_a_compiled_step_is_left_out_of_graphs(whole: bool) -> None:
    """The numbers equal the step's own, and gradients leave as early."""
    torch.compiler.reset()
    model = small_model()
    optimizer = offloaded(adamw)(list(model.parameters()))

    sent = 0

    @torch.compiler.disable
    def count() -> None:
        nonlocal sent
        sent += count_sent(optimizer)

    def train_step(step: int) -> None:
        backward(model, step)
        count()
        optimizer.step()
        optimizer.zero_grad()

    compiled: Any = torch.compile(train_step if whole else optimizer.step, backend="eager")
    for step in range(4):
        if whole:
            compiled(step)
        else:
            backward(model, step)
            count()
            compiled()
            optimizer.zero_grad()
    expected = train(offloaded(adamw))
    assert_same_run((model, optimizer), expected[:2])
    assert sent == expected[2] > 0


# --- The order of a GPU's copies relative to other work, without a GPU ----------------------------


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


@pytest.mark.parametrize("way", ["fetch", "give"])
def test_the_order_of_copies(machine: Machine, way: str) -> None:
    """After what made or reads the tensors; their memory stays; only asked, the host waits."""
    ours, copies = transfers(), [(torch.ones(2), torch.empty(2))]
    own, others = ("stream 1", "stream 2") if way == "fetch" else ("stream 2", "stream 1")
    first = getattr(ours, way)(copies * 2)
    copied = [f"copy on {own}", f"memory stays for {own}"]
    assert machine.log == [f"{own} waits for training", *copied * 2, f"event 1 on {own}"]
    machine.log.clear()
    first.synchronize()
    ours.join()  # what reads parameters comes after they have returned
    assert machine.log == [f"host waits for event 1 on {own}", "training waits for stream 2"]
    machine.log.clear()
    (ours.give if way == "fetch" else ours.fetch)([], first)
    waits = [f"{others} waits for training", f"{others} waits for event 1 on {own}"]
    assert machine.log == [*waits, f"event 2 on {others}"]


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
    machine.log.clear()
    with machine.on(machine.other):  # two streams read one tensor: its memory stays for both
        saved[1]()
    assert machine.log == ["other waits for event 5 on stream 2", "memory stays for other"]


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
