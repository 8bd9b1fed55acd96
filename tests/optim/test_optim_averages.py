"""AdEMAMix and schedule-free AdamW: their papers in float64, their modes, and their states."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchweld
from optimizers import ScheduleFreeAdamW, U, draw, draw_grads, run, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param

SHAPES = ((7,), (33, 70), (16, 256))
Params = list[torch.Tensor]


def _grads(steps: int) -> Iterator[Params]:
    params = draw(shapes=SHAPES)
    for seed in range(steps):
        draw_grads(params, seed)
        yield [p.grad.double() for p in params if p.grad is not None]


def _ademamix(steps: int, lr: float, decay: float, alpha_end: float, warmup: int) -> Params:
    """Algorithm 1 of the paper, with its schedulers of alpha and beta3."""
    beta1, beta2, last = 0.9, 0.999, 0.999
    params = [p.detach().double() for p in draw(shapes=SHAPES)]
    fast, slow, square = ([torch.zeros_like(p) for p in params] for _ in range(3))
    for t, grads in enumerate(_grads(steps), start=1):
        alpha = min(t / warmup, 1) * alpha_end if warmup else alpha_end
        beta3 = last
        if t < warmup:
            # The paper's formula, of the logarithms of both ends.
            a, b = math.log(beta1), math.log(last)
            beta3 = min(math.exp(a * b / ((1 - t / warmup) * b + t / warmup * a)), last)
        for i, g in enumerate(grads):
            fast[i] = beta1 * fast[i] + (1 - beta1) * g
            slow[i] = beta3 * slow[i] + (1 - beta3) * g
            square[i] = beta2 * square[i] + (1 - beta2) * g * g
            above = fast[i] / (1 - beta1**t) + alpha * slow[i]
            u = above / ((square[i] / (1 - beta2**t)).sqrt() + 1e-8)
            params[i] = params[i] - lr * (u + decay * params[i])
    return params


def _schedule_free(steps: int, lr: float, decay: float, warmup: int, r: float) -> list[Params]:
    """Algorithm 1 of the paper: y, z and x, each stored, and x an average of all z."""
    beta1, beta2 = 0.9, 0.999
    z = [p.detach().double() for p in draw(shapes=SHAPES)]
    x, y, square = list(z), list(z), [torch.zeros_like(p) for p in z]
    weights = 0.0
    for t, grads in enumerate(_grads(steps), start=1):
        rate = lr * min(1.0, t / warmup) if warmup else lr
        weight = t**r * rate**2
        weights += weight
        for i, g in enumerate(grads):
            square[i] = beta2 * square[i] + (1 - beta2) * g * g
            d = g / ((square[i] / (1 - beta2**t)).sqrt() + 1e-8) + decay * y[i]
            z[i] = z[i] - rate * d
            x[i] = x[i] + weight / weights * (z[i] - x[i])
            y[i] = (1 - beta1) * z[i] + beta1 * x[i]
    return [y, z, x]


def _off(found: Params, exact: Params) -> float:
    return max((p.double() - e).abs().max().item() for p, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("warmup", [0, 30])
def test_fifty_steps_of_ademamix(warmup: int, backend: str) -> None:
    settings = {"betas": (0.9, 0.999, 0.999), "alpha": 5.0, "weight_decay": 0.1, "lr": 1e-2}
    if warmup:
        settings |= {"alpha_warmup": warmup, "beta3_warmup": warmup}
    params, _ = run(lambda p: optim.AdEMAMix(p, **settings), 50, shapes=SHAPES)
    exact = _ademamix(50, 1e-2, 0.1, 5.0, warmup)
    # A step moves by up to lr * (1 + alpha), with twenty roundings of it, and rounds a parameter of
    # up to 5 twice. The schedule of beta3 differs by the 1e-8 in its logarithm: 1e-6 of a step.
    bound = 50 * (1e-2 * 6 * 20 * U + 2 * 5 * U + 1e-2 * 6 * 1e-6)
    assert _off(params, exact) <= bound
    assert _off(params, _ademamix(50, 1e-2, 0.1, 5.0, 30 - warmup)) > 10 * bound


@pytest.mark.parametrize(("warmup", "r"), [(0, 0.0), (20, 1.0)])
def test_fifty_steps_of_schedule_free(warmup: int, r: float, backend: str) -> None:
    """The parameter is y in train mode and x in eval mode, and the state has z."""
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": warmup, "r": r}
    params, optimizer = run(lambda p: ScheduleFreeAdamW(p, **settings), 50, shapes=SHAPES)
    assert isinstance(optimizer, optim.ScheduleFreeAdamW)
    y, z, x = _schedule_free(50, 1e-2, 0.1, warmup, r)
    bound = 50 * (1e-2 * 20 * U + 6 * 5 * U)
    assert _off(params, y) <= bound
    assert _off([optimizer.state[p]["z"] for p in params], z) <= bound
    optimizer.eval()
    assert _off(params, x) <= 2 * bound
    assert _off(params, y) > 10 * bound
    assert optimizer.param_groups[0]["k"] == 50


@pytest.mark.parametrize("masters", [False, True, "remainder", "remainder8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modes_return_bit_for_bit(dtype: torch.dtype, masters: Any) -> None:
    def make(p: Params) -> optim.ScheduleFreeAdamW:
        return ScheduleFreeAdamW(p, lr=1e-2, master_weights=masters)

    (params, optimizer), (others, twin) = (run(make, 5, dtype, SHAPES) for _ in range(2))
    assert isinstance(optimizer, optim.ScheduleFreeAdamW)
    before = snapshot(params, optimizer)
    optimizer.eval()
    optimizer.eval()
    state = optimizer.state[params[1]]
    y = before[1].double() if not masters or dtype == torch.float32 else None
    if y is not None:  # x lies beyond y, seen from z
        x = y + (y - state["z"].double()) / 9
        unit = U if dtype == torch.float32 else 2.0**-8
        assert ((params[1].double() - x).abs() <= 4 * unit * x.abs() + 4 * U).all()
    assert not torch.equal(params[1], before[1])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    assert same(snapshot(params, optimizer), before)
    optimizer.eval()
    with pytest.raises(torchweld.ArgumentError, match=r"train\(\)"):
        optimizer.step()
    optimizer.train()
    for some, one in ((params, optimizer), (others, twin)):
        draw_grads(some, 7)
        one.step()
    assert same(snapshot(params, optimizer), snapshot(others, twin))
    # A checkpoint of eval mode: the points of gradients return within their roundings.
    optimizer.eval()
    again = optim.ScheduleFreeAdamW([p.detach().clone() for p in params], master_weights=masters)
    again.load_state_dict(saved)
    assert not again.param_groups[0]["train_mode"]
    assert again.param_groups[0]["k"] == 5


def test_a_write_in_eval_mode_is_kept() -> None:
    params, optimizer = run(ScheduleFreeAdamW, 3, shapes=SHAPES)
    assert isinstance(optimizer, optim.ScheduleFreeAdamW)
    optimizer.eval()
    with torch.no_grad():
        params[0].fill_(2.0)
    z = optimizer.state[params[0]]["z"]
    optimizer.train()
    torch.testing.assert_close(params[0].detach(), 2 + (z - 2) * (1 - 0.9))


def test_the_authors_states_load() -> None:
    """Their names, and groups that count steps; a state of theirs has no count of its own."""
    params, optimizer = run(ScheduleFreeAdamW, 4, shapes=SHAPES)
    state = optimizer.state_dict()
    assert state["state"][0].keys() == {"step", "z", "exp_avg_sq"}
    assert state["param_groups"][0].keys() == {
        *("lr", "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power", "params"),
        *("k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"),
    }
    theirs = copy.deepcopy(state)
    for entries in theirs["state"].values():
        del entries["step"]
    others = [p.detach().clone().requires_grad_() for p in params]
    again = ScheduleFreeAdamW(others)
    again.load_state_dict(theirs)
    for some, one in ((params, optimizer), (others, again)):
        draw_grads(some, 7)
        one.step()
    assert same(snapshot(params, optimizer), snapshot(others, again))
    mixed, _ = run(optim.AdEMAMix, 1, shapes=SHAPES)
    keys = optim.AdEMAMix(mixed).param_groups[0].keys()
    assert {"lr", "betas", "alpha", "beta3_warmup", "alpha_warmup", "eps"} <= keys


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_group_that_is_added_later_is_in_the_mode_of_the_others(mode: str) -> None:
    """Each group's trajectory equals a separate optimizer's."""
    first, second = torch.linspace(-1, 1, 12), torch.linspace(2, 3, 8)
    together = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    apart = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    optimizer = optim.ScheduleFreeAdamW(together[:1], lr=0.1)
    alone = [optim.ScheduleFreeAdamW([p], lr=0.1) for p in apart]
    for each in (optimizer, *alone):
        each.train()
    for step in range(4):
        if step == 2:
            getattr(optimizer, mode)()
            optimizer.add_param_group({"params": together[1:]})
            if mode == "eval":
                optimizer.train()
        for i, (p, own) in enumerate(zip(together, apart, strict=True)):
            p.grad = own.grad = torch.full_like(p, 0.3 - step)
            if i == 0 or step >= 2:
                alone[i].step()
        optimizer.step()
    for each in (optimizer, *alone):
        each.eval()
    assert same(together, apart)  # type: ignore[arg-type]


def test_a_scaler_skips_what_the_host_counts() -> None:
    params, optimizer = run(ScheduleFreeAdamW, 2, shapes=SHAPES)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    before = snapshot(params, optimizer)
    draw_grads(params, 9, scale=25.6)
    assert params[0].grad is not None
    params[0].grad[0] = torch.inf
    scaler.step(optimizer)
    assert same(before, snapshot(params, optimizer))
    assert optimizer.param_groups[0]["k"] == 2
    scaler.update()
    draw_grads(params, 9, scale=12.8)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["k"] == 3


@pytest.mark.parametrize(
    ("make", "settings", "match"),
    [
        (optim.AdEMAMix, {"betas": (0.9, 0.999)}, "betas.*three"),
        (optim.AdEMAMix, {"alpha": -1.0}, "alpha"),
        (optim.AdEMAMix, {"alpha_warmup": 1.5}, "alpha_warmup"),
        (optim.AdEMAMix, {"beta3_warmup": 5, "betas": (0.0, 0.9, 0.99)}, "beta3_warmup"),
        (optim.ScheduleFreeAdamW, {"betas": (0.0, 0.99)}, "betas"),
        (optim.ScheduleFreeAdamW, {"capturable": True}, "capturable"),
        (optim.ScheduleFreeAdamW, {"warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_what_is_refused(make: Callable[..., Any], settings: dict[str, Any], match: str) -> None:
    with pytest.raises(torchweld.ArgumentError, match=match):
        make(draw(shapes=SHAPES), **settings)
    with pytest.raises(torchweld.ArgumentError, match=match):
        make([{"params": draw(shapes=SHAPES), **settings}])


def test_the_iterate_completes_sixteen_bits() -> None:
    """z is float32 for bfloat16 parameters, with codes for the second moment."""
    params, optimizer = run(
        lambda p: ScheduleFreeAdamW(
            p, state_dtype="8bit", master_weights="remainder8", min_quantized_size=0
        ),
        3,
        torch.bfloat16,
        SHAPES,
    )
    state = optimizer.state[params[1]]
    assert state["z"].dtype == torch.float32
    assert state["exp_avg_sq_codes"].dtype == torch.uint8
    assert state["remainder"].dtype == torch.int8
    assert (read_param(params[1].detach(), state["remainder"]) != params[1]).any()
