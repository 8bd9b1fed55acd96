"""How bfloat16 parameters keep more bits: float32 masters, and remainders of 16 and of 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizers import U, draw, draw_grads
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param, split_param

INT8 = torch.empty(0, dtype=torch.int8)
SHAPES = ((7,), (33, 70), (16, 256))


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_a_remainder_is_half_of_a_master(state_dtype: Any, backend: str) -> None:
    """The same float32 values at every step; the bfloat16 part rounds ties away from zero."""
    runs = []
    for masters in (True, "remainder"):
        params = draw(torch.bfloat16, SHAPES)
        runs.append(
            (params, optim.AdamW(params, 1e-2, state_dtype=state_dtype, master_weights=masters))
        )
    for seed in range(20):
        for params, optimizer in runs:
            draw_grads(params, seed)
            optimizer.step()
        for p, q in zip(*(params for params, _ in runs), strict=True):
            master = runs[0][1].state[p]["master"]
            remainder = runs[1][1].state[q]["remainder"]
            assert torch.equal(read_param(q, remainder), master)
            tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(p[~tie], q[~tie])
            assert (q[tie].abs() > master[tie].abs()).all()


@pytest.mark.parametrize("bits", [0x7F7FFFFF, 0x3F808000, 0x3F818000, 1, 0x8000, 0x7F800000])
def test_a_remainder_completes_any_float(bits: int, backend: str) -> None:
    """The largest number, ties, subnormals, infinity: unchanged values are reproduced exactly."""
    values = torch.tensor([bits, bits - 2**31], dtype=torch.int32).view(torch.float32)
    p = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = optim.AdamW([p], lr=0.0, master_weights="remainder")
    p.grad = torch.zeros_like(p)
    optimizer.step()
    low = values.view(torch.int32) << 16 >> 16
    with torch.no_grad():
        p.copy_(((values.view(torch.int32) - low) >> 16).to(torch.int16).view(torch.bfloat16))
    optimizer.state[p]["remainder"].copy_(low)
    optimizer.step()
    assert torch.equal(read_param(p, optimizer.state[p]["remainder"]), values)


# The upper 8 bits of patterns of 24: a sign, and all but one bit of an exponent. The lower 16 bits
# are all tried, and carry into the exponent.
_UPPER = torch.tensor([0x00, 0x01, 0x3F, 0x40, 0x7E, 0x7F, 0x80, 0xBF, 0xFE, 0xFF])


def test_every_pattern_returns() -> None:
    """Pairs of a bfloat16 and 8 bits: a step of zero changes no value and no second time.

    A float of 24 bits has one pair in this form, whose bfloat16 is the nearest one.
    """
    patterns = (_UPPER.unsqueeze(1) * 2**16 + torch.arange(2**16)).flatten()
    half = (patterns >> 8).to(torch.int16).view(torch.bfloat16)
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
    pairs = (p.detach()[~nan].view(torch.int16).long() << 8) + remainder[~nan]
    assert len(pairs.unique()) == len(after.view(torch.int32)[~nan].unique()) > 500_000


@pytest.mark.parametrize("last", [0x00, 0x7F, 0x80, 0x81, 0xFF])
def test_every_float_rounds_to_the_nearest(last: int) -> None:
    """The upper 24 bits of float32s, with the last byte at a tie and next to it, exactly."""
    patterns = (_UPPER.unsqueeze(1) * 2**16 + torch.arange(2**16)).flatten()
    exact = patterns.mul(256).int().view(torch.float32)
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
