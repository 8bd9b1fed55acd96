"""Optimizers: torch.optim's habits, checkpoints and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizers import (
    Optimizer,
    ScheduleFreeAdamW,
    draw,
    draw_grads,
    run_bits,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.optim import lr_scheduler

# --- torch.optim's habits ---------------------------------------------------------------------


def test_arguments_of_torchs_constructors() -> None:
    assert isinstance(optim.AdamW(draw()), torch.optim.AdamW)
    assert isinstance(optim.Adam(draw()), torch.optim.Adam)
    a = run_bits(lambda p: optim.Adam(p, 1e-3, decoupled_weight_decay=True))
    assert same(a, run_bits(lambda p: optim.AdamW(p, 1e-3, weight_decay=0)))


def test_groups_closures_hooks_and_schedulers() -> None:
    a, b = draw(), draw()
    for_group = {"lr": 1e-3, "weight_decay": 0.0}

    def make(module: Any, params: list[torch.Tensor]) -> Optimizer:
        groups = [{"params": params[:2]}, dict(params=params[2:5], **for_group), {"params": []}]
        optimizer = module.AdamW(groups, lr=1e-2)
        optimizer.add_param_group({"params": params[5:], "betas": (0.5, 0.9)})
        return optimizer

    pairs = [(a, make(optim, a)), (b, make(torch.optim, b))]
    called = []
    pairs[0][1].register_step_pre_hook(lambda *_: called.append("before"))
    pairs[0][1].register_step_post_hook(lambda *_: called.append("after"))
    for params, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def closure(params: Any = params, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p.square().sum() for p in params), torch.zeros(()))
            loss.backward()
            params[1].grad = None  # a frozen one
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure))
            scheduler.step()
        assert losses[0] > losses[-1]
    assert called == ["before", "after"] * 3
    assert not pairs[0][1].state.get(a[1])
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_stale_saved_tensor_is_noticed(backend: str) -> None:
    """A step increments the versions of the tensors it writes."""
    p = draw(shapes=[(64, 64)])[0]
    optimizer = optim.AdamW([p], state_dtype="8bit")
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    versions = [v._version for v in optimizer.state[p].values()]
    optimizer.step()
    assert all(v._version > w for v, w in zip(optimizer.state[p].values(), versions, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, cautious=True, ema_decay=0.9),
        ScheduleFreeAdamW,
        lambda p: optim.Muon(p, ns_dtype=torch.float32, ns_steps=1),
    ],
    ids=["AdamW", "schedule-free", "Muon"],
)
def test_a_compiled_step_has_the_same_bits(make: Any) -> None:
    torch.compiler.reset()
    results = []
    for compiles in (False, True):
        params = draw(shapes=[(8, 40), (5, 6)])
        optimizer = make(params)
        step: Any = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for seed in range(3):
            draw_grads(params, seed)
            step()
        results.append(snapshot(params, optimizer))
    assert same(*results)


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


# --- The schedulers for large batches -----------------------------------------------------------


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
