"""Plans' leaves in C: the driver gets what Triton's own launcher gives it, byte for byte.

A stand-in takes the driver's place, which writes down what it is given: tests/helpers/driver.cpp.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fresh
from torchweld.dispatch import native
from torchweld.dispatch.warm import direct, leaf

triton = pytest.importorskip("triton", reason="Triton is not installed")
STAND_IN = str(Path(__file__).resolve().parents[1] / "helpers" / "stand_in.py")
pytestmark = [
    pytest.mark.skipif(direct._load() is None, reason=f"{native.missing}"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the stand-in"),
]


@functools.cache
def _ask(*questions: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(fresh.run_file(STAND_IN, *questions, TRITON_INTERPRET="0"))
    return told


# Bytes of the stand-in's maps, and without the bit that drivers up to 13.1 set wrongly in maps of
# small tensors. Triton 3.6 leaves it: with torch 2.10 the leaf failed for what it does better.
_MARKED, _MENDED = "ff" * 8, "ffffdf" + "ff" * 5
_MENDS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def _assert_alike(told: dict[str, list[list[str]]]) -> None:
    for name, (by_triton, by_twin, by_leaf) in told.items():
        assert len(by_triton) == 1, name
        assert by_triton == by_twin, name
        if name == "small descriptors" and not _MENDS:
            assert _MARKED in by_twin[0]
            by_twin = [line.replace(_MARKED, _MENDED) for line in by_twin]
        assert by_twin == by_leaf, name


def test_every_kernel_starts_as_by_triton() -> None:
    """Grid, block, shared memory, stream, attributes, parameters with their maps."""
    _assert_alike(_ask("kernels")["kernels"])


def test_numbers_and_attributes() -> None:
    """Of all widths, negative ones and floats; clusters, cooperative grids and early launches."""
    told = _ask("numbers", "faults", "unknown", "plans")["numbers"]
    _assert_alike(told)
    lines = {name: each[0][0] for name, each in told.items()}
    attributes = {name: line.count(" attribute ") for name, line in lines.items()}
    assert [*attributes.values()] == [0, 0, 2, 1, 1, 4]
    assert " 10 1 1 128 1 1 " in lines["clusters"]
    numbers = ["fbffffff", "0300000000010000", "0100000000000080", "00", "9a99993e", "30000000"]
    assert " ".join(numbers) in lines["numbers"]


def test_the_driver_tells_wrong_calls_apart() -> None:
    told = _ask("numbers", "faults", "unknown", "plans")["faults"]
    lines = [line for (line,) in told.values()]
    assert len({*lines}) == len(lines) == 3


def test_unknown_launches_are_triton_s() -> None:
    """Types that the compiled code contradicts, and memory that Triton's allocator gives."""
    told = _ask("numbers", "faults", "unknown", "plans")["unknown"]
    assert [name for name, has_leaf in told.items() if has_leaf] == [""]


def test_triton_s_launcher_can_be_asked_for() -> None:
    """The driver has met no leaf on a GPU yet."""
    environment = {"TRITON_INTERPRET": "0", leaf.VARIABLE: "triton"}
    told = json.loads(fresh.run_file(STAND_IN, "unknown", **environment))["unknown"]
    assert set(told.values()) == {False}


def test_plans_start_kernels_by_their_leaves() -> None:
    told = _ask("numbers", "faults", "unknown", "plans")["plans"]
    (line,) = told["by Triton"]
    assert line.count("<") == 6  # every address is one of the call's
    assert told["planned"]
    # Triton's launcher raises its errors, and makes a context for a new thread.
    assert (told["twins before errors"], told["twins"]) == (0, 2)
    assert told["by a plan"] == [line]
    moved = line.replace(f"stream {0x51}", f"stream {0x52}")
    assert moved != line
    assert told["on another stream"] == told["in a new thread"] == [moved]
    for name in ("freed", "a freed view"):
        error, started = told[name]
        assert "its data is not allocated" in error, name
        assert not started
    assert told["refused"] == ["Triton Error [CUDA]: the stand-in refuses", []]
    assert told["with hooks"] == [[moved], ["enter", "leave"]]
    assert told["elsewhere"] == ["the whole path", [], 1]
