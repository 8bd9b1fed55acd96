"""The matrix: models trained by each strategy equal themselves trained by one process.

Some steps with dropout, on real processes. `make test` runs a covering subset; `make stack` runs
ten steps of all cells and writes docs/stack.md.
"""

from __future__ import annotations

import pytest

import selection
import stack_cells
from oracle import TORCH
from processes import processes
from stack import STRATEGIES
from stack_cells import Cell

CELLS = stack_cells.ALL if selection.WHOLE else stack_cells.covering()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    if TORCH < (2, 12) and "ring" in cell.strategy:
        pytest.skip("DTensor of torch < 2.12 refuses a linear layer of a shard of the sequence")
    if TORCH < (2, 12) and "PP" in cell.strategy and cell.dtype == "bf16":
        pytest.skip("stages of torch < 2.12 return the dtype of their examples, under autocast too")
    if TORCH < (2, 12) and cell.strategy in ("PP ZBV", "PP DualPipeV"):
        pytest.skip(
            "torch < 2.12 sends between stages that are neighbours on one rank; gloo cannot"
        )
    reference = stack_cells.reference(cell.model, cell.dtype)
    with processes(STRATEGIES[cell.strategy].processes) as some:
        some.run("cpu", stack_cells.run, cell, reference, stack_cells.results_file())
