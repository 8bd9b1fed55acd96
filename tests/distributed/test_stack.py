"""The matrix: models trained by each strategy equal themselves trained by one process.

Ten steps with dropout, on real processes. CI runs a covering subset; `make stack` runs all cells
and writes docs/stack.md.
"""

from __future__ import annotations

import pytest

import stack_cells
from processes import processes
from stack import STRATEGIES
from stack_cells import Cell

CELLS = stack_cells.ALL if stack_cells.results_file() else stack_cells.covering()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(cell: Cell) -> None:
    reference = stack_cells.reference(cell.model, cell.dtype)
    with processes(STRATEGIES[cell.strategy].processes) as some:
        some.run("cpu", stack_cells.run, cell, reference, stack_cells.results_file())
