"""Adafactor with torch's rule and with transformers'."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    MATRICES,
    Optimizer,
    U,
    assert_same_but_for_ties,
    draw,
    draw_grads,
    run,
    same,
    snapshot,
)
from torchweld import optim

# torch divides by the number of elements.
NOT_EMPTY = tuple(shape for shape in MATRICES if 0 not in shape)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr": torch.tensor(0.05), "weight_decay": 0.1, "d": 2.0},
        {"eps": (1e-3, 0.5), "beta2_decay": -0.5, "maximize": True},
    ],
    ids=str,
)
def test_torchs_trajectory(settings: dict[str, Any], backend: str) -> None:
    """20 steps: within the roundings of torch's step, relative to the largest step.

    A step is at most lr times the root mean square of the parameter, times the ratio of an
    element's direction to the mean one: less than 10 here.
    """
    a, _ = run(lambda p: optim.Adafactor(p, **settings), 20, shapes=NOT_EMPTY)
    b, _ = run(lambda p: torch.optim.Adafactor(p, foreach=False, **settings), 20, shapes=NOT_EMPTY)
    lr = float(settings.get("lr", 1e-2))
    for p, q in zip(a, b, strict=True):
        scale = max(q.square().mean().sqrt().item(), settings.get("eps", (0, 1e-3))[1])
        bound = 20 * (2 * U * q.abs() + 40 * U * 10 * lr * scale)
        assert ((p - q).abs() <= bound).all()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"warmup_init": True, "beta1": 0.9},
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
        {"lr": 1e-3, "relative_step": False, "clip_threshold": 0.5, "decay_rate": -0.5},
    ],
    ids=str,
)
def test_transformers_rule(settings: dict[str, Any], backend: str) -> None:
    """In float64 from the paper's algorithm, with the options of transformers' class."""
    steps = 10
    found, _ = run(lambda p: optim.TransformersAdafactor(p, **settings), steps, shapes=MATRICES)
    given = draw(shapes=MATRICES)
    exact = [p.detach().double() for p in given]
    states: list[dict[str, Any]] = [{} for _ in exact]
    for step in range(1, steps + 1):
        draw_grads(given, step - 1)
        for i, p in enumerate(exact):
            g, state = given[i].grad.double(), states[i]
            rate = 1 - step ** settings.get("decay_rate", -0.8)
            square = g * g + 1e-30

            def average(name: str, new: torch.Tensor, state: Any = state, rate: Any = rate) -> Any:
                state[name] = rate * state.get(name, torch.zeros_like(new)) + (1 - rate) * new
                return state[name]

            if p.ndim > 1:
                rows = average("rows", square.mean(-1, keepdim=True))
                columns = average("columns", square.mean(-2, keepdim=True))
                u = g / (rows * columns / rows.mean(-2, keepdim=True)).sqrt()
            else:
                u = g / average("all", square).sqrt()
            rms = lambda t: t.square().mean().sqrt()  # noqa: E731
            u = u / (rms(u) / settings.get("clip_threshold", 1.0)).clamp(min=1.0)
            lr = settings.get("lr")
            if lr is None:
                lr = min(1e-6 * step if settings.get("warmup_init") else 1e-2, step**-0.5)
            if settings.get("scale_parameter", True):
                lr = lr * rms(p).clamp(min=1e-3)
            u = u * lr
            if beta1 := settings.get("beta1"):
                state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * u
                u = state["first"]
            exact[i] = p - settings.get("weight_decay", 0.0) * lr * p - u
    for p, e in zip(found, exact, strict=True):
        assert ((p - e).abs() <= 20 * U * (e.abs() + steps * 1e-2)).all()


@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_reference(dtype: torch.dtype, masters: Any) -> None:
    """The same bits at any thread count: the reference's, except where sums meet a tie."""

    def make(params: Any) -> Optimizer:
        return optim.Adafactor(params, master_weights=masters)

    with torchweld.use_backend("eager"):
        expected = run(make, 4, dtype, MATRICES)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torchweld.use_backend("cpu"):
                found.append(run(make, 4, dtype, MATRICES))
    finally:
        torch.set_num_threads(threads)
    assert same(snapshot(*found[0]), snapshot(*found[1]))
    assert_same_but_for_ties(found[0], expected, masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_go_from_and_to_torch(dtype: torch.dtype) -> None:
    """Both ways; the averages of 16-bit parameters are float32 here."""
    a, ours = run(lambda p: optim.Adafactor(p), 6, dtype, NOT_EMPTY)
    b, theirs = run(lambda p: torch.optim.Adafactor(p), 6, dtype, NOT_EMPTY)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, q in zip(a, b, strict=True):
        state, given = ours.state[p], theirs.state[q]
        assert all(torch.equal(state[k], v.float()) for k, v in given.items())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            p.copy_(q)
    for params, optimizer in ((a, ours), (b, theirs)):
        draw_grads(params, 9)
        optimizer.step()
    u = U if dtype == torch.float32 else 2.0**-7
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 8 * u * (q.abs() + 0.1)).all()


