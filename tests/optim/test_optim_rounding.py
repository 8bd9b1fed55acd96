"""Stochastic rounding of bfloat16 parameters: its numbers, the same ones everywhere."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import torchweld
from optimizers import (
    draw,
    draw_grads,
    maker,
    run,
    run_bits,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.ops.optimizer.rounding import random_bits, round_at, round_stochastically

STATES = [torch.float32, torch.bfloat16, "8bit"]
ROUNDED = {"stochastic_rounding": True}
BF16 = torch.bfloat16


@torch.no_grad()
def _step(optimizer: Any, offset: list[int], number: int = 1) -> None:
    """The step of this number, with the only parameter as if at another place."""
    (task,) = optimizer._tasks()
    task.batch.rounding_offsets = [torch.tensor(offset)]
    task.batch.steps[0].fill_(number - 1)
    optimizer._rule.step(task)


def _moved(value: float, by: float, count: int) -> torch.Tensor:
    """So many parameters of this value, after a step of SGD to value + by."""
    p = torch.full((count,), value, dtype=BF16, requires_grad=True)
    p.grad = torch.full_like(p, -1.0 if by > 0 else 1.0)
    optim.SGD([p], abs(by), **ROUNDED).step()
    return p.detach()


# --- The numbers ------------------------------------------------------------------------------

# Worked out in Python's integers: first element, parameter, step, bits.
KNOWN = [
    (0, 0, 1, [0x2DC1, 0xDEDD, 0xA45A, 0x8F19, 0x0613, 0xF0B9, 0x0426, 0x7122]),
    (2**36 + 5, 3, 1000, [0x7158, 0xAE6B, 0x7762, 0x8B59, 0x13A0, 0x20D0]),
]


@pytest.mark.parametrize(("first", "number", "step", "expected"), KNOWN)
def test_known_answers(first: int, number: int, step: int, expected: list[int]) -> None:
    rows = torch.tensor([[first]])
    found = random_bits(rows, len(expected), number, torch.tensor(step))
    assert found.tolist() == [expected]


@pytest.mark.parametrize(("first", "number", "step", "expected"), KNOWN)
def test_kernels_have_the_known_answers(
    first: int, number: int, step: int, expected: list[int], backend: str
) -> None:
    """An element is rounded up if its random bits and its lower bits carry."""
    for cut in (0x0001, 0x2000, 0x8000, 0xA000, 0xF100):
        p = torch.ones(len(expected), dtype=BF16, requires_grad=True)
        p.grad = -torch.ones_like(p)
        # The last bit of a float above 1 is 2^-23.
        _step(optim.SGD([p], cut * 2.0**-23, **ROUNDED), [number, first, 1], step)
        ups = [bits + cut >= 0x10000 for bits in expected]
        assert (p > 1).tolist() == ups


@pytest.mark.parametrize(
    "bits", [0x3F800000, 0x3F812345, 0xBF81FFFF, 0x00000001, 0x80018000, 0x7F7E0001, 0xFF7EFFFF]
)
def test_every_random_number_makes_it_right_on_average(bits: int) -> None:
    """The share of the 2^16 that round away from zero is exactly the value of the lower bits."""
    value = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    random = torch.arange(2**16, dtype=torch.int32)
    found = round_stochastically(value.expand(2**16), random).view(torch.int16).int() & 0xFFFF
    assert set(found.tolist()) <= {bits >> 16, (bits >> 16) + 1}
    assert (found != bits >> 16).sum() == bits & 0xFFFF


def test_bytes_of_the_bits_are_uniform() -> None:
    """Chi-square with 255 degrees of freedom, five sigma: over elements, steps and parameters."""
    zero = torch.tensor([[0]])
    samples = [
        random_bits(zero, 2**18, 0, torch.tensor(1)).flatten(),
        torch.cat([random_bits(zero, 256, n, torch.tensor(1)).flatten() for n in range(512)]),
        torch.cat([random_bits(zero, 256, 0, torch.tensor(t)).flatten() for t in range(512)]),
    ]
    for bits, shift in itertools.product(samples, (0, 8)):
        counts = (bits >> shift & 255).bincount(minlength=256).double()
        expected = bits.numel() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_what_is_exact_or_not_finite(backend: str) -> None:
    """Unchanged; beyond the largest number rounding is to the nearest, as without randomness."""
    largest = torch.finfo(BF16).max
    values = [0.0, -0.0, 1.0, -1.5, 2.0**-133, largest, -largest, torch.inf, -torch.inf, torch.nan]
    p = torch.tensor(values).repeat(50).to(BF16)
    p.view(torch.int16)[p.isnan()] = 0x7FC0
    before = p.clone()
    p.requires_grad_().grad = torch.zeros_like(p)
    optimizer = optim.SGD([p], 1.0, **ROUNDED)
    for _ in range(3):
        optimizer.step()
    assert torch.equal(p.view(torch.int16), before.view(torch.int16))
    gap = 2.0**120
    for by, after in ((0.49 * gap, largest), (0.51 * gap, torch.inf)):
        assert _moved(largest, by, 400).unique().tolist() == [after]
        assert _moved(-largest, -by, 400).unique().tolist() == [-after]


def test_steps_too_small_for_the_nearest_number(backend: str) -> None:
    """They are lost without it; with it the mean moves as in float32, within four sigma."""
    steps, lr, count = 100, 1e-5, 2**14
    means = []
    for rounding in (False, True):
        p = torch.ones(count, dtype=BF16, requires_grad=True)
        p.grad = torch.ones_like(p)
        optimizer = optim.SGD([p], lr, stochastic_rounding=rounding)
        for _ in range(steps):
            optimizer.step()
        means.append(p.double().mean().item())
    assert means[0] == 1
    # A step's variance is at most its size times the gap below 1.
    sigma = (steps * lr * 2.0**-8 / count) ** 0.5
    assert abs(means[1] - (1 - steps * lr)) < 4 * sigma < 0.1 * steps * lr


# --- The same everywhere ------------------------------------------------------------------------


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 300)),
    before=st.tuples(st.integers(0, 2**20), st.integers(0, 2**16), st.integers(0, 9)),
    after=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    state_dtype=st.sampled_from(STATES),
)
@example((3, 4, 16), (5, 8, 4), (1, 0, 8), "8bit")
@example((4, 6, 1), (0, 0, 2), (0, 0, 5), torch.float32)
@example((4, 6, 300), (2**20, 2**16, 0), (0, 0, 0), "8bit")
def test_a_part_is_rounded_as_in_the_whole(
    backend: str,
    sizes: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
    state_dtype: Any,
) -> None:
    """Any part of a whole of any size: all kernels equal the reference."""
    rows, columns = (b + n + a for b, n, a in list(zip(before, sizes, after, strict=True))[1:])
    strides = [rows * columns, columns, 1]
    offset = [5, sum(b * s for b, s in zip(before, strides, strict=True)), *strides]
    results = []
    for name in (None, "eager"):
        params = draw(BF16, [sizes])
        optimizer = maker(optim.Lion, ROUNDED, state_dtype)(params)
        draw_grads(params, 0)
        if name is None:
            _step(optimizer, offset)
        else:
            with torchweld.use_backend(name):
                _step(optimizer, offset)
        results.append(snapshot(params, optimizer))
    assert same(*results)


def test_the_reference_of_a_part_is_a_part_of_the_reference() -> None:
    whole = torch.randn(6, 5, 44, generator=torch.Generator().manual_seed(0))
    strides, step = list(whole.stride()), torch.tensor(4.0)
    expected = round_at(whole, torch.tensor([2, 0, *strides]), step)
    assert not torch.equal(expected, whole.bfloat16())
    for part in ((3, 1, 13), (0, 0, 0), (5, 4, 43)):
        first = sum(b * s for b, s in zip(part, strides, strict=True))
        here = tuple(slice(b, None) for b in part)
        found = round_at(whole[here], torch.tensor([2, first, *strides]), step)
        assert torch.equal(found, expected[here])


# --- The numbers of parameters -------------------------------------------------------------------


def test_steps_and_parameters_draw_their_own() -> None:
    """The number counts all of the optimizer's parameters, with a gradient or without."""
    values = torch.full((4096,), 1.0)
    made = [values.to(BF16).requires_grad_() for _ in range(4)]
    optimizer = optim.SGD([{"params": made[:2]}, {"params": made[2:3]}], 2.0**-8, **ROUNDED)
    optimizer.add_param_group({"params": made[3:]})
    for p in (made[0], made[2], made[3]):
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    moved = values - values.new_tensor(0.5 * 2.0**-8)
    for number in (0, 2, 3):
        expected = round_at(moved, torch.tensor([number, 0, 1]), torch.tensor(1))
        assert torch.equal(made[number], expected)
    assert torch.equal(made[1], values)
    assert not torch.equal(made[0], made[2])
    first = made[0].detach().clone()
    with torch.no_grad():
        made[0].fill_(1.0)
    optimizer.step()
    assert not torch.equal(made[0], first)


