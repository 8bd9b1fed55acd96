"""What runs here: which ops in which places, and which combinations of a test's axes.

`make test` runs combinations that hold each pair of values of two axes, as nearly all faults show
in one value or in a pair of them. `make test-matrix` runs all combinations. The Makefile says which
files its other targets take.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from oracle import LEAST_POOL
from torchweld.bench.cases import CASES
from torchweld.registry import BACKENDS, OPS, Composite, Op

Combination = TypeVar("Combination")

GPU = torch.cuda.is_available()
WHOLE = os.environ.get("TORCHWELD_MATRIX") == "1"


def combine(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis."""
    values = [list(axis) for axis in axes]
    every = list(itertools.product(*[range(len(axis)) for axis in values]))
    chosen = every if WHOLE else cover(every, _values_and_pairs)
    return [tuple(axis[at] for axis, at in zip(values, ats, strict=True)) for ats in chosen]


def _values_and_pairs(ats: tuple[int, ...]) -> set[Hashable]:
    values = list(enumerate(ats))
    return {*values, *itertools.combinations(values, 2)}


def cover(
    every: Sequence[Combination], parts: Callable[[Combination], set[Hashable]]
) -> list[Combination]:
    """A small part of `every`, in its order, that together has all the parts."""
    parts_of_each = [parts(combination) for combination in every]
    missing = set[Hashable]().union(*parts_of_each)
    chosen: list[int] = []
    while missing:
        best = max(range(len(every)), key=lambda at: len(parts_of_each[at] & missing))
        chosen.append(best)
        missing -= parts_of_each[best]
    return [every[at] for at in sorted(chosen)]


# --- Ops and places ---

EMULATED = Path(
    os.environ.get(
        "TORCHWELD_EMULATOR",
        Path(__file__).parents[2] / "build/emulator/lib/libtorchweld_emulated_cuda.so",
    )
)


@dataclass(frozen=True)
class Target:
    """An op, a backend, and the place where the backend runs here."""

    op: Op
    backend: str
    place: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.op.name}-{self.place}"

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Dtypes that this place computes correctly."""
        left_out = {
            "cpu": [],
            # float64 has kernels only on the CPU; Triton's interpreter truncates to bfloat16.
            "interpreter": [torch.float64, torch.bfloat16],
        }.get(self.place, [torch.float64])
        return [dtype for dtype in self.op.dtypes if dtype not in left_out]

    def sized(self, leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
        """Arguments of this size, or with narrower rows if the backend needs them."""
        arguments = self.op.sized(leading, row)
        while self.op.why_refused(self.backend, arguments) is not None:
            row = (*row[:-1], row[-1] // 2)
            assert row[-1] > 0, f"{self} serves no size"
            arguments = self.op.sized(leading, row)
        return arguments


def _places() -> dict[str, tuple[str, str, str | None]]:
    """Place -> backend, device, and the reason if the place is not available."""
    no_gpu = None if GPU else "no GPU"
    emulator = None if EMULATED.exists() else f"{EMULATED} is not built (make emulator)"
    return {
        "cpu": ("cpu", "cpu", BACKENDS["cpu"].why_missing()),
        "emulator": ("cuda", "cpu", "a GPU runs the kernels" if GPU else emulator),
        "interpreter": (
            "triton",
            "cpu",
            "a GPU runs the kernels" if GPU else BACKENDS["triton"].why_missing(),
        ),
        "gpu-cuda": ("cuda", "cuda", no_gpu or BACKENDS["cuda"].why_missing()),
        "gpu-triton": ("triton", "cuda", no_gpu or BACKENDS["triton"].why_missing()),
    }


PLACES = _places()
# Where Triton's kernels run here, and the marks of a file that only tests them.
TRITON = "gpu-triton" if GPU else "interpreter"
TRITON_DEVICE = PLACES[TRITON][1]
of_triton = [
    pytest.mark.skipif(PLACES[TRITON][2] is not None, reason=str(PLACES[TRITON][2])),
    pytest.mark.usefixtures("triton"),
]
# A composite has no kernel of its own. Most of its tests are in tests/ops/test_seams.py. The tests
# of its ops cover the interpreter, the emulator, and backends with kernels for only some of the
# samples.
KERNELS = [op for op in OPS.values() if not isinstance(op, Composite)]
TARGETS = [
    Target(op, backend, place, device)
    for place, (backend, device, missing) in PLACES.items()
    for op in (KERNELS if place in ("interpreter", "emulator") else OPS.values())
    if backend in op.sources and missing is None
    if all(op.why_refused(backend, arguments) is None for arguments in CASES[op.name].samples)
]


def choose_targets(
    *names: str, composites: bool = False, drawing: bool = False, not_at: Sequence[str] = ()
) -> tuple[list[Op], list[Target]]:
    """Every op with its own kernels, and the places where they run.

    `names` selects ops, `composites` adds composites, `drawing` keeps only ops that drop elements,
    and `not_at` excludes places.
    """
    ops = [
        op
        for op in OPS.values()
        if (op.name in names if names else composites or op in KERNELS)
        and (op.seed_at is not None or not drawing)
    ]
    targets = [target for target in TARGETS if target.op in ops and target.place not in not_at]
    return ops, targets


def choose_samples(
    samples: list[list[Any]],
    target: Target,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    turn: int = 0,
) -> list[list[Any]]:
    """Every second sample, and enough others for the pools; another `turn` takes the other ones.

    The CPU takes all samples: they cost least there. In 16 bits the other samples have the other
    dtype of parameters. In the other 16-bit dtype they swap.
    """
    if WHOLE or target.place not in ("emulator", "interpreter"):
        return samples
    first = [*PLACES].index(target.place) + (dtype == torch.float16) + (param_dtype == dtype) + turn
    chosen = {*range(first % 2, len(samples), 2)}
    for at, argument in enumerate(samples[0]):
        if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
            continue
        sizes = [0 if s[at] is None else s[at].numel() for s in samples]
        if sum(sizes) < LEAST_POOL:  # it has no pool
            continue
        others = sorted({*range(len(samples))} - chosen, key=sizes.__getitem__)
        while sum(sizes[i] for i in chosen) < LEAST_POOL and others:
            chosen.add(others.pop())
    return [samples[i] for i in sorted(chosen)]
