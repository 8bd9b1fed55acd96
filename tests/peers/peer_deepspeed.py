"""Our modules and optimizers inside DeepSpeed's ZeRO, on two processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from processes import processes
from torchweld import nn, optim

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


class _Model(torch.nn.Module):
    """Our modules, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(96), nn.MLP(96, 600)
        self.add, self.head = nn.DropoutAddLayerNorm(96, p=0.2), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.add(self.mlp(self.norm(x)), x))


def _train(rank: int, stage: int, make: Any, **settings: Any) -> list[float]:
    """The losses of a run that divides parameters and moments as the stage does."""
    import deepspeed

    torch.manual_seed(0)
    model = _Model()
    optimizer = make(model.parameters(), 1e-2, weight_decay=0.1, **settings)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.1,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2 * step + rank))
        torch.manual_seed(100 * step + rank)  # dropout does not depend on the stage
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if stage:
        # The stages flatten parameters, and every part has its own moments.
        states = [s for s in optimizer.state.values() if "exp_avg" in s]
        assert states
        assert all(s["exp_avg"].dim() == 1 and s["exp_avg"].dtype == torch.float32 for s in states)
    return losses


def _zero(rank: int) -> None:
    import logging

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    logging.disable(logging.WARNING)
    whole = _train(rank, 0, torch.optim.AdamW)
    for stage in range(4):
        expected = _train(rank, stage, torch.optim.AdamW) if stage else whole
        assert expected[-1] < expected[0]
        assert expected == pytest.approx(whole, rel=1e-5)
        for settings in ({}, {"state_dtype": "8bit"}) if stage else ({},):
            found = _train(rank, stage, optim.AdamW, **settings)
            assert found == pytest.approx(expected, rel=1e-5)


def test_zero() -> None:
    """Each stage trains as with torch's AdamW; of flat parameters moments are float32.

    In processes that are ended from outside: DeepSpeed's do not always end well by themselves.
    """
    with processes(2, "deepspeed") as started:
        started.run("cpu", _zero)
