"""What parallelize() accepts trains as one process does, with the same optimizer.

The declarations hold each combination of pipeline, tensors, ring and data parallelism, and each
pair of other values that are accepted together. CI runs the ones with two processes; `make stack`
runs all and writes docs/stack.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import declared
from declared import Declaration
from oracle import TORCH
from processes import processes
from stack_cells import results_file

RESULTS = results_file()
CASES = [d for d in declared.cover() if RESULTS or d.processes <= 2]


@pytest.mark.parametrize("declaration", CASES, ids=str)
def test_trains_as_one_process(declaration: Declaration) -> None:
    if TORCH < (2, 12) and "ring" in declaration.name:
        pytest.skip("DTensor of torch < 2.12 refuses a linear layer of a shard of the sequence")
    if TORCH < (2, 12) and "zbv" in declaration.name:
        pytest.skip(
            "torch < 2.12 sends between stages that are neighbours on one rank; gloo cannot"
        )
    optimizer = declaration.config["optimizer"]
    path = Path(declared.folder().name) / optimizer["name"]
    if not path.exists():
        with processes(1) as one:
            one.run("cpu", declared.write_reference, {"optimizer": optimizer}, str(path))
    with processes(declaration.processes) as some:
        some.run("cpu", declared.compare, declaration, str(path), RESULTS)
