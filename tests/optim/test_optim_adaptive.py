"""LAMB and LARS, and the schedulers for large batches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    Optimizer,
    U,
    draw,
    draw_grads,
    lamb_in_float64,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.optim import lr_scheduler


def _exact(steps: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """A run's initial parameters and its gradients, in float64."""
    given = draw()
    of_steps = []
    for seed in range(steps):
        draw_grads(given, seed)
        of_steps.append([p.grad.double() for p in given])
    return [p.detach().double() for p in draw()], of_steps


def _assert_close(found: list[torch.Tensor], exact: list[torch.Tensor], moved: float) -> None:
    """Within ten roundings of what a parameter has moved by at most, and one a step of its own."""
    for p, e in zip(found, exact, strict=True):
        assert ((p - e).abs() <= 10 * U * (e.abs() + moved)).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-8, "maximize": True},
        {"bias_correction": False, "grad_averaging": False, "weight_decay": 0.01},
        {"trust_clip": (0.5, 2.0)},
        {"always_adapt": False},
        {"always_adapt": False, "weight_decay": 0.1, "max_grad_norm": 1.0},
    ],
    ids=str,
)
def test_lamb_as_published(settings: dict[str, Any], backend: str) -> None:
    """In float64 from the paper's algorithm, with Apex's and DeepSpeed's variants of it."""
    lr, steps = 1e-2, 8
    found, _ = run(lambda p: optim.LAMB(p, lr, **settings), steps)
    exact, largest = lamb_in_float64(*_exact(steps), lr, settings)
    _assert_close(found, exact, steps * largest)


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.01, "nesterov": True, "trust_coefficient": 0.02, "eps": 1e-3},
        {"clip": True, "lr": torch.tensor(1e-3), "trust_coefficient": 0.02, "momentum": 0.0},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
    ids=str,
)
def test_lars_as_published(settings: dict[str, Any], backend: str) -> None:
    """In float64: torch's SGD on gradients rescaled to the parameter."""
    steps = 8
    settings = {"lr": 0.5} | settings
    found, _ = run(lambda p: optim.LARS(p, **settings), steps)
    exact, of_steps = _exact(steps)
    names = ("lr", "momentum", "dampening", "nesterov")
    sgd = {"momentum": 0.9} | {k: v for k, v in settings.items() if k in names}
    peers = [p.clone().requires_grad_() for p in exact]
    peer = torch.optim.SGD(peers, **sgd)
    decay, lr = settings.get("weight_decay", 0.0), float(settings["lr"])
    for grads in of_steps:
        for p, g in zip(peers, grads, strict=True):
            p.grad = -g if settings.get("maximize") else g
            a, b = p.detach().norm(), g.norm()
            if a > 0 and b > 0:
                ratio = settings.get("trust_coefficient", 1e-3) * a
                ratio = ratio / (b + decay * a + settings.get("eps", 1e-8))
                p.grad = (p.grad + decay * p.detach()) * ratio
                if settings.get("clip"):
                    p.grad = p.grad * min(1 / ratio, 1 / lr)
        peer.step()
    _assert_close(found, [p.detach() for p in peers], steps * lr)


@pytest.mark.parametrize("make", [optim.LAMB, optim.LARS])
def test_zeros_have_no_scale(make: Any, backend: str) -> None:
    """A parameter of zeros moves as if it had one; without a gradient it stays."""
    zero, still = (torch.full((3,), value, requires_grad=True) for value in (0.0, 2.0))
    zero.grad, still.grad = torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3)
    make([zero, still], 0.5).step()
    assert zero.tolist() == pytest.approx([-0.5, 0.5, 0.0], rel=1e-5)
    assert still.tolist() == [2.0] * 3


def _norms(optimizer: Any, task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of parameters and of their steps."""
    optimizer._rule.measure(task)
    of_param, of_step = task.sums.sqrt().unbind(1)
    return of_param, of_step


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_the_norms_are_exact(name: str) -> None:
    """At any thread count the ratio over 10^6 elements is bitwise that in float64."""
    p = torch.randn(1000, 1013, generator=torch.Generator().manual_seed(0)).requires_grad_()
    p.grad = p.detach().flip(0) * 1e-3
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            optimizer = getattr(optim, name)([p])
            (task,) = optimizer._tasks()
            found.append(_norms(optimizer, task))
    finally:
        torch.set_num_threads(threads)
    of_param, of_step = found[0]
    assert all(torch.equal(a, of_param) and torch.equal(b, of_step) for a, b in found)
    with torchweld.use_backend("eager"):
        a, b = _norms(optimizer, task)
    torch.testing.assert_close(of_param, a, rtol=1e-13, atol=0)
    torch.testing.assert_close(of_step, b, rtol=1e-13, atol=0)


def test_gradients_that_are_not_finite(backend: str) -> None:
    """Only the block's element is skipped, and it does not enter the norm."""
    results = []
    for bad in (torch.nan, torch.inf, 0.0):
        (p,), optimizer = run(lambda p: optim.LAMB8bit(p, 1e-2), 2, shapes=[(16, 300)])
        before = p.detach().clone()
        draw_grads([p], 7)
        p.grad[3, 7] = bad
        optimizer.step()
        assert bad == 0 or p[3, 7] == before[3, 7]
        assert p.isfinite().all()
        p.data[3, 7] = 0
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1])
    # Without that element the norm of 4800 is smaller by a few parts in ten thousand.
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-2 * 1e-3 * 10)


