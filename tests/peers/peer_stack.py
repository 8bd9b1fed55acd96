"""DeepSpeed's ZeRO-1, 2 and 3 with torchweld's model and optimizer: cells of the matrix, 8 bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import stack_cells
from processes import processes
from stack import DTYPES, MICROBATCHES, MODELS, ROWS, Cell, Run, adamw
from torchweld import nn, optim

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
pytestmark = pytest.mark.filterwarnings("ignore")


def _zero(name: str, dtype: torch.dtype, stage: int, rank: int, count: int) -> Run:
    import deepspeed

    cell, each = Cell(name, dtype), MICROBATCHES // count
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": each,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=cell.model, optimizer=adamw(cell.model), config=config)

    def step(number: int) -> torch.Tensor:
        cell.begin(number, rank * each)
        total = torch.zeros(())
        for m in range(rank * each, (rank + 1) * each):
            tokens, targets = cell.microbatch(number, m)
            with cell.autocast():
                loss = cell.loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / each
        return total

    counted = cell.train(step, _Stepped())
    with deepspeed.zero.GatheredParameters(list(cell.model.parameters())):
        return cell.left(counted, of=count)


class _Stepped:
    """Adapts DeepSpeed's engine, which steps by itself."""

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


def _begin(port: str) -> None:
    import logging

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    logging.disable(logging.WARNING)


def _cell(rank: int, cell: stack_cells.Cell, path: str, results: str | None) -> None:
    _begin("29556")
    run: Any = _zero(cell.model, DTYPES[cell.dtype], int(cell.strategy[-1]), rank, 2)
    stack_cells.hold(rank, cell, run, path, results)


RESULTS = stack_cells.results_file()
KINDS = [(m, d) for m in MODELS for d in DTYPES]
CELLS = [
    stack_cells.Cell(f"DeepSpeed ZeRO-{stage}", model, dtype)
    for stage in (1, 2, 3)
    for model, dtype in (KINDS if RESULTS else KINDS[stage - 1 :: 3])
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: stack_cells.Cell) -> None:
    with processes(2, "deepspeed") as two:
        two.run("cpu", _cell, cell, stack_cells.reference(cell.model, cell.dtype), RESULTS)


class _Model(torch.nn.Module):
    """Our modules, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(96), nn.MLP(96, 600)
        self.add, self.head = nn.DropoutAddLayerNorm(96, p=0.2), torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.add(self.mlp(self.norm(x)), x))


def _train(rank: int, stage: int, make: Any, **settings: Any) -> list[float]:
    """The losses of a run; its stage flattens parameters, and every part has its own moments."""
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
    for step in range(6):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2 * step + rank))
        torch.manual_seed(100 * step + rank)  # dropout does not depend on the stage
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    states = [s for s in optimizer.state.values() if "exp_avg" in s]
    assert states
    assert all(s["exp_avg"].dim() == 1 and s["exp_avg"].dtype == torch.float32 for s in states)
    return losses


def _clips(rank: int) -> None:
    _begin("29555")
    for stage in (1, 2, 3):
        expected = _train(rank, stage, torch.optim.AdamW)
        assert expected[-1] < expected[0]
        for settings in ({}, {"state_dtype": "8bit"}):
            found = _train(rank, stage, optim.AdamW, **settings)
            assert found == pytest.approx(expected, rel=1e-5)


def test_clipping_and_8_bits() -> None:
    """Each stage trains as with torch's AdamW; of flat parameters moments are float32."""
    with processes(2, "deepspeed") as started:
        started.run("cpu", _clips)
