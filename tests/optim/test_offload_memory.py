"""Where bytes are: as in the formula in every mode, and under changing pressure."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offloading import (
    SimulatedTransfers,
    adamw,
    assert_same_run,
    backward,
    offloaded,
    small_model,
    train,
)
from torchweld import optim
from torchweld.optim.offload._policy import MARGIN, Placement, Seen, choose_resident

COUNT = 256 * 1024  # parameters of one large matrix
# Bytes of AdamW's states per parameter (docs/optimizers.md), by dtype and codec.
STATES: list[tuple[torch.dtype, dict[str, Any], float]] = [
    (torch.float32, {}, 8),
    (torch.bfloat16, {"master_weights": True}, 12),
    (torch.bfloat16, {"master_weights": "remainder"}, 10),
    (torch.bfloat16, {"master_weights": True, "state_dtype": torch.bfloat16}, 8),
    (torch.bfloat16, {"master_weights": True, "state_dtype": "8bit"}, 6 + 1 / 32),
    (torch.bfloat16, {"master_weights": "remainder", "state_dtype": "8bit"}, 4 + 1 / 32),
]
STEP = 4  # bytes of the count of a tensor's steps


def matrix(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1024, 256, bias=False).to(dtype)


def after_a_backward(dtype: torch.dtype, codec: Any, **arguments: Any) -> Any:
    """After two steps, with the third one's gradients on the host."""
    model = matrix(dtype)
    optimizer = offloaded(partial(optim.AdamW, **codec), **arguments)(list(model.parameters()))
    for step in range(3):
        model(torch.ones(2, 1024, dtype=dtype)).float().square().mean().backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(("dtype", "codec", "states"), STATES)
@pytest.mark.parametrize("release", [False, True])
def test_bytes_for_a_parameter(
    dtype: torch.dtype, codec: Any, states: float, release: bool
) -> None:
    """The device: the parameter, and its gradient until it has left. The host: both, and states."""
    optimizer = after_a_backward(dtype, codec, release_gradients=release)
    size = dtype.itemsize
    memory = optimizer.memory()
    assert memory["device"] == {
        "parameters": size * COUNT,
        "gradients": 0 if release else size * COUNT,
        "states": 0,
        "activations": 0,
    }
    assert memory["host"] == {
        "parameters and gradients": 2 * size * COUNT,
        "states": states * COUNT + STEP,
        "activations": 0,
    }
    # As measured: the storages of these tensors.
    held = [bucket.buffers for bucket in optimizer._store.buckets]
    stored = [b.untyped_storage().nbytes() - b.nbytes for some in held for b in some]
    assert sum(b.nbytes for some in held for b in some) == 2 * size * COUNT
    assert max(stored) < mmap.PAGESIZE  # each buffer begins on a page
    assert sum(optimizer._transfers.pinned.values()) == 2 * size * COUNT


def test_bytes_on_the_device() -> None:
    for placement in ("cuda", "auto"):
        optimizer = after_a_backward(torch.bfloat16, {"master_weights": True}, placement=placement)
        memory = optimizer.memory()
        assert memory["device"]["states"] == 12 * COUNT + STEP
        assert not any(memory["host"].values())
        assert not optimizer._transfers.pinned


def test_traffic() -> None:
    """A gradient leaves once, and a parameter returns once: four bytes for each in bfloat16."""
    transfers = SimulatedTransfers()
    optimizer = after_a_backward(torch.bfloat16, {"master_weights": True}, transfers=transfers)
    optimizer.step()
    made = 1  # the parameter's copy when the optimizer is made
    assert (transfers.fetched_bytes, transfers.given_bytes) == (
        2 * COUNT * (3 + made),
        2 * COUNT * 3,
    )


