"""Which combinations of a test's axes run.

`make test` runs combinations that hold each pair of values of two axes, as nearly all faults show
in one value or in a pair of them. `make test-matrix` runs all combinations.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Combination = TypeVar("Combination")

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
