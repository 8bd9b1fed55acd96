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


def signature_of(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and alignments of a launch, by the rules of Triton's JIT."""
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
        if isinstance(value, torch.Tensor) or (is_integer and value % 16 == 0):
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
    """All cases of all modules that are meant for such a GPU."""
    from torchweld import triton_kernels

    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        for case, launch in getattr(importlib.import_module(module.name), "aot_cases", tuple)():
            if capability >= launch.least_capability:
                yield case, launch


def records(capability: int) -> Iterator[dict[str, Any]]:
    """What each launch takes; those that share their machine code are compiled once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled: dict[str, dict[str, int]] = {}
    for case, launch in launches(capability):
        types, constants, attributes = signature_of(launch)
        options = {k: v for k, v in launch.options.items() if k not in types}
        key = f"{launch.kernel.fn} {types} {constants} {attributes} {options}"
        if key not in compiled:
            kernel = triton.compile(
                ASTSource(launch.kernel, types, constants, attributes),
                target=GPUTarget("cuda", capability, 32),
                options=options,
            )
            compiled[key] = {
                **resources(kernel.asm["cubin"]),
                "shared": kernel.metadata.shared,
                "warps": kernel.metadata.num_warps,
            }
        yield {"case": case, "kernel": launch.kernel.fn.__name__, **compiled[key]}


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
    """Without a spill, and with warps enough on a multiprocessor."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability)]
    rows = json.loads(subprocess.check_output(command, env=environment, text=True))
    print(table(rows))
    assert len(rows) == sum(1 for _ in launches(capability)) > 0
    from oracle import TORCH  # here, since this file is also a program

    allowed = SPILLED_BY_TRITON_3_6 if TORCH < (2, 13) else {}
    assert [row for row in rows if row["spilled"] > allowed.get(row["kernel"], 0)] == []
    assert [row for row in rows if row["shared"] > SHARED_MEMORY[capability]] == []
    for row in rows:
        row["allowed"] = REGISTERS_PER_MULTIPROCESSOR // (32 * WARPS.get(row["kernel"], 16))
    assert [row for row in rows if row["registers"] > row["allowed"]] == []


if __name__ == "__main__":
    json.dump(list(records(int(sys.argv[1]))), sys.stdout)
