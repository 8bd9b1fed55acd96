"""DeepSpeed's cells of the matrix: ZeRO-1, 2 and 3 with torchweld's model and optimizer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import stack_cells
from processes import processes
from stack import DTYPES, MICROBATCHES, MODELS, ROWS, Cell, Run, adamw

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


def _cell(rank: int, cell: stack_cells.Cell, path: str, results: str | None) -> None:
    import logging

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556")
    logging.disable(logging.WARNING)
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
