"""Averages of parameters in the step: torch's AveragedModel, what is shown, and what is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchweld
from optimizers import U, draw, draw_grads, run, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param

SHAPES = ((7,), (33, 70), (16, 256))
MAKERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "SGD": lambda p, **s: optim.SGD(p, momentum=0.9, **s),
    "Lion": optim.Lion,
    "LAMB": optim.LAMB,
    "LARS": lambda p, **s: optim.LARS(p, trust_coefficient=1.0, **s),
    "AdEMAMix": optim.AdEMAMix,
    "Muon": lambda p, **s: optim.Muon([{"params": p[1:]}, {"params": p[:1], "rule": "lion"}], **s),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_of_torchs_model(name: str, dtype: torch.dtype, backend: str) -> None:
    """AveragedModel of float32 copies, updated before the first step and after each.

    Its first update copies the parameters. Training is not changed by it.
    """
    make = MAKERS[name]
    params = draw(dtype, SHAPES)
    model = torch.nn.ParameterList([p.detach().float() for p in params])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    optimizer = make(params, lr=1e-2, ema_decay=0.9)
    for seed in range(5):
        draw_grads(params, seed)
        optimizer.step()
        with torch.no_grad():
            for copied, p in zip(model, params, strict=True):
                copied.copy_(p)
        averaged.update_parameters(model)
    for p, expected in zip(params, averaged.module.parameters(), strict=True):
        assert optimizer.state[p]["ema"].dtype == torch.float32
        # torch's lerp rounds a product and a sum together.
        torch.testing.assert_close(
            optimizer.state[p]["ema"], expected.detach(), rtol=0, atol=5 * 2 * U * 5
        )
        assert not torch.equal(optimizer.state[p]["ema"], p.float())
    plain, _ = run(lambda p: make(p, lr=1e-2), 5, dtype, SHAPES)
    assert same([p.detach() for p in plain], [p.detach() for p in params])


@pytest.mark.parametrize("masters", [True, "remainder", "remainder8"])
def test_masters_are_averaged(masters: Any, backend: str) -> None:
    params, optimizer = run(
        lambda p: optim.AdamW(p, lr=1e-4, master_weights=masters, ema_decay=0.5),
        1,
        torch.bfloat16,
        SHAPES,
    )
    for p, start in zip(params, draw(torch.bfloat16, SHAPES), strict=True):
        state = optimizer.state[p]
        full = read_param(p.detach(), state["master" if masters is True else "remainder"])
        expected = (start.float() + full) / 2
        torch.testing.assert_close(state["ema"], expected.detach(), rtol=2 * U, atol=0)
        assert (full != start).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_are_shown_and_parameters_return(dtype: torch.dtype) -> None:
    params, optimizer = run(lambda p: optim.AdamW(p, ema_decay=0.9), 3, dtype, SHAPES)
    assert isinstance(optimizer, optim.AdamW)
    before = snapshot(params, optimizer)
    with optimizer.ema_weights():
        for p in params:
            assert torch.equal(p, optimizer.state[p]["ema"].to(dtype))
        with pytest.raises(torchweld.ArgumentError, match="ema_weights"):
            optimizer.step()
        with pytest.raises(torchweld.ArgumentError, match="twice"), optimizer.ema_weights():
            pass
    assert same(before, snapshot(params, optimizer))
    optimizer.step()
    with pytest.raises(ZeroDivisionError), optimizer.ema_weights():
        _ = 1 // 0
    optimizer.step()
    with (
        pytest.raises(torchweld.ArgumentError, match="ema_decay"),
        optim.AdamW(draw()).ema_weights(),
    ):
        pass


def test_a_saved_average_goes_on() -> None:
    """Also one that begins at a checkpoint without it."""
    params, optimizer = run(lambda p: optim.AdamW(p, ema_decay=0.9), 3, shapes=SHAPES)
    others = [p.detach().clone().requires_grad_() for p in params]
    again = optim.AdamW(others, ema_decay=0.9)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some, one in ((params, optimizer), (others, again)):
        draw_grads(some, 9)
        one.step()
    assert same(snapshot(params, optimizer), snapshot(others, again))
    plain = optim.AdamW([p.detach().clone().requires_grad_() for p in params])
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    late = [p.detach().clone().requires_grad_() for p in params]
    begun = optim.AdamW(late, ema_decay=0.9)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        del entries["ema"]
    begun.load_state_dict(state)
    assert all(torch.equal(begun.state[p]["ema"], p) for p in late)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_what_is_refused(decay: float) -> None:
    with pytest.raises(torchweld.ArgumentError, match="ema_decay"):
        optim.AdamW(draw(), ema_decay=decay)
    with pytest.raises(torchweld.ArgumentError, match="ema_decay"):
        optim.AdamW([{"params": draw(), "ema_decay": 0.9}])
    for held in (optim.AdamW(draw(), ema_decay=0.9), optim.ScheduleFreeAdamW(draw())):
        with pytest.raises(torchweld.ArgumentError, match="params_or_optimizer"):
            optim.Offload(held)


def test_averages_of_muon_begin_with_loaded_weights() -> None:
    """Its states are made with the optimizer, before a model may be loaded."""
    params = draw(shapes=SHAPES[1:])
    optimizer = optim.Muon(params, ema_decay=0.5)
    with torch.no_grad():
        for p in params:
            p.fill_(3.0)
    optimizer.refresh_masters()
    for _ in range(2):
        assert all((optimizer.state[p]["ema"] == 3).all() for p in params)
        optimizer.refresh_masters()
    draw_grads(params, 0)
    optimizer.step()
    averages = [optimizer.state[p]["ema"].clone() for p in params]
    optimizer.refresh_masters()
    assert same(averages, [optimizer.state[p]["ema"] for p in params])
