"""Every Triton kernel, compiled for GPUs that need not be here: no spill, and bounded resources.

A module of torchweld.triton_kernels takes part by an `aot_cases()` that yields names and launches.
The compiler runs in processes of its own, since TRITON_INTERPRET=1 leaves none in this one.
The record is a JSON file at $TORCHWELD_AOT_RECORD; `pytest -s` prints it as a table.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

# Compute capability -> bytes of shared memory that one block can have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536


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


def records(capability: int) -> Iterator[dict[str, Any]]:
    """What each launch takes; those that share their machine code are compiled once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchweld import triton_kernels

    compiled: dict[str, dict[str, int]] = {}
    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}."):
        cases = getattr(importlib.import_module(module.name), "aot_cases", tuple)
        for case, launch in cases():
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
            yield {
                "case": case,
                "kernel": launch.kernel.fn.__name__,
                "capability": capability,
                **compiled[key],
            }


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    compilers = [
        subprocess.Popen(
            [sys.executable, __file__, str(capability)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for capability in SHARED_MEMORY
    ]
    outputs = [compiler.communicate()[0] for compiler in compilers]
    assert [compiler.returncode for compiler in compilers] == [0] * len(compilers)
    rows = [row for output in outputs for row in json.loads(output)]
    path = os.environ.get("TORCHWELD_AOT_RECORD") or tmp_path_factory.mktemp("aot") / "record.json"
    Path(path).write_text(json.dumps(rows, indent=1))
    print(table(rows))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Registers and bytes of shared memory, by architecture."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        launch = f"{row['kernel']:15} {row['case']:23} {row['warps']:5}"
        cells.setdefault(launch, []).append(f"{row['registers']:9} {row['shared']:6}")
    architectures = "".join(f"{f'sm_{capability}':>19}" for capability in SHARED_MEMORY)
    lines = [launch + "   ".join(found) for launch, found in cells.items()]
    return "\n".join(["", f"{'kernel':15} {'case':23} warps{architectures}", *lines])


def test_every_architecture_compiles_every_case(record):
    compiled = Counter(row["capability"] for row in record)
    assert set(compiled) == set(SHARED_MEMORY)
    assert len(set(compiled.values())) == 1


def test_nothing_spills(record):
    assert [row for row in record if row["spilled"]] == []


def test_shared_memory_fits(record):
    assert [row for row in record if row["shared"] > SHARED_MEMORY[row["capability"]]] == []


def test_registers_leave_sixteen_warps(record):
    """Fewer warps a multiprocessor would not keep enough loads in flight."""
    allowed = REGISTERS_PER_MULTIPROCESSOR // (16 * 32)
    assert [row for row in record if row["registers"] > allowed] == []


if __name__ == "__main__":
    json.dump(list(records(int(sys.argv[1]))), sys.stdout)
