"""The imitation of Gluon is right where a kernel is, and finds planted faults of its protocol."""

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest

import fresh

pytest.importorskip("triton", reason="Triton is not installed")

import gluon_product
import imitated_gluon
from imitated_gluon import Descriptor, round_to_bfloat16

SOURCE = Path(gluon_product.__file__)
BLOCK, TILES, STEPS = 64, 5, 3


def _error(module: types.ModuleType) -> float:
    """The largest error of the kernel, in units of a rounding to bfloat16; NaN counts as one."""
    numbers = np.random.default_rng(0)
    a, b = (
        round_to_bfloat16(numbers.standard_normal((rows * BLOCK, STEPS * BLOCK)))
        for rows in (TILES, 1)
    )
    y = np.full((TILES * BLOCK, BLOCK), np.nan, np.float32)
    given = (Descriptor(each, (BLOCK, BLOCK)) for each in (a, b, y))
    imitated_gluon.run(module, "product", 2, *given, TILES, STEPS, BLOCK, BLOCK, BLOCK, 2)
    exact = 2 * (a.astype(np.float64) @ b.astype(np.float64).T)
    error = np.abs(y - exact) / (np.abs(exact) * 2**-8 + 1e-3)
    return float(np.nan_to_num(error, nan=np.inf).max())


def test_a_right_kernel_is_right() -> None:
    assert _error(gluon_product) <= 1


def test_it_compiles_without_a_spill() -> None:
    found = json.loads(fresh.run_file(str(SOURCE), TRITON_INTERPRET="0"))
    assert found["spilled"] == 0


WAIT = "acc = warpgroup_mma_wait(0, deps=(acc,))"
FREE = "mbarrier.arrive(free.index(slot), count=1)"
TO = 12 * " "
FAULTS = {
    "no wait for a copy": ("mbarrier.wait(ready.index(slot), (i // STAGES) & 1)", "pass"),
    "no wait for a free slot": (
        "mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)",
        "pass",
    ),
    "a wait for the other phase": (
        "& 1) ^ 1)\n            mbarrier.expect",
        "& 1))\n            mbarrier.expect",
    ),
    "too few bytes": ("(M + N) * K * 2)", "M * K * 2)"),
    "too many arrivals": (
        "mbarrier.arrive(z_ready, count=1)",
        "mbarrier.arrive(z_ready, count=2)",
    ),
    "a count of two": (
        "mbarrier.init(free.index(i), count=1)",
        "mbarrier.init(free.index(i), count=2)",
    ),
    "a slot is freed before its product": (
        f"{WAIT}\n            {FREE}",
        f"{FREE}\n            {WAIT}",
    ),
    "no wait for a product": (WAIT, "pass"),
    "no fence before a store": (
        "        fence_async_shared()\n        copy_out",
        "        copy_out",
    ),
    "no wait for a store": ("    wait_for_stores(0)\n\n\n", "\n\n"),
    "no wait for the last tile": ("mbarrier.wait(z_ready, done & 1)", "pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    module = imitated_gluon.plant(SOURCE.read_text(), FAULTS[fault], tmp_path)
    assert imitated_gluon.is_found(lambda: _error(module), 1)
