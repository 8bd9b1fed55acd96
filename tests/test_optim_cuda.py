"""The CUDA kernels of optimizers: the reference's bits, wherever tensors lie and numbers are.

In the emulator, on CPU tensors, and on a GPU where there is one.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from conftest import EMULATED
from optimizers import (
    CODECS,
    MATRICES,
    RULES,
    SHAPES,
    Optimizer,
    U,
    assert_same_but_for_ties,
    draw,
    draw_grads,
    maker,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.ops._optimizer import sum_of_squares

STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any, cuda_device: str
) -> None:
    """Every codec with each of the rule's branches."""
    for kind, settings in RULES:
        make = maker(kind, settings, state_dtype, masters)
        with torchweld.use_backend("eager"):
            expected = snapshot(*run(make, 2, dtype, device=cuda_device))
        assert same(snapshot(*run(make, 2, dtype, device=cuda_device)), expected), (kind, settings)


@STATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_tensors_that_lie_anywhere(
    dtype: torch.dtype, state_dtype: Any, offset: int, cuda_device: str
) -> None:
    """Off by so many elements, of odd sizes; what lies around them stays as it is."""
    shapes = [(1,), (3,), (255,), (256,), (257,), (5, 300), (3, 255), (7, 514), (2, 1024)]
    results = []
    for backend in ("cuda", "eager"):
        buffers, params = [], []
        for p in draw(dtype, shapes, cuda_device):
            buffer = torch.full((p.numel() + offset + 5,), 7.0, device=cuda_device, dtype=dtype)
            part = buffer[offset : offset + p.numel()].view(p.shape)
            buffers.append(buffer)
            params.append(part.copy_(p.detach()).requires_grad_())
        optimizer = maker(optim.AdamW, {}, state_dtype)(params)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params:
                room = torch.full((p.numel() + 3,), torch.nan, device=cuda_device, dtype=dtype)
                p.grad = room[3 - offset % 4 :][: p.numel()].view(p.shape).copy_(p.grad)
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(snapshot(params, optimizer))
        for buffer, p in zip(buffers, params, strict=True):
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + p.numel() :] == 7).all()
    assert same(*results)


@STATES
@pytest.mark.parametrize("alike", [True, False])
def test_tensors_that_lie_across(state_dtype: Any, alike: bool, cuda_device: str) -> None:
    """In channels-last, with gradients that lie alike or not."""
    results = []
    for backend in ("cuda", "eager"):
        drawn = draw(shapes=[(16, 40, 3, 3), (8, 300, 1, 2)], device=cuda_device)
        params = [p.detach().to(memory_format=torch.channels_last) for p in drawn]
        optimizer = maker(optim.AdamW, {}, state_dtype)([p.requires_grad_() for p in params])
        for seed in range(2):
            draw_grads(params, seed)
            for p in params if alike else ():
                p.grad = p.grad.to(memory_format=torch.channels_last)
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(snapshot(params, optimizer))
    assert same(*results)


@pytest.mark.parametrize(
    ("kind", "count", "rounding"),
    [(optim.AdamW, 1100, False), (optim.AdamW, 400, True), (optim.LAMB, 1100, False)],
)
def test_more_tensors_than_a_launch_takes(
    kind: Any, count: int, rounding: bool, cuda_device: str
) -> None:
    """Of all sizes, none among them; each has its own number of steps."""
    shapes = [(i * 7 % 60,) for i in range(count)] + [(0, 3), (40, 450), (0,)]
    dtype = torch.bfloat16 if rounding else torch.float32
    results = []
    for backend in ("cuda", "eager"):
        params = draw(dtype, shapes, cuda_device)
        optimizer = kind(params, lr=1e-2, stochastic_rounding=rounding)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params[::3] if seed == 0 else ():
                p.grad = None
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(snapshot(params, optimizer))
    assert same(*results)
    assert {int(optimizer.state[p]["step"]) for p in params} == {1, 2}


@STATES
def test_600_small_tensors_are_three_launches(state_dtype: Any, cuda_device: str) -> None:
    """Their rules are one, and two step them."""
    params = draw(shapes=[(2, 16 + i % 3) for i in range(600)], device=cuda_device)
    optimizer = maker(optim.AdamW, {}, state_dtype)(params)
    draw_grads(params, 0)
    optimizer.step()
    assert _launches(optimizer.step, cuda_device) == 3


