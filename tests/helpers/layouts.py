"""How a compiled Triton kernel computes its matrix products, read from its code for the GPU.

Warps divide a product's rows and columns. Where one product feeds another, Triton gives every warp
whole rows. More warps than rows then compute the same rows again, which no result shows.
"""

from __future__ import annotations

import math
import re
from typing import Any

_LAYOUT = re.compile(r"^(#\w+) = (#\w+\.\w+)<\{(.*)\}>", re.MULTILINE)
_PRODUCT = re.compile(
    r"(?:= (?:tt\.dot|ttng\.warp_group_dot)|\bttng\.tc_gen5_mma) .*?$", re.MULTILINE
)
_RESULT = re.compile(r"-> tensor<(\d+)x(\d+)x\w+, (#\w+)>")
_IN_TENSOR_MEMORY = re.compile(r"memdesc<(\d+)x(\d+)xf32, (#\w+), #ttng.tensor_memory")
# The layouts of products that the fastest instructions of the GPU compute.
_NEWEST = {80: 2, 90: 3, 120: 2}


def read(code: str, capability: int) -> dict[str, int]:
    """Read a kernel in Triton's language of GPUs ("ttgir").

    `repeats`: how many times the most repeated product is computed, 0 without a product. `slow`:
    products that do not use the GPU's newest instructions, or that use them at half of their rate.
    """
    layouts = {name: (kind, text) for name, kind, text in _LAYOUT.findall(code)}
    repeats, slow = 0, 0
    for line in _PRODUCT.findall(code):
        if "tc_gen5_mma" in line:
            rows = int(_IN_TENSOR_MEMORY.findall(line)[-1][0])
            # Half of the tensor memory's lanes stay empty with 64 rows.
            repeats, slow = max(repeats, 1), slow + (rows < 128)
            continue
        rows, columns, name = _RESULT.findall(line)[-1]
        kind, text = layouts[name]
        if not kind.endswith("nvidia_mma"):  # products without tensor cores
            repeats, slow = max(repeats, 1), slow + 1
            continue
        warps, shape = _numbers(text, "warpsPerCTA"), _numbers(text, "instrShape")
        covered = [w * n for w, n in zip(warps[-2:], shape[:2], strict=True)]
        sizes = int(rows), int(columns)
        times = math.prod(max(1, c // n) for c, n in zip(covered, sizes, strict=True))
        repeats = max(repeats, times)
        slow += int(text.partition("versionMajor = ")[2][0]) < _NEWEST.get(capability, 5)
    return {"repeats": repeats, "slow": slow}


def _numbers(text: str, name: str) -> list[int]:
    found: Any = re.search(rf"{name} = \[([\d, ]+)\]", text)
    return [int(n) for n in found[1].split(",")]
