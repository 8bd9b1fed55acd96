"""How parameters are stored: stochastic rounding, masters, remainders, and any memory layout."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchweld
from optimizers import U, draw, draw_grads, maker, run, run_bits, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param, split_param
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


# --- Masters and remainders -----------------------------------------------------------------------


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
    remainder = optimizer.state[p]["remainder8"]
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
        entry = {True: "master", "remainder8": "remainder8", False: None}[masters]
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


# --- Layouts --------------------------------------------------------------------------------------


SHAPE = (5, 6, 70)
# An order of dimensions, and whether there are gaps between elements.
LAYOUT = st.tuples(st.permutations(range(len(SHAPE))), st.booleans())
F32 = torch.float32
STORED: list[tuple[Any, ...]] = [
    *((kind, {}, F32, F32, False) for kind in (optim.AdamW, optim.Lion, optim.LAMB)),
    (optim.LARS, {"momentum": 0.9}, F32, F32, False),
    (optim.AdamW, {}, F32, "8bit", False),
    (optim.AdamW, {}, torch.float16, BF16, True),
    (optim.AdamW, {}, BF16, F32, "remainder"),
    (optim.AdamW, {}, BF16, F32, "rounded"),
    (optim.TransformersAdafactor, {"lr": None, "beta1": 0.9}, BF16, F32, True),
]


def lay_out(t: torch.Tensor, order: list[int], gaps: bool) -> torch.Tensor:
    """The same numbers, with dimensions in this order in memory."""
    sizes = [t.shape[d] for d in order]
    room = torch.full((*sizes, 2), 7, dtype=t.dtype)
    there = room[..., 0] if gaps else torch.empty(sizes, dtype=t.dtype)
    back = sorted(range(t.ndim), key=order.__getitem__)
    return there.permute(back).copy_(t)


def share_ratios(optimizer: Any, known: list[torch.Tensor]) -> None:
    """Make an adaptive rule use these ratios, and record its own where there is none.

    Its own ratios have sums in another order: n products in float64, each sum within n/2 roundings,
    a ratio of two roots within n, and so two ratios within 2n; and a few more.
    """
    own, bound = optimizer._ratios_of, (torch.Size(SHAPE).numel() + 8) * 2**-52
    to_come = iter(list(known))

    def ratios(of_norms: Any, *norms: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = of_norms(*norms)
        expected = next(to_come, None)
        if expected is None:
            known.append(found)
            return found
        torch.testing.assert_close(found, expected, rtol=bound, atol=0)
        return expected

    def ratios_of(*arguments: Any) -> Any:
        of_norms = own(*arguments)
        return of_norms and functools.partial(ratios, of_norms)

    optimizer._ratios_of = ratios_of


@settings(max_examples=10)
@given(layouts=st.lists(LAYOUT, min_size=5, max_size=5))
@pytest.mark.parametrize(("kind", "options", "dtype", "state_dtype", "masters"), STORED, ids=str)
def test_no_layout_changes_a_step(
    kind: Any,
    options: Any,
    dtype: torch.dtype,
    state_dtype: Any,
    masters: Any,
    layouts: list[Any],
    backend: str,
) -> None:
    """Each of a parameter's tensors has its own layout, or all have the same."""
    results: list[list[torch.Tensor]] = []
    ratios: list[torch.Tensor] = []
    for of_each in (None, layouts, layouts[:1] * len(layouts)):
        p = draw(dtype, [SHAPE])[0]
        optimizer = maker(kind, options, state_dtype, masters)([p])
        share_ratios(optimizer, ratios)
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            p.grad = torch.randn(SHAPE, generator=generator).to(dtype)
            if of_each and seed == 1:
                p.data, p.grad = (
                    lay_out(t, *at) for t, at in zip((p, p.grad), of_each, strict=False)
                )
                state = optimizer.state[p]
                like_p = [name for name, value in state.items() if value.shape == p.shape]
                for name, at in zip(like_p, of_each[2:], strict=False):
                    state[name] = lay_out(state[name], *at)
                written = {name: state[name] for name in like_p}
            optimizer.step()
        if of_each:
            assert all(optimizer.state[p][name] is t for name, t in written.items())
        results.append([p.detach(), *optimizer.state[p].values()])
    assert all(same(found, results[0]) for found in results[1:])
    assert len(ratios) == (2 if kind in (optim.LAMB, optim.LARS) else 0)


def test_what_lies_alike_is_not_copied() -> None:
    """Channels-last weights and their gradients, as convolutions have them."""
    p = draw(shapes=[(64, 32, 3, 3)])[0].detach().to(memory_format=torch.channels_last)
    p.requires_grad_()
    optimizer = optim.AdamW([p], max_grad_norm=1.0)
    p.grad = torch.randn_like(p)
    optimizer.step()
    for grad, copies in ((p.grad, set()), (p.grad.contiguous(), {"aten::contiguous"})):
        p.grad = grad
        with torch.profiler.profile(acc_events=True) as profile:
            optimizer.step()
        assert {event.key for event in profile.key_averages()} & {"aten::contiguous"} == copies


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
def test_expanded_gradients_and_complex_numbers(state_dtype: Any, backend: str) -> None:
    """An expanded gradient's elements share memory. Strided parameters keep their strides."""
    made = []
    for module, stored in (
        (optim, {"state_dtype": state_dtype, "min_quantized_size": 0}),
        (torch.optim, {}),
    ):
        drawn = [p.detach() for p in draw(shapes=[(64, 20), (50, 6), (50, 6)])]
        params = [drawn[0][:, ::2], drawn[1], torch.view_as_complex(drawn[2].reshape(50, 3, 2))]
        optimizer = module.AdamW(params, 1e-2, **stored)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            params[1].grad = torch.randn(6, generator=generator).expand(50, 6)
            optimizer.step()
        made.append(params)
    atol = {torch.float32: 1e-7, torch.bfloat16: 1e-3}.get(state_dtype, 6e-3)
    for p, q in zip(*made, strict=True):
        assert p.stride() == q.stride()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=atol)
