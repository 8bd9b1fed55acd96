"""Issue slots that a compiled Triton kernel takes for each element, counted in its machine code.

A multiprocessor starts 128 instructions of threads a cycle, so a pass over memory cannot be faster
than its instructions. A slot is one instruction of one thread; what a thread does before and after
its loop is left out if there is a loop. `start_in` says how many a GPU starts in the time of the
bytes.

`python tests/helpers/slots.py` prints a table of CASES with the share of a copy that they allow.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import resources

# An H200: 132 multiprocessors of 128 lanes at 1.98 GHz, and copies at 4.2 TB/s.
_STARTED = 132 * 128 * 1.98e9
_COPIED = 4.2e12

# Kernel, case, the bytes that an element moves, and the most slots. A change that needs more says
# why, here.
CASES = (
    ("act._bias_act", "gelu bfloat16 4096", 4, 26.6),
    ("act._bias_act_backward", "gelu bfloat16 4096", 6, 30.8),
    ("act._bias_act", "gelu_tanh bfloat16 4096", 4, 17.4),
    ("act._bias_act_backward", "gelu_tanh bfloat16 4096", 6, 25.5),
    ("act._bias_act", "silu bfloat16 4096", 4, 15.4),
    ("act._bias_act_backward", "silu bfloat16 4096", 6, 20.6),
    ("act._gated_act", "gelu bfloat16 4096", 6, 27.2),
    ("act._gated_act_backward", "gelu bfloat16 4096", 10, 35.6),
    ("act._gated_act", "silu bfloat16 4096", 6, 16.6),
    ("act._gated_act_backward", "silu bfloat16 4096", 10, 25.8),
    ("batch_norm._normalize_act", "gelu bfloat16 4096", 4, 24.8),
    ("batch_norm._normalize_act_backward", "gelu bfloat16 4096", 6, 36.4),
    ("batch_norm._column_statistics", "gelu bfloat16 4096", 2, 8.9),
    ("softmax._forward", "softmax bfloat16 8192 None 0.0", 4, 21.1),
    ("softmax._backward", "softmax bfloat16 8192 None 0.0", 6, 20.1),
    ("softmax._forward", "softmax bfloat16 8192 None 0.1", 4, 33.8),
    ("softmax._backward", "softmax bfloat16 8192 None 0.1", 6, 38.8),
    ("bias_dropout_add._forward", "bias_dropout_add bfloat16 4096 0.1", 6, 27.8),
    ("bias_dropout_add._backward", "bias_dropout_add bfloat16 4096 0.1", 4, 20.3),
    ("rotary._rotate", "rotary bfloat16 128 of 128, halves", 4, 17.7),
    ("rotary._rotate", "rotary bfloat16 128 of 128, halves, norm", 4, 23.8),
    # 29.3 with 154 registers, but then only three programs fit a processor: 70% of a copy, not 79%.
    ("rotary._differentiate", "rotary bfloat16 128 of 128, halves, norm", 6, 31.3),
)

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) +)?([A-Z][A-Z0-9_.]*)(.*?);")
_LOOP = 40  # instructions; a shorter loop is not one over tiles


def start_in(moved: float) -> float:
    """Slots that pass in the time in which a copy moves so many bytes."""
    return moved / _COPIED * _STARTED


def read_code(cubin: bytes) -> list[tuple[int, str, str, str]]:
    """Address, predicate, name and operands of each instruction."""
    found = filter(None, map(_INSTRUCTION.match, resources.dump(cubin, "-sass").splitlines()))
    return [(int(m[1], 16), m[2] or "", m[3], m[4]) for m in found if m[3] != "NOP"]


def count(code: list[tuple[int, str, str, str]]) -> int:
    """Instructions of the longest loop without another in it, or of all the code."""
    loops = []
    for at, _, name, operands in code:
        to = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if to and int(to[1], 16) < at:
            loops.append((int(to[1], 16), at))
    inner = [
        sum(first <= each[0] <= last for each in code)
        for first, last in loops
        if not any((first, last) != other and first <= other[0] <= last for other in loops)
    ]
    longest = max(inner, default=0)
    if longest >= _LOOP:
        return longest
    ends = (i for i, each in enumerate(code) if each[2] == "EXIT" and not each[1])
    return next(ends, len(code)) + 1


def slots(launch: Any, capability: int = 90) -> float:
    """Slots an element of a launch whose tile is ROWS x BLOCK elements, or whole rotated rows."""
    options = launch.options
    columns = options["BLOCK"] if "BLOCK" in options else 2 * options["PAIRS"] + options["REST"]
    compiled = resources.Compile("", launch, True).compile(capability)
    threads = 32 * options["num_warps"]
    return count(read_code(compiled.asm["cubin"])) * threads / (options.get("ROWS", 1) * columns)


def count_all() -> list[tuple[str, str, float, float]]:
    """Each of CASES with its slots, and those that an H200 starts in the time of its bytes."""
    wanted = {case[:2]: case[2] for case in CASES}
    found = {}
    for case, launch in resources.launches(90):
        file = Path(launch.kernel.fn.__code__.co_filename).stem
        at = (f"{file}.{launch.kernel.fn.__name__}", case)
        if at in wanted and at not in found:
            found[at] = slots(launch)
    return [(*at, found[at], start_in(moved)) for at, moved in wanted.items() if at in found]


def main() -> None:
    found = count_all()
    if "json" in sys.argv:
        json.dump(found, sys.stdout)
        return
    for kernel, case, taken, allowed in found:
        print(f"{kernel:36} {case:34} {taken:6.1f} {allowed:6.1f} {min(1, allowed / taken):5.0%}")


if __name__ == "__main__":
    main()