def test_torchs_generators_are_left_alone(backend: str) -> None:
    """Ranks seed theirs differently, and replicas must stay equal."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(run_bits(maker(optim.AdamW, ROUNDED), 2, BF16))
        assert torch.equal(before, torch.get_rng_state())
    assert same(*found)


def test_a_copy_and_a_loaded_state_are_rounded() -> None:
    """Also after a state that was kept without it."""
    _, optimizer = run(maker(optim.AdamW, ROUNDED), dtype=BF16)
    assert copy.deepcopy(optimizer)._codec.stochastic_rounding
    optimizer.load_state_dict(run(maker(optim.AdamW, {}), dtype=BF16)[1].state_dict())
    assert optimizer._codec.stochastic_rounding


def test_other_dtypes() -> None:
    """float32 and float64 are not rounded; float16 is rejected before anything is written."""
    for dtype in (torch.float32, torch.float64):
        plain, asked = (run_bits(maker(optim.AdamW, s), 2, dtype) for s in ({}, ROUNDED))
        assert same(plain, asked)
    params = [torch.ones(4, dtype=dtype, requires_grad=True) for dtype in (BF16, torch.float16)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = optim.AdamW(params, **ROUNDED)
    with pytest.raises(torchweld.ArgumentError, match=r"float16.*bfloat16"):
        optimizer.step()
    assert all((p == 1).all() for p in params)
    assert not optimizer.state
