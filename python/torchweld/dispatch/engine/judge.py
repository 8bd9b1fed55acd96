"""Checks a kernel's results against the reference in float64 on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.dispatch.engine.question import Results
from torchweld.numerics import Bound

# This many rows of a real input are enough, since a kernel treats all blocks alike. The number is a
# prime: no tile divides it, so that the ragged end is checked too.
ROWS = 4093


class Judge:
    """Judges contenders by exact results, and by the errors of trusted results (numerics.Bound)."""

    def __init__(self, exact: Results, trusted: Results, rounded: float = 0.0) -> None:
        self._bounds = {name: Bound(value, trusted[name], rounded) for name, value in exact.items()}

    def find_fault(self, results: Results) -> str | None:
        """The fault in the results; None if there is none."""
        for name, bound in self._bounds.items():
            if (fault := bound.find_fault(results[name])) is not None:
                return f"wrong result: {name} {fault}"
        return None

    def find_fault_of(self, function: Callable[[], Results]) -> str | None:
        """The fault in a function's results, or the error that it raises; None if there is none.

        It runs twice, and both results must be equal: a race shows in few launches. A lack of
        memory propagates: it says nothing about the function.
        """
        try:
            results = function()
            return self.find_fault(results) or _find_difference(results, function())
        except Exception as error:  # a kernel on trial never fails the user's call
            if is_out_of_memory(error):
                raise
            return in_a_line(error)


def _find_difference(first: Results, second: Results) -> str | None:
    """How results of two equal launches differ; None if they are equal."""
    for name, value in first.items():
        other = second[name]
        if not bool(((value == other) | (value.isnan() & other.isnan())).all()):
            return f"two equal launches differ in {name}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory is lacking, of the device or of the host.

    Libraries that allocate themselves have their own words. A tile that takes more shared memory
    than the GPU has is another matter.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGES)


_SHORTAGES = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")


def in_a_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def some_rows(t: torch.Tensor, most: int = ROWS) -> torch.Tensor:
    """At most `most` of a tensor's first and last rows, as a matrix."""
    matrix = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    if matrix.shape[0] <= most:
        return matrix
    return torch.cat([matrix[: most // 2], matrix[-(most - most // 2) :]])


def name_results(results: Any, *names: str) -> dict[str, torch.Tensor]:
    """Results by name, without those that are empty."""
    values = results if isinstance(results, tuple) else (results,)
    return {n: v for n, v in zip(names, values, strict=False) if v is not None and v.numel()}
