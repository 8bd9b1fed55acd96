"""Every Triton kernel, compiled for GPUs that need not be here: no spill, and bounded resources.

tests/resources.py compiles. `pytest -s` prints what each case takes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import resources
from oracle import TORCH
from resources import CAPABILITIES, NEVER_UNALIGNED
from torchweld.bench import sources

pytest.importorskip("triton", reason="Triton is not installed")

# Compute capability -> the most bytes of shared memory per block.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536
# Warps that must fit a multiprocessor at once: sixteen keep loads in flight. Eight suffice if loads
# go to shared memory and registers hold sums of products.
WARPS = dict.fromkeys(
    (
        "linear_act._linear_act",
        "linear_act_persistent._linear_act_persistent",
        "attention_forward.attention_forward",
        "attention_backward.attention_query_gradient",
        "attention_backward.attention_key_gradients",
    ),
    8,
)
# Bytes a thread: tiles were chosen for the Triton that is pinned, which spills nothing.
PINNED = TORCH >= (2, 13)
SPILLED = {
    "attention_backward.attention_key_gradients": 32,
    "attention_backward.attention_deltas": 8,
    "dropout_add_norm._forward": 16,
    "dropout_add_norm._forward_wide": 8,
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':44} {'case':40} warps registers  shared"]
    for row in rows:
        taken = row["now"] or row["kept"]
        numbers = f"{row['warps']:5} {taken['registers']:9} {taken['shared']:7}"
        lines.append(f"{row['kernel']:44} {row['case']:40} {numbers}")
    return "\n".join(["", *lines])


# One test per architecture, so that each is compiled once however tests are distributed.
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_case_fits_the_gpu(capability: int) -> None:
    """None spills, and enough warps fit a multiprocessor."""
    rows = resources.in_a_process(capability)
    print(table(rows))
    assert sum(row["aligned"] for row in rows) == sum(1 for _ in resources.launches(capability)) > 0
    kernels = {row["kernel"] for row in rows}
    assert {row["kernel"] for row in rows if not row["aligned"]} == kernels - {*NEVER_UNALIGNED}
    for row in rows:
        taken = row["now"] or row["kept"]
        if row["aligned"]:
            assert taken["spilled"] <= (0 if PINNED else SPILLED.get(row["kernel"], 0)), row
        elif PINNED:  # Triton 3.6 spills up to a hundred bytes more for views
            assert taken["spilled"] == 0, row
        assert taken["shared"] <= SHARED_MEMORY[capability], row
        warps = WARPS.get(row["kernel"], 16) if row["aligned"] else row["warps"]
        assert taken["registers"] <= REGISTERS_PER_MULTIPROCESSOR // (32 * warps), row
        if row["now"] and row["kept"]:
            assert row["now"] == row["kept"], row
    assert {row["kernel"] for row in rows if row["now"]} == kernels
    if missing := sum(row["kept"] is None for row in rows):
        warnings.warn(f"{missing} results are not kept: run `make resources`", stacklevel=1)


def test_a_key_knows_what_a_compile_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile, the compiler's options, dtypes, alignment, and any source file of the kernel."""
    from triton.runtime.jit import JITFunction

    cases: dict[str, Any] = {}
    for case, each in resources.launches(90):
        cases.setdefault(case, each)  # the forward comes first
    launch = cases["layer_norm float32 4096"]
    options = launch.options

    def key(launch: Any, aligned: bool = True) -> str:
        compiled = launch._replace(kernel=JITFunction(launch.kernel.fn))  # here it is interpreted
        return resources.Compile("", compiled, aligned).key

    others = [
        key(launch, aligned=False),
        key(cases["layer_norm bfloat16 4096"]),
        key(launch._replace(options=options | {"num_warps": 2 * options["num_warps"]})),
        key(launch._replace(options=options | {"enable_fp_fusion": False})),
        key(launch._replace(options=options | {"BLOCK": 2 * options["BLOCK"]})),
    ]
    before, stripped = key(launch), sources.stripped
    for changed in ("norm.py", "norm_rows.py", "tensors.py"):

        def with_a_change(path: Path, changed: str = changed) -> str:
            return stripped(path) + ("pass" if path.name == changed else "")

        monkeypatch.setattr(sources, "stripped", with_a_change)
        others.append(key(launch))
    monkeypatch.undo()
    assert before == key(launch)
    assert len({before, *others}) == 1 + len(others)
