"""Parameters of 24 bits, a bfloat16 and 8 more: every bit pattern, and trajectories."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimizers import U, draw, draw_grads, run, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param, split_param

INT8 = torch.empty(0, dtype=torch.int8)
SHAPES = ((7,), (33, 70), (16, 256))


def _every_pattern() -> Iterator[torch.Tensor]:
    """The float32 of each of 2^24 patterns, in parts that a cache holds."""
    for first in range(-(2**23), 2**23, 2**16):
        patterns = torch.arange(first, first + 2**16, dtype=torch.int64)
        yield patterns.mul(256).int().view(torch.float32)


def test_every_pattern_returns() -> None:
    """All 2^24 pairs of a bfloat16 and 8 bits: a step of zero changes no value and no second time.

    A float of 24 bits has one pair in this form, whose bfloat16 is the nearest one.
    """
    patterns = torch.arange(2**24, dtype=torch.int64)
    half = (patterns >> 8).sub(2**15).to(torch.int16).view(torch.bfloat16)
    low = (patterns & 0xFF).sub(2**7).to(torch.int8)
    p = half.clone().requires_grad_()
    p.grad = torch.zeros_like(p)
    optimizer = optim.SGD([p], 0.0, master_weights="remainder8")
    optimizer.step()
    with torch.no_grad():
        p.copy_(half)
    remainder = optimizer.state[p]["remainder"]
    assert remainder.dtype == torch.int8
    remainder.copy_(low)
    before = read_param(half, low)
    optimizer.step()
    after, once = read_param(p.detach(), remainder), [p.detach().clone(), remainder.clone()]
    nan = before.isnan()
    assert torch.equal(before.view(torch.int32)[~nan], after.view(torch.int32)[~nan])
    assert after[nan].isnan().all()
    assert p.isnan()[nan].all()
    optimizer.step()
    assert torch.equal(p.view(torch.int16), once[0].view(torch.int16))
    assert torch.equal(remainder, once[1])
    # The number of NaN patterns with sign, of 24 bits.
    pairs = (p.detach()[~nan].view(torch.int16).long() << 8) + remainder[~nan]
    assert len(pairs.unique()) == 2**24 - 2 * (2**15 - 1)


@pytest.mark.parametrize("last", [0x00, 0x7F, 0x80, 0x81, 0xFF])
def test_every_float_rounds_to_the_nearest(last: int) -> None:
    """The upper 24 bits of every float32, with the last byte at a tie and next to it, exactly."""
    for exact in _every_pattern():
        _assert_rounds_to_the_nearest(exact, last)


def _assert_rounds_to_the_nearest(exact: torch.Tensor, last: int) -> None:
    value = (exact.view(torch.int32) | last).view(torch.float32)
    half, low = split_param(value, torch.bfloat16, INT8)
    assert low is not None
    found = read_param(half, low)
    finite = exact.isfinite()
    # Beyond the largest float of 24 bits lies infinity, as in every rounding.
    up = (exact.view(torch.int32) + 256).view(torch.float32)
    even = (exact.view(torch.int32) & 256) == 0
    expected = torch.where(even, exact, up) if last == 0x80 else (up if last > 0x80 else exact)
    assert torch.equal(found[finite], expected[finite])
    assert found[value.isnan()].isnan().all()
    # The bfloat16 is as near as a bfloat16 can be.
    sound = finite & expected.isfinite() & half.isfinite()
    spacing = (half.float().double() - expected.double()).abs()[sound]
    nearest = (expected.to(torch.bfloat16).double() - expected.double()).abs()[sound]
    assert torch.equal(spacing, nearest)


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"], ids=str)
def test_a_trajectory_is_near_that_of_masters(state_dtype: Any, backend: str) -> None:
    """Steps of 2^-14 of a parameter, which bfloat16 loses, and float32 masters keep."""
    found = {}
    for masters in (True, "remainder8", False):
        params = draw(torch.bfloat16, SHAPES)
        optimizer = optim.SGD(params, 2.0**-12, master_weights=masters)
        for seed in range(30):
            draw_grads(params, seed, 0.25)
            optimizer.step()
        entry = {True: "master", "remainder8": "remainder", False: None}[masters]
        found[masters] = [
            p.detach().float()
            if entry is None
            else read_param(p.detach(), optimizer.state[p][entry])
            for p in params
        ]
    for exact, short, plain in zip(found[True], found["remainder8"], found[False], strict=True):
        bound = 30 * 2.0**-16 * exact.abs() / 2 + 30 * U
        assert ((short - exact).abs() <= 2 * bound).all()
        assert (plain - exact).norm() > 3 * (short - exact).norm()


@pytest.mark.parametrize("masters", [True, "remainder", "remainder8", False])
@pytest.mark.parametrize("into", [True, "remainder", "remainder8"])
def test_checkpoints_of_other_masters(masters: Any, into: Any) -> None:
    params, optimizer = run(
        lambda p: optim.AdamW(p, 1e-3, master_weights=masters), 3, torch.bfloat16, SHAPES
    )
    others = [p.detach().clone().requires_grad_() for p in params]
    again = optim.AdamW(others, 1e-3, master_weights=into)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(params, others, strict=True):
        state, new = optimizer.state[p], again.state[q]
        full = p.detach().float() if not masters else read_param(p, _completion(state))
        # A tie's neighbour is one unit of its completion away.
        unit = {True: 0.0, "remainder": 2.0**-22, "remainder8": 2.0**-15}[into]
        off = (read_param(q.detach(), _completion(new)) - full).abs()
        assert (off <= unit * full.abs()).all()
    if masters == into:
        for some, one in ((params, optimizer), (others, again)):
            draw_grads(some, 9)
            one.step()
        assert same(snapshot(params, optimizer), snapshot(others, again))


def _completion(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return state["master"] if "master" in state else state["remainder"]