def _launches(call: Callable[[], Any], device: str) -> int:
    if device == "cpu":
        counted = ctypes.c_int64.in_dll(ctypes.CDLL(str(EMULATED)), "emulator_launches")
        before = counted.value
        call()
        return counted.value - before
    of_device = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=of_device, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_device for event in profile.events())


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_more_elements_than_31_bits_count(state_dtype: Any, cuda_device: str) -> None:
    """A block of rows again and again: each goes as one does alone.

    Elsewhere than on a GPU with too few of them, which shows the test alone to be right.
    """
    (rows, width), copies = ((4096, 1024), 513) if cuda_device == "cuda" else ((8, 600), 5)
    generator = torch.Generator(cuda_device).manual_seed(0)
    values = [
        torch.randn(rows, width, generator=generator, device=cuda_device).bfloat16()
        for _ in range(2)
    ]
    found = []
    for times in (1, copies):
        p, grad = (v.repeat(times, 1) for v in values)
        assert times == 1 or cuda_device != "cuda" or p.numel() > 2**31
        p.requires_grad_().grad = grad
        # Above any norm: gradients stay as they are.
        optimizer = optim.AdamW([p], lr=0.1, state_dtype=state_dtype, max_grad_norm=1e9)
        optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values(), optimizer.grad_norm])
    for one, many in zip(*found, strict=True):
        if one.ndim == 2:
            assert torch.equal(many.view(copies, *one.shape), one.expand(copies, *one.shape))
    assert float(found[1][-1]) == pytest.approx(float(found[0][-1]) * copies**0.5, rel=1e-6)


@STATES
def test_numbers_on_the_device(state_dtype: Any, cuda_device: str) -> None:
    """Learning rates, scales and what the scaler found, there or on the CPU, have the same bits."""
    results = []
    for backend, lr, number in (
        ("eager", 0.1, torch.tensor(0.25)),
        ("cuda", 0.1, torch.tensor(0.25)),
        ("cuda", torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.25, device=cuda_device)),
        (
            "cuda",
            torch.tensor(0.1, dtype=torch.float64, device=cuda_device),
            torch.tensor(0.25, device=cuda_device, dtype=torch.float64),
        ),
    ):
        params = draw(device=cuda_device)
        capturable = {"capturable": True} if isinstance(lr, torch.Tensor) else {}
        optimizer: Any = optim.AdamW(params, lr, state_dtype=state_dtype, **capturable)
        optimizer.grad_scale = number
        with torchweld.use_backend(backend):
            for seed in range(4):
                draw_grads(params, seed)
                before = snapshot(params, optimizer)
                optimizer.found_inf = torch.tensor(float(seed == 2), device=cuda_device)
                optimizer.step()
                assert seed != 2 or same(snapshot(params, optimizer), before)
        results.append(snapshot(params, optimizer))
    assert all(same(found, results[0]) for found in results)
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion, optim.LAMB])
def test_what_is_not_finite_is_skipped_alone(kind: Any, bad: float, cuda_device: str) -> None:
    results = []
    for backend in ("cuda", "eager"):
        with torchweld.use_backend(backend):
            (p,), optimizer = run(
                maker(kind, {}, "8bit"), 2, shapes=[(16, 300)], device=cuda_device
            )
            draw_grads([p], 7)
            p.grad[3, 7] = p.grad[15, 299] = bad
            optimizer.step()
        results.append(snapshot([p], optimizer))
        assert all(t.isfinite().all() for t in results[-1])
    assert same(*results)


# Parts of tensors whose rows other devices have parts of too, and where pieces of blocks begin and
# end in them: of one element, of any number, not aligned, whole blocks, and none.
CUT = [
    ((3, 40), (0, 10, 40)),
    ((70, 7), (0, 1, 2, 7)),
    ((4, 515), (0, 3, 259, 515)),
    ((1, 1), (0, 1)),
    ((0, 5), (0, 5)),
    ((4, 1024), (0, 256, 512, 768, 1024)),
    ((3, 0), (0,)),
    ((6, 4, 150), (0, 44, 300, 556, 600)),
    *(((2, 3 * i), (0, i, 3 * i)) for i in range(1, 6)),
]


