"""Cautious steps and cautious weight decay: signs, groups, and Muon's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from optimizers import draw, draw_grads, run, same
from torchweld import optim

SHAPES = ((7,), (33, 70), (16, 256), (40, 30))


def test_signs_of_tiny_numbers() -> None:
    """Products of the authors' code underflow; here every element moves."""
    p = torch.zeros(4, 4).requires_grad_()
    p.grad = torch.full((4, 4), 1e-30)
    optim.AdamW([p], lr=1.0, cautious=True, eps=1e-38).step()
    assert (p < 0).all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
def test_muon_moves_where_the_gradient_agrees(state_dtype: Any) -> None:
    """Compared with a step without the mask: zeros, and the rest divided by its share."""
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "ns_dtype": torch.float32}
    settings |= {"state_dtype": state_dtype, "min_quantized_size": 0}
    shapes = SHAPES[1:]
    for steps in (0, 2):
        moved = []
        for masks in (False, True):
            params, optimizer = run(lambda p: optim.Muon(p, **settings), steps, shapes=shapes)
            before = [p.detach().clone() for p in params]
            optimizer.param_groups[0]["cautious"] = masks
            draw_grads(params, 5)
            optimizer.step()
            moved.append([q - p.detach() for p, q in zip(params, before, strict=True)])
        grads = [p.grad for p in params if p.grad is not None]
        for plain, masked, g in zip(*moved, grads, strict=True):
            mask = plain * g > 0
            expected = plain * mask / mask.double().mean()
            torch.testing.assert_close(masked, expected.float(), rtol=1e-4, atol=4 * 2.0**-22)
            assert 0.5 < mask.float().mean() < 1


def test_muon_spares_what_its_step_moves_away_from_zero() -> None:
    shapes, results = SHAPES[1:], []
    for settings in ({}, {"cautious_decay": True}, {"weight_decay": 0.0}):
        make: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.5, "ns_dtype": torch.float32}
        params, _ = run(lambda p, s=make | settings: optim.Muon(p, **s), 1, shapes=shapes)
        results.append([p.detach() for p in params])
    for start, decayed, spared, plain in zip(draw(shapes=shapes), *results, strict=True):
        u = start.detach() - plain
        assert torch.equal(spared, torch.where(u * start < 0, plain, decayed))


def test_groups_have_their_own(backend: str) -> None:
    """Groups that differ share no batch, and the keys of a plain group are torch's."""
    shapes = [(16, 32)] * 4
    params, apart = draw(shapes=shapes), draw(shapes=shapes)
    flags: list[dict[str, Any]] = [{}, {"cautious": True}, {"cautious_decay": True}, {}]
    both = zip(params, flags, strict=True)
    together = optim.AdamW([{"params": [p], **flag} for p, flag in both], weight_decay=0.1)
    single = [
        optim.AdamW([p], weight_decay=0.1, **flag) for p, flag in zip(apart, flags, strict=True)
    ]
    for seed in range(4):
        for some in (params, apart):
            draw_grads(some, seed)
        for optimizer in (together, *single):
            optimizer.step()
    assert same([p.detach() for p in params], [p.detach() for p in apart])
    assert "cautious" not in together.param_groups[0]
    assert together.param_groups[1]["cautious"] is True
    again = optim.AdamW(draw(shapes=shapes), cautious=True)
    again.load_state_dict(torch.optim.AdamW(draw(shapes=shapes)).state_dict())
    assert again.param_groups[0]["cautious"] is True


def test_nothing_agrees() -> None:
    """The share counts as at least 1/1000: no division by zero."""
    p = torch.ones(100, 20).requires_grad_()
    optimizer = optim.Lion([p], lr=1.0, cautious=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.full_like(p, -0.05)  # the momentum of 0.01 outweighs a tenth of it
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    p.grad[0, 0] = 1.0
    optimizer.step()
    assert math.isclose((before - p.detach())[0, 0].item(), 1000.0)
