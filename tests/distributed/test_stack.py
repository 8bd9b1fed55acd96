"""Models trained by each strategy, and by each declaration, equal themselves in one process.

Some steps with dropout, on real processes. `make test` runs a covering subset; `make stack` runs
ten steps of all cells and all declarations, and writes docs/stack.md. The declarations hold each
combination of pipeline, tensors, ring and data parallelism, and each pair of other values that are
accepted together. CI runs declarations of at most two processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import declared
import selection
import stack_cells
from comparing import has_neighbours, shares_rows
from declared import Declaration
from oracle import TORCH
from processes import processes
from stack import STRATEGIES
from stack_cells import Cell

CELLS = stack_cells.ALL if selection.WHOLE else stack_cells.covering()
RESULTS = stack_cells.results_file()
CASES = [d for d in declared.cover() if RESULTS or d.processes <= 2]
keeps_dtype = pytest.mark.skipif(
    TORCH < (2, 12), reason="stages return the dtype of their examples, under autocast too"
)


def _mark(case: Cell | Declaration, name: str) -> Any:
    """Marks of what an older torch cannot do."""
    marks = [shares_rows] * ("ring" in name)
    marks += [has_neighbours] * any(each in name for each in ("ZBV", "zbv", "DualPipeV"))
    marks += [keeps_dtype] * ("PP" in name and "bf16" in str(case))
    return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("cell", [_mark(cell, cell.strategy) for cell in CELLS])
def test_equals_one_process(cell: Cell) -> None:
    reference = stack_cells.reference(cell.model, cell.dtype)
    with processes(STRATEGIES[cell.strategy].processes) as some:
        some.run("cpu", stack_cells.run, cell, reference, RESULTS)


@pytest.mark.parametrize("declaration", [_mark(d, d.name) for d in CASES])
def test_trains_as_one_process(declaration: Declaration) -> None:
    optimizer = declaration.config["optimizer"]
    path = Path(declared.folder().name) / optimizer["name"]
    if not path.exists():
        with processes(1) as one:
            one.run("cpu", declared.write_reference, {"optimizer": optimizer}, str(path))
    with processes(declaration.processes) as some:
        some.run("cpu", declared.compare, declaration, str(path), RESULTS)