def _cut(
    make: Any,
    dtype: torch.dtype,
    device: str,
    offset: int = 0,
    bad: float = 0.0,
    rows: Any = CUT,
) -> tuple[Any, Any, list[torch.Tensor]]:
    """An optimizer after a step, its batch as if rows were cut, and the memory that this is in.

    Off by so many elements; one gradient in 7 is bad. What the absmax become nobody knows yet.
    """
    with torchweld.use_backend("eager"):
        params, optimizer = run(make, 1, dtype, [shape for shape, _ in rows], device)
    draw_grads(params, 1)
    (batch,) = optimizer._batches(optimizer._gathering(optimizer.param_groups[0]))  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(2)
    absmaxes = []
    for shape, edges in rows * (len(batch.moments) // len(params)):
        known = torch.rand(shape[0], len(edges) - 1, generator=generator) + 0.1
        absmaxes.append(torch.stack((known, torch.full_like(known, torch.nan))).to(device))
    buffers = []

    def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        placed = []
        for t in tensors:
            buffer = t.new_full((t.numel() + offset + 5,), 7, requires_grad=False)
            placed.append(buffer[offset : offset + t.numel()].view(t.shape).copy_(t.detach()))
            buffers.append(buffer)
        return placed

    for g in batch.grads if bad else ():
        g.view(-1)[::7] = bad
    batch.params, batch.grads = place(batch.params), place(batch.grads)
    batch.completions, batch.moments = place(batch.completions), place(batch.moments)
    batch.absmaxes = place(absmaxes)
    batch.edges = [torch.tensor(edges, device=device) for _, edges in rows]
    return optimizer, batch, [*buffers, *batch.steps]


def _step_cut(made: tuple[Any, Any, list[torch.Tensor]]) -> list[torch.Tensor]:
    """What is found of the pieces here, and what a step leaves, where other devices have larger."""
    optimizer, batch, memory = made
    settings = optimizer._settings(optimizer.param_groups[0], batch)
    numbers = {"lr": torch.tensor(0.1), "grad_factor": torch.tensor(0.5)}
    before = [t.clone() for t in memory]
    optimizer._rule().step(batch, settings=settings, **numbers, only_absmaxes=True)
    found = [absmax[1].clone() for absmax in batch.absmaxes]
    for absmax, new in zip(batch.absmaxes, found, strict=True):
        absmax[1] = torch.nan
        assert new.isfinite().all()
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    generator = torch.Generator().manual_seed(3)
    for absmax, new in zip(batch.absmaxes, found, strict=True):
        larger = 1 + torch.rand(new.shape, generator=generator).to(new.device).round() / 4
        absmax[1] = new * larger
    optimizer._rule().step(batch, settings=settings, **numbers)
    assert all(p.isfinite().all() for p in batch.params)
    return [*found, *memory]


@pytest.mark.parametrize(("dtype", "masters"), [(d, m) for d, s, m in CODECS if s == "8bit"])
def test_rows_that_shards_cut(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """By every rule, the reference's bits; nothing is written but what is here."""
    roundings = (False, True) if dtype == torch.bfloat16 and not masters else (False,)
    for (kind, settings), rounding in itertools.product(RULES, roundings):
        make = maker(kind, settings | {"stochastic_rounding": rounding}, "8bit", masters)
        if kind is optim.SGD and "momentum" not in settings:
            continue
        found = _step_cut(_cut(make, dtype, cuda_device))
        with torchweld.use_backend("eager"):
            expected = _step_cut(_cut(make, dtype, cuda_device))
        assert same(found, expected), (kind, settings)


def test_more_cut_rows_than_a_launch_takes(cuda_device: str) -> None:
    rows = [((i, 3 * j), (0, j, 3 * j)) for i in range(1, 10) for j in range(1, 31)]
    given = (maker(optim.AdamW, {}, "8bit"), torch.float32, cuda_device, 0, 0.0, rows)
    found = _step_cut(_cut(*given))
    with torchweld.use_backend("eager"):
        expected = _step_cut(_cut(*given))
    assert same(found, expected)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_cut_rows_that_lie_anywhere(offset: int, bad: float, cuda_device: str) -> None:
    """What is not finite is skipped alone there too."""
    for kind in (optim.AdamW, optim.Lion):
        given = (maker(kind, {}, "8bit"), torch.float32, cuda_device, offset, bad)
        found = _step_cut(_cut(*given))
        with torchweld.use_backend("eager"):
            expected = _step_cut(_cut(*given))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_measures_of_cut_rows(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """Within float64's roundings of the reference; nothing is written."""
    make = maker(optim.LAMB, {"weight_decay": 0.1}, "8bit", masters)
    optimizer, batch, memory = _cut(make, dtype, cuda_device, bad=torch.inf)
    given = (batch, optimizer._settings(optimizer.param_groups[0], batch), torch.tensor(0.5))
    before = [t.clone() for t in memory]
    found = optimizer._rule().squares(*given)
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    with torchweld.use_backend("eager"):
        expected = optimizer._rule().squares(*given)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_cut_rows_under_a_scaler(cuda_device: str) -> None:
    """Of a step that is left out nothing is found, and nothing counts."""
    optimizer, batch, memory = _cut(maker(optim.AdamW, {}, "8bit"), torch.float32, cuda_device)
    settings = optimizer._settings(optimizer.param_groups[0], batch)
    before = [t.clone() for t in memory]
    for only_absmaxes in (True, False):
        numbers = {"lr": torch.tensor(0.1), "found_inf": torch.tensor(1.0, device=cuda_device)}
        optimizer._rule().step(batch, settings=settings, **numbers, only_absmaxes=only_absmaxes)
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("settings", [{}, {"eps": 0.0}], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measures(
    dtype: torch.dtype, state_dtype: Any, settings: dict[str, Any], cuda_device: str
) -> None:
    """Within float64's roundings of the reference, and the same bits every time."""
    params = draw(dtype, [(300, 313), *SHAPES, (5000,)], cuda_device)
    optimizer: Any = maker(optim.LAMB, settings, state_dtype)(params)
    draw_grads(params, 0)
    optimizer.step()
    draw_grads(params, 1)
    (group,) = optimizer.param_groups
    for batch in optimizer._batches(optimizer._gathering(group)):
        given = (batch, optimizer._settings(group, batch), torch.tensor(0.5))
        found, again = (optimizer._rule().squares(*given) for _ in range(2))
        with torchweld.use_backend("eager"):
            expected = optimizer._rule().squares(*given)
        assert torch.equal(found, again)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_gradients(dtype: torch.dtype, cuda_device: str) -> None:
    shapes = [(999, 37), (1,), (0,), (33, 1000)] + [(i,) for i in range(250, 300)]
    grads = [p.detach() for p in draw(dtype, shapes, cuda_device)]
    grads[3] = grads[3].flatten()[1:]  # not aligned
    found = sum_of_squares(grads)
    exact = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    assert torch.equal(found, sum_of_squares(grads))
    assert sum_of_squares(grads[2:3]) == 0


def test_steps_that_were_saved_on_the_cpu(cuda_device: str) -> None:
    """As torch saves those of optimizers that are neither fused nor capturable."""
    params, theirs = run(lambda p: torch.optim.AdamW(p), 2, device=cuda_device)
    mine = [p.detach().clone().requires_grad_() for p in params]
    ours = optim.AdamW(mine)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for some, optimizer in ((params, theirs), (mine, ours)):
        draw_grads(some, 5)
        optimizer.step()
    for p, q in zip(mine, params, strict=True):
        assert (ours.state[p]["step"].device, ours.state[p]["step"]) == (p.device, 3)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


# --- Adafactor: sums over rows and columns, whose order is the kernel's own -----------------------

# More columns than a warp has, in part and as a whole; more rows than chunks have 16 of.
FACTORED = (*MATRICES, (40, 1100), (3, 7, 512), (1, 2052), (4500, 3))
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.TransformersAdafactor, {"beta1": 0.9, "warmup_init": True}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"eps": (1e-3, 0.5), "d": 2.0, "maximize": True}),
    (
        optim.TransformersAdafactor,
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    ),
]


@pytest.mark.parametrize(
    ("dtype", "masters", "kind", "settings"),
    [(d, m, *KINDS[0]) for d, s, m in CODECS if s == torch.float32]
    + [(torch.float32, False, *kind) for kind in KINDS[1:]],
    ids=str,
)
def test_adafactor_is_the_reference(
    dtype: torch.dtype, masters: Any, kind: Any, settings: dict[str, Any], cuda_device: str
) -> None:
    def make(params: Any) -> Optimizer:
        return kind(params, master_weights=masters, **settings)

    found = run(make, 2, dtype, FACTORED, cuda_device)
    assert same(snapshot(*found), snapshot(*run(make, 2, dtype, FACTORED, cuda_device)))
    with torchweld.use_backend("eager"):
        expected = run(make, 2, dtype, FACTORED, cuda_device)
    assert_same_but_for_ties(found, expected, masters)


def test_adafactor_rounds_at_random(cuda_device: str) -> None:
    """As the reference does, but for sums that meet a tie; each tensor by its own step."""
    results = []
    for backend in ("cuda", "eager"):
        params = draw(torch.bfloat16, FACTORED * 2, cuda_device)
        optimizer = optim.Adafactor(params, stochastic_rounding=True)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params[::3] if seed == 0 else ():
                p.grad = None
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(params)
    for p, e, start in zip(*results, draw(torch.bfloat16, FACTORED * 2, cuda_device), strict=True):
        assert (p != e).sum() <= max(1, 1e-2 * p.numel())
        assert p.numel() < 100 or (p != start).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adafactors_tensors_lie_anywhere(dtype: torch.dtype, cuda_device: str) -> None:
    """Off by some elements they have the same bits; what lies around them stays as it is."""
    shapes = [(1,), (255,), (5000,), (5, 300), (3, 255), (7, 514), (2, 1024), (4, 6, 8)]
    results = []
    for offset in (0, 1, 2, 4):
        buffers, params = [], []

        def place(t: torch.Tensor, offset: int = offset, buffers: Any = buffers) -> torch.Tensor:
            buffer = t.new_full((t.numel() + offset + 5,), 7.0)
            buffers.append((buffer, t.numel()))
            return buffer[offset : offset + t.numel()].view(t.shape).copy_(t.detach())

        params = [place(p.detach()).requires_grad_() for p in draw(dtype, shapes, cuda_device)]
        optimizer = optim.TransformersAdafactor(params, beta1=0.9)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params:
                assert p.grad is not None
                p.grad = place(p.grad)
            optimizer.step()
            for p in params if seed == 0 else ():
                state = optimizer.state[p]
                state |= {name: place(v) for name, v in state.items() if v.dim() > 0}
        for buffer, count in buffers:
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + count :] == 7).all()
        results.append(snapshot(params, optimizer))
    assert all(same(found, results[0]) for found in results)


