"""Every Triton kernel, compiled for GPUs that need not be here: no spill, and bounded resources.

A module of torchweld.triton_kernels takes part by an `aot_cases()` that yields names and launches.
The compiler runs in separate processes, since TRITON_INTERPRET=1 disables it in this one.
`pytest -s` prints what each takes.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

# Compute capability -> the most bytes of shared memory per block.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536
# Warps that must fit a multiprocessor at once: sixteen keep loads in flight. Eight suffice if loads
# go to shared memory and registers hold sums of products.
WARPS = dict.fromkeys(
    (
        "_linear_act",
        "_linear_act_persistent",
        "attention_forward",
        "attention_query_gradient",
        "attention_key_gradients",
    ),
    8,
)


# Kernels whose tensors are aligned, whatever views the caller passes.
NEVER_UNALIGNED = {
    "_add_chunks": "reads and writes only tensors that were allocated for it",
    "_linear_act": "reads copies of such views",
    "_linear_act_persistent": "reads descriptors, which such views cannot have",
    "attention_forward": "reads copies of such views",
    "attention_deltas": "reads copies of such views",
    "attention_query_gradient": "reads copies of such views",
    "attention_key_gradients": "reads copies of such views",
}


def signature_of(
    launch: Any, aligned: bool = True
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and alignments of a launch, by the rules of Triton's JIT.

    `aligned=False`: of views, of whose addresses and strides Triton knows nothing. Widths stay what
    they are, since they choose the tile.
    """
    import torch
    from triton.runtime.jit import mangle_type

    types, constants, attributes = {}, {}, {}
    compiler = {"num_warps", "num_stages", "maxnreg", "enable_fp_fusion"}
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    given |= {name: value for name, value in launch.options.items() if name not in compiler}
    for parameter in launch.kernel.params:
        name, value = parameter.name, given[parameter.name]
        is_integer = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_integer and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = mangle_type(value)
        is_multiple = is_integer and not parameter.do_not_specialize_on_alignment and not value % 16
        of_a_view = isinstance(value, torch.Tensor) or name.endswith("_stride")
        if (isinstance(value, torch.Tensor) or is_multiple) and (aligned or not of_a_view):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def resources(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}


def launches(capability: int) -> Iterator[tuple[str, Any]]:
    """The cases of every module that are meant for such a GPU."""
    from torchweld import triton_kernels

    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        for case, launch in getattr(importlib.import_module(module.name), "aot_cases", tuple)():
            if capability >= launch.least_capability:
                yield case, launch


def records(capability: int) -> Iterator[dict[str, Any]]:
    """What each launch takes; those that share their machine code are compiled once.

    Then what views take that are not aligned: with each tile, the case with the most registers.
    """
    compiled: dict[str, dict[str, int]] = {}

    def record(case: str, launch: Any, aligned: bool) -> dict[str, Any]:
        types, constants, attributes = signature_of(launch, aligned)
        given = launch.options if aligned else launch.unaligned_options()
        options = {k: v for k, v in given.items() if k not in types}
        key = f"{launch.kernel.fn} {types} {constants} {attributes} {options}"
        if key not in compiled:
            source = (launch.kernel, types, constants, attributes)
            compiled[key] = compiled_for(capability, source, options)
        name = launch.kernel.fn.__name__
        return {"case": case, "kernel": name, "aligned": aligned, **compiled[key]}

    fullest: dict[str, tuple[int, str, Any]] = {}
    for case, launch in launches(capability):
        row = record(case, launch, True)
        yield row
        if row["kernel"] not in NEVER_UNALIGNED and not launch.aligned:
            tile = {k: v for k, v in launch.options.items() if k != "ACTIVATION"}
            at = f"{launch.kernel.fn} {tile}"
            if row["registers"] > fullest.get(at, (0,))[0]:
                fullest[at] = row["registers"], case, launch
    for _, case, launch in fullest.values():
        yield record(f"{case}, unaligned", launch, False)


def compiled_for(capability: int, source: tuple[Any, ...], options: Any) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(ASTSource(*source), target=target, options=options)
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    return {**resources(kernel.asm["cubin"]), "shared": shared, "warps": warps}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':24} {'case':40} warps registers  shared"]
    for row in rows:
        numbers = f"{row['warps']:5} {row['registers']:9} {row['shared']:7}"
        lines.append(f"{row['kernel']:24} {row['case']:40} {numbers}")
    return "\n".join(["", *lines])


# Bytes a thread: tiles were chosen for the Triton that is pinned, which spills nothing.
SPILLED_BY_TRITON_3_6 = {"attention_key_gradients": 32, "attention_deltas": 8}


# One test per architecture, so that each is compiled once however tests are distributed.
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_case_compiles_within_bounds(capability: int) -> None:
    """None spills, and enough warps fit a multiprocessor."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability)]
    rows = json.loads(subprocess.check_output(command, env=environment, text=True))
    print(table(rows))
    assert sum(row["aligned"] for row in rows) == sum(1 for _ in launches(capability)) > 0
    kernels = {row["kernel"] for row in rows} - {*NEVER_UNALIGNED}
    assert {row["kernel"] for row in rows if not row["aligned"]} == kernels
    from oracle import TORCH  # here, since this file is also a program

    pinned = TORCH >= (2, 13)
    spills = {} if pinned else SPILLED_BY_TRITON_3_6
    for row in rows:
        if row["aligned"]:
            assert row["spilled"] <= spills.get(row["kernel"], 0), row
        elif pinned:  # Triton 3.6 spills up to a hundred bytes more for views
            assert row["spilled"] == 0, row
    assert [row for row in rows if row["shared"] > SHARED_MEMORY[capability]] == []
    for row in rows:
        warps = WARPS.get(row["kernel"], 16) if row["aligned"] else row["warps"]
        row["allowed"] = REGISTERS_PER_MULTIPROCESSOR // (32 * warps)
    assert [row for row in rows if row["registers"] > row["allowed"]] == []


if __name__ == "__main__":
    json.dump(list(records(int(sys.argv[1]))), sys.stdout)