def test_an_infinite_gradient_leaves_no_trace(backend: str) -> None:
    """Under GradScaler: averages, parameters and the count stay."""
    optimizer: Any
    params, optimizer = run(lambda p: optim.Adafactor(p), 2)
    before = snapshot(params, optimizer)
    draw_grads(params, 5)
    params[1].grad[0, 0] = torch.inf
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    optimizer.step()
    assert same(snapshot(params, optimizer), before)
    optimizer.found_inf = torch.tensor(0.0)
    draw_grads(params, 5, 0.8)
    optimizer.step()
    expected, peer = run(lambda p: optim.Adafactor(p), 2)
    draw_grads(expected, 5, 0.8)
    for p in expected:
        assert p.grad is not None
        p.grad.div_(8)
    peer.step()
    assert same(snapshot(params, optimizer), snapshot(expected, peer))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", [optim.Adafactor, optim.TransformersAdafactor])
def test_what_is_not_finite_is_as_in_eager(kind: Any, bad: float, backend: str) -> None:
    """NaN in one element spreads through the mean to all of the tensor's elements."""
    results = []
    for name in (backend, "eager"):
        with torchweld.use_backend("cuda" if name == "emulator" else name):
            params, optimizer = run(lambda p: kind(p), 2, shapes=[(9, 700), (5000,), (3,)])
            draw_grads(params, 7)
            for p in params[:2]:
                p.grad.view(-1)[4000] = bad  # type: ignore[union-attr]
            optimizer.step()
        results.append(snapshot(params, optimizer))
    assert all(p.isfinite().all() for p in results[0][2:3])
    assert bad == 1e30 or not any(p.isfinite().all() for p in results[0][:2])
    torch.testing.assert_close(*results, rtol=8 * U, atol=8 * U * 0.1, equal_nan=True)


@pytest.mark.parametrize("warmup", [False, True])
def test_the_rate_that_transformers_schedule_asks_for(warmup: bool) -> None:
    """AdafactorSchedule calls _get_lr with the first parameter's state."""
    p = torch.full((4, 6), 0.5).requires_grad_()
    optimizer = optim.TransformersAdafactor([p], warmup_init=warmup)
    for step in range(1, 4):
        p.grad = torch.ones_like(p)
        rate = optimizer._get_lr(optimizer.param_groups[0], optimizer.state[p])
        scale = p.detach().square().mean().sqrt().item()
        taken = max(step - 1, 1)
        expected = scale * min(1e-6 * taken if warmup else 1e-2, taken**-0.5)
        assert rate == pytest.approx(expected, rel=1e-6)
        optimizer.step()
    fixed = optim.TransformersAdafactor([p], lr=0.25, relative_step=False, scale_parameter=False)
    assert fixed._get_lr(fixed.param_groups[0], {}) == 0.25


def test_arguments_are_named() -> None:
    p = [torch.zeros(4, 4)]
    for argument, make in {
        "state_dtype": lambda: optim.Adafactor(p, state_dtype="8bit"),
        "lr": lambda: optim.TransformersAdafactor(p, 1e-3),
        "warmup_init": lambda: optim.TransformersAdafactor(
            p, 1e-3, relative_step=False, warmup_init=True
        ),
        "eps": lambda: optim.TransformersAdafactor(p, eps=(-1.0, 1e-3)),
    }.items():
        with pytest.raises(torchweld.ArgumentError) as caught:
            make()
        assert caught.value.argument == argument
    with pytest.raises(ValueError, match="beta2_decay"):
        optim.Adafactor(p, beta2_decay=1.0)
    z = torch.zeros(4, 4, dtype=torch.complex64, requires_grad=True)
    z.grad = torch.ones_like(z)
    with pytest.raises(torchweld.ArgumentError, match="complex"):
        optim.Adafactor([z]).step()


def test_kernels_refuse_by_themselves() -> None:
    """Averages that do not fit, called past Python's checks."""
    x = torch.zeros(4, 6)
    settings = (-0.8, 0.0, 1e-7, 1e-3, 1.0, 0.0, 0.0, True, False, True, False)
    step = torch.ops.torchweld.adafactor.cpu
    squares = torch.ops.torchweld.adafactor_squares.cpu

    def call(
        moments: list[torch.Tensor],
        params: Any = None,
        sums: Any = None,
        wholes: Any = (),
        of: Any = step,
    ) -> None:
        given = [x.clone()] if params is None else params
        steps, grads = [torch.tensor(0.0) for _ in given], [torch.ones_like(p) for p in given]
        lists: tuple[list[torch.Tensor], ...] = (
            given,
            grads,
            [],
            moments,
            [],
            [],
            steps,
            [],
            [],
            [],
        )
        of(*lists, torch.tensor(1.0), None, None, None, None, sums, None, wholes, *settings)

    call([torch.zeros(4), torch.zeros(6)])
    sums, wholes = torch.zeros(13, dtype=torch.float64), [8, 6, 48]
    call([torch.zeros(4), torch.zeros(6)], None, sums, wholes, squares)
    assert sums.tolist() == [6.0] * 4 + [4.0] * 6 + [0.0] * 3
    for of_pass in ((sums[1:], wholes), (sums.float(), wholes), (sums, wholes[1:]), (None, wholes)):
        with pytest.raises(RuntimeError):
            call([torch.zeros(4), torch.zeros(6)], None, of_pass[0], of_pass[1], squares)
    for wrong in (
        [torch.zeros(4)],
        [torch.zeros(6), torch.zeros(4)],
        [torch.zeros(4).double(), torch.zeros(6)],
    ):
        with pytest.raises(RuntimeError):
            call(wrong)
    with pytest.raises(RuntimeError):
        call([torch.zeros(4)] * 4, [x.clone(), torch.zeros(4)])
