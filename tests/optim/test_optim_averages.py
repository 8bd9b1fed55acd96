"""Averages of parameters: schedule-free's modes, and moving averages in the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchweld
from optimizers import ScheduleFreeAdamW, U, draw, draw_grads, run, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param

SHAPES = ((7,), (33, 70), (16, 256))
Params = list[torch.Tensor]

# --- Schedule-free ----------------------------------------------------------------------------


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


# --- In the step ---

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
