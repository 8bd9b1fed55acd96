"""Kernels that differ in what a launch is made of, or only in words; as a script, their codes."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + column, mask=column < count)
    tl.store(y_ptr + column, value * 2 + 1, mask=column < count)
"""
CHANGES: dict[str, tuple[str, str]] = {
    "an instruction": ("value * 2 + 1", "value * 2 - 1"),
    "a comment": ("    value =", "    # Two lines\n    # down.\n    value ="),
    "a rename": ("value", "element"),
    "a rename of arguments": ("x_ptr", "source"),
    "a rename of the kernel": ("scale", "double"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "an option": {"num_warps": 8},
    "a size": {"block": 256},
    "a grid": {"grid": 5},
}


def find_codes() -> dict[str, str]:
    """The code of each; "" has no change."""
    texts = {name: KERNEL.replace(*change) for name, change in CHANGES.items()}
    found = {name: _find_code(text) for name, text in ({"": KERNEL} | texts).items()}
    return found | {name: _find_code(KERNEL, **options) for name, options in OPTIONS.items()}


def _find_code(text: str, grid: int = 4, block: int = 512, num_warps: int = 4) -> str:
    from torchweld.bench.measure import launched
    from torchweld.triton_kernels.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "planted_kernel.py"
        file.write_text(text)
        specification: Any = importlib.util.spec_from_file_location("planted_kernel", file)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        kernel = module.double if "def double" in text else module.scale
        x = torch.empty(2048, device="meta")
        made = launch(kernel, grid, x, x, 2048, BLOCK=block, num_warps=num_warps)
        launches = mock.Mock(return_value=[(made, made.options)])
        with mock.patch.object(launched, "list_steps", launches):
            return launched.find_code(mock.Mock(), "fwd")


if __name__ == "__main__":
    json.dump(find_codes(), sys.stdout)
