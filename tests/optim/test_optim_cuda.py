"""The CUDA kernels of optimizers: the reference's bits for any layout and placement.

They run in the emulator, on CPU tensors, and on a GPU if there is one.
"""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from conftest import EMULATED
from optimizers import (
    CODECS,
    RULES,
    SHAPES,
    draw,
    draw_grads,
    draw_grads_by_row,
    maker,
    rules_of,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.ops.optimizer.sum_of_squares import sum_of_squares

STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any, cuda_device: str
) -> None:
    """Every codec with each of the rule's branches."""
    for kind, settings in rules_of(dtype, state_dtype, masters):
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
    """Offset by some elements, of odd sizes; surrounding memory does not change."""
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
    """In channels-last, with gradients of the same layout or another."""
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
    ("dtype", "rounding"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_narrow_rows_that_a_warp_takes_together(
    dtype: torch.dtype, rounding: bool, cuda_device: str
) -> None:
    """With each of the rule's branches; with widths that take this path and others."""
    widths = [2, 4, 8, 12, 16, 32, 64, 100, 128]
    shapes = [(150, width) for width in widths] + [(1, 8), (1, 100)]
    for kind, settings in RULES:
        # If nothing is skipped, values that are not finite spread.
        grads = draw_grads if kind in (optim.SGD, optim.LARS) else draw_grads_by_row
        results = []
        for backend in ("cuda", "eager"):
            params = draw(dtype, shapes, cuda_device)
            make = maker(kind, settings | {"stochastic_rounding": rounding}, "8bit")
            optimizer = make(params)
            for seed in range(2):
                grads(params, seed)
                with torchweld.use_backend(backend):
                    optimizer.step()
            results.append(snapshot(params, optimizer))
        assert same(*results), (kind, settings)


@pytest.mark.parametrize(
    ("kind", "count", "rounding"),
    [
        (optim.AdamW, 1100, False),
        (optim.AdamW, 400, True),
        (optim.LAMB, 1100, False),
        (optim.LARS, 1100, False),
    ],
)
def test_more_tensors_than_a_launch_takes(
    kind: Any, count: int, rounding: bool, cuda_device: str
) -> None:
    """They have all sizes, 0 among them, and each has its own number of steps."""
    shapes = [(i * 7 % 300,) for i in range(count)] + [(0, 3), (40, 450), (0,)]
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
    """One launch makes their rules, and two step them."""
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
    names = [e.name for e in profile.events() if e.device_type == on_device]
    # The step's annotation stands among the kernels too.
    return sum(not name.startswith(("Memcpy", "Memset", "Optimizer.step")) for name in names)


@pytest.mark.usefixtures("alone_on_the_gpu")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_more_elements_than_31_bits_count(state_dtype: Any, cuda_device: str) -> None:
    """Many repeated blocks of rows: each steps as it would by itself.

    Without a GPU there are too few rows for that: then it only shows that the test is right.
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
        # Above any norm: gradients do not change.
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
    for task in optimizer._tasks():
        task.grad_factor = torch.tensor(0.5)

        def measured(task: Any = task) -> torch.Tensor:
            optimizer._rule.measure(task)
            return task.sums

        found, again = measured(), measured()
        with torchweld.use_backend("eager"):
            expected = measured()
        assert torch.equal(found, again)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_gradients(dtype: torch.dtype, cuda_device: str) -> None:
    shapes = [(999, 37), (1,), (0,), (33, 1000)] + [(i,) for i in range(250, 300)] * 7
    grads = [p.detach() for p in draw(dtype, shapes, cuda_device)]
    grads[3] = grads[3].flatten()[1:]  # not aligned
    found = sum_of_squares(grads)
    exact = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    assert torch.equal(found, sum_of_squares(grads))
    assert sum_of_squares(grads[2:3]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_gradients_of_any_size(dtype: torch.dtype, cuda_device: str) -> None:
    """Squares that float32 does not hold, many sizes in one run, and roundings all to one side."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.finfo(dtype)
    runs = [torch.full((600,), value, dtype=dtype) for value in (1.1, 1 + limits.eps, limits.max)]
    for exponent in range(-149, 128, 4):
        drawn = torch.randn(257, generator=generator, dtype=torch.float64)
        spread = torch.randint(-30, 1, (257,), generator=generator)
        run = (drawn * 2.0**exponent * 2.0**spread).clamp(limits.min, limits.max)
        runs.append(run.to(dtype))
    for run in runs:
        exact = run.double().square().sum()
        found = sum_of_squares([run.to(cuda_device)])
        torch.testing.assert_close(found.cpu(), exact, rtol=1e-13, atol=0)
    for bad, expected in ((torch.inf, torch.inf), (torch.nan, torch.nan)):
        run = torch.ones(300, dtype=dtype, device=cuda_device)
        run[77] = bad
        assert sum_of_squares([run]).item() == pytest.approx(expected, nan_ok=True)


def test_steps_that_were_saved_on_the_cpu(cuda_device: str) -> None:
    """As torch saves them for optimizers that are neither fused nor capturable."""
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
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch says that the mode is a prototype
                    torch.cuda.set_sync_debug_mode("error")
                if captured:
                    graph.replay()
                else:
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(snapshot(params, optimizer))
    assert same(*results)