def test_more_of_adafactors_tensors_than_a_launch_takes(cuda_device: str) -> None:
    """Each has the bits that it has alone, and its own number of steps."""
    shapes = [s for i in range(150) for s in ((i * 7 % 300,), (i % 5, 1 + i % 7))]
    shapes += [(0, 3), (40, 450), (0,)]
    results = []
    for together in (True, False):
        params = draw(shapes=shapes, device=cuda_device)
        groups = [params] if together else [[p] for p in params]
        optimizers = [optim.Adafactor(group) for group in groups]
        for seed in range(2):
            draw_grads(params, seed)
            for p in params[::3] if seed == 0 else ():
                p.grad = None
            for optimizer in optimizers:
                optimizer.step()
        state = {p: optimizer.state[p] for optimizer in optimizers for p in optimizer.state}
        assert {int(s["step"]) for s in state.values()} == {1, 2}
        results.append([t.detach() for p in params for t in (p, *state[p].values())])
    assert same(*results)


def test_adafactors_numbers_on_the_device(cuda_device: str) -> None:
    """Learning rates, scales and what the scaler found, there or on the CPU, have the same bits."""
    results = []
    for device in ("cpu", cuda_device):
        params = draw(shapes=FACTORED, device=cuda_device)
        optimizer: Any = optim.Adafactor(params, torch.tensor(0.05, device=device))
        optimizer.grad_scale = torch.tensor(0.25, device=device)
        for seed in range(3):
            draw_grads(params, seed)
            if seed == 1:
                for p in params:
                    p.grad.view(-1)[:1] = torch.inf  # type: ignore[union-attr]
            before = snapshot(params, optimizer)
            optimizer.found_inf = torch.tensor(float(seed == 1), device=device)
            optimizer.step()
            assert same(snapshot(params, optimizer), before) == (seed == 1)
        results.append(snapshot(params, optimizer))
    assert same(*results)
    assert optimizer.state[params[0]]["step"] == 2


