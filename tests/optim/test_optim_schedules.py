"""The schedulers for large batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizers import draw, draw_grads
from torchweld import optim
from torchweld.optim import lr_scheduler


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
