"""Instructions that Triton's kernels take for each element on sm_90: they stay as few as they are.

docs/gpu.md has what they were before.
"""

from __future__ import annotations

import json

import pytest

import fresh
import slots

pytest.importorskip("triton", reason="Triton is not installed")

# The compiler of another version of Triton counts a few more or fewer.
TOLERANCE = 0.5
MOST = {(kernel, case): most for kernel, case, _, most in slots.CASES}


def test_no_kernel_takes_more_instructions() -> None:
    every = json.loads(fresh.run_file(slots.__file__, "json", TRITON_INTERPRET="0"))
    found = {(kernel, case): taken for kernel, case, taken, _ in every}
    assert found.keys() == MOST.keys()
    more = {at: (taken, MOST[at]) for at, taken in found.items() if taken > MOST[at] + TOLERANCE}
    assert not more


def test_the_longest_inner_loop_is_counted() -> None:
    """And without a loop all up to the end of the program; jumps forwards are no loops."""
    body = [(16 * i, "", "FADD", "") for i in range(100)]
    assert slots.count([*body, (1600, "", "EXIT", ""), (1616, "", "BRA", "0x650")]) == 101
    inner = [*body[:80], (1280, "P0", "BRA", "0x140"), *body[81:]]
    assert slots.count([*inner, (1600, "P1", "BRA", "0x0"), (1616, "", "EXIT", "")]) == 61
    ahead = [(0, "P0", "BRA", "0x640"), *body[1:]]
    assert slots.count([*ahead, (1600, "P0", "EXIT", ""), (1616, "", "EXIT", "")]) == 102