def test_auto_follows_the_pressure() -> None:
    """Others use more of the device, then less: states leave and return, and bits are equal.

    The device raises an error on a lack of memory. The others' use grows by less than the margin
    per step, except where everything leaves.
    """
    capacity = 800_000
    pressure = [0, 0, 0, 60_000, 120_000, 180_000, 240_000, 300_000, 400_000, 480_000]
    pressure += [480_000, 100_000, 0, 0, 0, 0]
    others = [0]
    transfers = SimulatedTransfers(capacity, lambda: others[0])
    model = small_model()
    optimizer = offloaded(adamw, placement="auto", transfers=transfers)(list(model.parameters()))
    on_device = []
    for step, others[0] in enumerate(pressure):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        on_device.append(optimizer.memory()["device"]["states"])
        # The gradients and the others' memory are counted at their peak.
        seen = max(pressure[max(0, step - 2) : step + 1])
        params = sum(p.nbytes for p in model.parameters())
        assert on_device[-1] + 2 * params + seen <= max(MARGIN * capacity, 2 * params + seen)
    assert on_device[0] > on_device[7] > on_device[10] == 0
    assert on_device[-1] == on_device[0]
    expected = train(adamw, steps=len(pressure))
    assert_same_run((model, optimizer), expected[:2])


@pytest.mark.parametrize("release", [False, True])
def test_auto_charges_what_a_phase_uses(release: bool) -> None:
    """The forward's activations and the backward's gradients are not there at the same time.

    Four layers, one a bucket: the device has room for the states of three of them.
    """
    size, layers = 64 * 64, 4
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))).bfloat16()
    params, states = 2 * size * layers, 12 * size + STEP
    others = [0]
    forward, backward_peak = 3 * params, params  # others' bytes
    first_gradient = 2 * size  # it ends the forward
    needed = params + max(forward + first_gradient, backward_peak + params) + 3 * states
    if release:
        needed += 3 * 2 * size
    transfers = SimulatedTransfers(int(needed / MARGIN) + 8, lambda: others[0])
    optimizer = offloaded(
        partial(optim.AdamW, master_weights=True),
        placement="auto",
        release_gradients=release,
        transfers=transfers,
        bucket_bytes=2 * size,
    )(list(model.parameters()))
    on_device = []
    for _ in range(6):
        others[0] = forward
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean()
        last: Any = model[-1]
        hook = last.weight.register_post_accumulate_grad_hook(
            lambda _: others.__setitem__(0, backward_peak)
        )
        loss.backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        on_device.append(sum(bucket.home == "cuda" for bucket in optimizer._store.buckets))
    # The first step does not show whether gradients outlive it, and is remembered for three.
    assert on_device[-1] == 3
    assert on_device[0] < 3 or release


def test_relieve_takes_all_to_the_host() -> None:
    model, optimizer, _ = train(offloaded(adamw, placement="auto"))
    assert optimizer.memory()["device"]["states"] > 0
    backward(model, 4)
    optimizer.relieve()
    assert optimizer.memory()["device"]["states"] == 0
    optimizer.step()
    expected = train(adamw, steps=5)
    assert_same_run((model, optimizer), expected[:2])


# --- The policy on traces, recorded and random ones ---------------------------------------------


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(-50, 900))
def test_the_first_buckets_stay(sizes: list[int], room: int) -> None:
    chosen = choose_resident(sizes, room)
    count = sum(chosen)
    assert chosen == [True] * count + [False] * (len(sizes) - count)
    assert sum(sizes[:count]) <= max(room, 0)
    assert count == len(sizes) or sum(sizes[: count + 1]) > room


def test_the_last_three_steps_are_remembered() -> None:
    """A trace as a device recorded it: bytes in use, and what the placement knew of them."""
    placement, found = Placement(), []
    for in_use, placed in [(9, 4), (7, 4), (6, 4), (5, 4), (3, 4)]:
        phases = {"backward": Seen(in_use, placed), "step": Seen(placed, placed)}
        found.append(sum(placement.decide(phases, [1] * 20, 10)))
    assert found == [9 - others for others in (5, 5, 5, 3, 2)]


def test_gradients_may_outlive_the_first_step() -> None:
    """One step shows nothing of it, and a later one does."""
    placement = Placement()
    first = {"forward": Seen(50, 0, may_come=30), "backward": Seen(60, 0)}
    assert sum(placement.decide(first, [10] * 9, 100)) == 1  # 90 - 80
    for _ in range(2):
        assert sum(placement.decide(first, [10] * 9, 100)) == 1  # three steps are remembered
    assert sum(placement.decide(first, [10] * 9, 100)) == 3  # 90 - 60
    grown = first | {"forward": Seen(50 + 30 + 30, 30)}
    assert sum(placement.decide(grown, [10] * 9, 100)) == 1
    placement.forget()
    assert sum(placement.decide(first, [10] * 9, 100, keep=lambda room: room)) == 0