class _Parts:
    """A matrix's parts on devices that share its rows or its columns, by the op's own passes."""

    def __init__(self, whole: torch.Tensor, grad: torch.Tensor, dim: int, cuts: list[int]) -> None:
        self.dim, self.whole = dim, whole
        self.params = [part.contiguous() for part in whole.split(cuts, dim)]
        self.grads = [part.contiguous() for part in grad.split(cuts, dim)]
        self.averages = [(p.new_zeros(p.shape[:-1]), p.new_zeros(_columns(p))) for p in self.params]
        self.steps = [torch.tensor(0.0, device=whole.device) for _ in self.params]
        doubles = {"dtype": torch.float64, "device": whole.device}
        counts = [2 + 1 + p.shape[0] + p.shape[1] for p in self.params]
        self.sums = [torch.zeros(count, **doubles) for count in counts]  # type: ignore[call-overload]

    def run(self, passed: int, found_inf: float = 0.0) -> None:
        rest = (-0.8, 0.0, 1e-7, 1e-3, 1.0, 0.0, 0.1, True, False, True, False)
        device = self.whole.device
        sizes = [*self.whole.shape, self.whole.numel()]
        for i, p in enumerate(self.params):
            lists = ([p], [self.grads[i]], [], [*self.averages[i]], [], [self.steps[i]], [], [])
            numbers = (None, torch.tensor(found_inf, device=device), False)
            lr = torch.tensor(0.1, device=device)
            of_pass = (self.sums[i], sizes, passed)
            torch.ops.torchweld.adafactor.cuda(*lists, lr, *rest, *numbers, *of_pass)

    def add_up(self, passed: int) -> None:
        """What devices have of the same sums: of rows or of columns, of averages, of squares."""

        def place(i: int) -> list[slice]:
            height, width = self.params[i].shape
            of_rows, of_columns = slice(height), slice(height, height + width)
            of_averages = slice(height + width, height + width + 1)
            first = [of_columns] if self.dim == 0 else [of_rows]
            return [first, [of_averages] if self.dim == 0 else [], [slice(-2, None)]][passed]

        every = range(len(self.params))
        for places in zip(*map(place, every), strict=True):
            total = sum(self.sums[i][places[i]] for i in every)
            for i in every:
                self.sums[i][places[i]] = total