@pytest.mark.parametrize("name", ["LAMB", "LARS", "LAMB8bit"])
def test_a_saved_run_goes_on(name: str) -> None:
    def make(params: Any) -> Optimizer:
        return getattr(optim, name)(params, 1e-2, weight_decay=0.1)

    a, first = run(make)
    b = [p.detach().clone().requires_grad_() for p in a]
    second = make(b)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for params, optimizer in ((a, first), (b, second)):
        draw_grads(params, 20)
        optimizer.step()
    assert same(snapshot(a, first), snapshot(b, second))


# --- Schedulers -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.LARS, optim.LAMB])
@pytest.mark.parametrize(
    ("schedule", "scale"), [(lr_scheduler.LinearScaling, 16.0), (lr_scheduler.SqrtScaling, 4.0)]
)
def test_a_large_batch(schedule: Any, scale: float, optimizer: Any) -> None:
    """Warm-up, decay and end; each group keeps its own rate; a saved schedule resumes."""
    lr = torch.tensor(0.1)
    params = draw()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": lr}]
    trained = optimizer(groups, lr=0.2)

    def make(last: int = -1) -> Any:
        return schedule(
            trained,
            4096,
            256,
            warmup_steps=4,
            total_steps=10,
            power=2.0,
            warmup_start=0.5,
            last_epoch=last,
        )

    scheduler, found = make(), []
    for step in range(12):
        found.append([float(group["lr"]) for group in trained.param_groups])
        draw_grads(params, step)
        trained.step()
        if step == 5:
            saved = scheduler.state_dict()
            scheduler = make(5)
            scheduler.load_state_dict(saved)
        scheduler.step()
    rise = [0.5, 0.625, 0.75, 0.875, 1.0]
    expected = rise + [((10 - step) / 6) ** 2 for step in range(5, 10)] + [0.0, 0.0]
    for (first, second), factor in zip(found, expected, strict=True):
        assert first == pytest.approx(0.2 * scale * factor)
        assert second == pytest.approx(0.1 * scale * factor)
    assert trained.param_groups[1]["lr"] is lr  # changed in place, as by torch's schedulers


def test_a_step_has_the_learning_rate_of_its_schedule() -> None:
    """What a parameter moves by follows it: LAMB's step is lr times the parameter's norm."""
    p = torch.full((4,), 1.0, requires_grad=True)
    optimizer = optim.LAMB([p], 1e-3)
    scheduler = lr_scheduler.SqrtScaling(optimizer, 400, 100, warmup_steps=2)
    moved = []
    for _ in range(4):
        before = p.detach().clone()
        p.grad = torch.ones(4)
        optimizer.step()
        moved.append(((before - p).norm() / before.norm()).item())
        scheduler.step()
    assert moved == pytest.approx([0.0, 1e-3, 2e-3, 2e-3], rel=1e-3, abs=1e-9)
    assert math.isclose(scheduler.get_last_lr()[0], 2e-3)


BAD: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": 0},
    "base_batch_size": {"base_batch_size": -1},
    "warmup_steps": {"warmup_steps": -1},
    "warmup_start": {"warmup_start": 1.5},
    "power": {"power": -1.0},
    "total_steps": {"warmup_steps": 5, "total_steps": 5},
}


@pytest.mark.parametrize("argument", BAD)
def test_arguments_of_schedules_are_named(argument: str) -> None:
    optimizer = optim.LARS(draw())
    given = {"batch_size": 1024, "base_batch_size": 256} | BAD[argument]
    with pytest.raises(torchweld.ArgumentError) as caught:
        lr_scheduler.LinearScaling(optimizer, **given)
    assert caught.value.argument == argument
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_momentum_that_begins_late(backend: str) -> None:
    """As in torch: its first gradient is undampened, and parameters keep earlier steps."""
    made = [draw(), draw()]
    optimizers = [m.SGD(p, 0.1) for m, p in zip((optim, torch.optim), made, strict=True)]
    for seed in range(6):
        for params, optimizer in zip(made, optimizers, strict=True):
            if seed == 2:
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
            draw_grads(params, seed)
            optimizer.step()
    for p, q in zip(*made, strict=True):
        assert ((p - q).abs() <= 6 * 8 * U * (q.abs() + 1)).all()
