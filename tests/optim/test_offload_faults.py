"""Failures leave everything unchanged, and any order of calls has the effects of the optimizer."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
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
from torchweld.optim.offload._buckets import Bucket
from torchweld.optim.offload._machine import (
    Worker,
    count_default_threads,
)


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
def test_any_order_of_calls(calls: list[str], release: bool, placement: str) -> None:
    """Actions between steps have the same effect as without offloading.

    With "auto" the device has room for a part of the states.
    """
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


@pytest.mark.parametrize("clears", [True, False])
def test_an_exception_in_the_backward(clears: bool) -> None:
    """zero_grad forgets gradients on the host; without it they stay."""

    def go(model: Any, optimizer: Any) -> int:
        take_steps(model, optimizer, 0, 1, 2, 3)
        _fail(model, 8)
        sent = count_sent(optimizer)
        if clears:
            optimizer.zero_grad()
        take_steps(model, optimizer, 9)
        return sent

    assert assert_alike(adamw, go) > 0


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