def _columns(p: torch.Tensor) -> tuple[int, ...]:
    return (*p.shape[:-2], p.shape[-1])


@pytest.mark.parametrize(("dim", "cuts"), [(0, [40, 0, 30]), (1, [600, 7, 93]), (1, [700, 0])])
def test_passes_of_adafactors_parts(dim: int, cuts: list[int], cuda_device: str) -> None:
    """Averages and steps are those of the whole; a device may have none of it."""
    (p, g) = (t.detach() for t in draw(shapes=[(70, 700)] * 2, device=cuda_device))
    whole = _Parts(p, g, 0, [70])
    parts = _Parts(p, g, dim, cuts)
    for passed in range(4):
        for some in (whole, parts):
            before = [t.clone() for t in (*some.params, *some.sums)]
            some.run(passed, found_inf=1.0)
            assert same([*some.params, *some.sums], before)
            some.run(passed)
            if passed < 3:
                some.add_up(passed)
            assert passed == 3 or same(some.params, before[: len(some.params)])
    assert [float(step) for step in parts.steps] == [1.0] * len(cuts)
    torch.testing.assert_close(torch.cat(parts.params, dim), whole.params[0], rtol=4 * U, atol=U)
    for k in range(2):
        averages = [of_part[k] for of_part in parts.averages]
        found = torch.cat(averages) if k == dim else averages[0]
        torch.testing.assert_close(found, whole.averages[0][k], rtol=4 * U, atol=0)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.LAMB])
@STATES
def test_graphs(kind: Any, state_dtype: Any, cuda_device: str) -> None:
    settings: dict[str, Any] = {} if kind is optim.SGD else {"capturable": True}
    settings["max_grad_norm"] = 1.0
    _capture(lambda p, lr: maker(kind, settings | {"lr": lr}, state_dtype)(p), cuda_device)


@pytest.mark.parametrize("masters", [False, True])
def test_adafactors_graphs(masters: bool, cuda_device: str) -> None:
    settings: dict[str, Any] = {"master_weights": masters, "max_grad_norm": 1.0}
    _capture(lambda p, lr: optim.Adafactor(p, lr, **settings), cuda_device)


def _capture(make: Any, cuda_device: str) -> None:
    """Captured and replayed, a step equals a step; none waits for the GPU."""
    if cuda_device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    results = []
    for captured in (False, True):
        params = draw(device=cuda_device)
        for p in params:
            p.grad = torch.zeros_like(p)
        lr = torch.tensor(1e-2, device=cuda_device)
        optimizer = make(params, lr)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            lr.fill_(1e-2 / (seed + 1))
            torch.cuda.set_sync_debug_mode("error")
            try:
                if captured:
                    graph.replay()
                else:
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(snapshot(params, optimizer))
    assert same(*results)
