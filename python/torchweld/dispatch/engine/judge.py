"""Checks a kernel's results against the reference in float64 on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.dispatch.engine.question import Results

# The error may be this many times eager's, or that of rounding the exact result. The contract's
# bounds are tighter (tests/contract/test_oracle.py); bugs exceed both by far.
SLACK = 4.0
# The largest error may always be this many times the RMS error's bound.
_LARGEST = 8.0
# It may also be this many float32 units of the largest value: a few elements, such as the gradients
# of keys that many queries see, can be sums of far more terms than the others.
_UNITS = 32.0
# The RMS errors of two equally exact results differ by more than the slack only once in a million
# times from this many numbers on (F(16, 16) > 16); with one number, once in six times.
_FEW = 16
# This many rows of a real input are enough, since a kernel treats all blocks alike. The number is a
# prime: no tile divides it, so that the ragged end is checked too.
ROWS = 4093


class Judge:
    """Judges contenders by exact results, and by the errors of trusted results.

    If no result is exact, numbers may also be off by `rounded` times the largest number: a few
    16-bit numbers are then rounded the other way.
    """

    def __init__(self, exact: Results, trusted: Results, rounded: float = 0.0) -> None:
        self._exact = exact
        self._bounds: dict[str, tuple[float, float]] = {}
        for name, value in exact.items():
            theirs = _errors(trusted[name], value)
            rounding = _errors(value.to(trusted[name].dtype), value)
            rms, most = (SLACK * max(pair) for pair in zip(theirs, rounding, strict=True))
            if rounded and value.is_floating_point() and value.numel():
                largest = _find_largest(value)
                step = torch.finfo(value.dtype).eps
                rms = max(rms, largest * max(rounded, step / 64))
                most = max(most, largest * 2 * step)
            # With few elements, the largest error varies by more than the slack.
            most = max(most, _LARGEST * rms)
            if value.is_floating_point() and value.numel():
                unit = min(torch.finfo(trusted[name].dtype).eps, torch.finfo(torch.float32).eps)
                most = max(most, _UNITS * unit * _find_largest(value))
            # One number's error, such as a loss's, is small by luck: eager's says little of others.
            if value.numel() < _FEW:
                rms = most
            self._bounds[name] = rms, most

    def find_fault(self, results: Results) -> str | None:
        """The fault in the results; None if there is none."""
        for name, exact in self._exact.items():
            if results[name].shape != exact.shape:
                return f"wrong result: {name} has shape {list(results[name].shape)}"
            errors = _errors(results[name], exact)
            for kind, error, bound in zip(("RMS", "max"), errors, self._bounds[name], strict=True):
                if not error <= bound:  # also if the error is NaN
                    return f"wrong result: {name} is off by {error:.2g} ({kind}), not {bound:.2g}"
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


def _find_largest(value: torch.Tensor) -> float:
    return value.double().nan_to_num(0, 0, 0).abs().max().item()


def _errors(result: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The RMS error and the largest error; NaN and infinity must be where the exact ones are."""
    if not result.numel():
        return 0.0, 0.0
    result = result.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    error = torch.where(same, 0.0, result - exact)
    return error.square().mean().sqrt().item(), error.abs().max().item()


def name_results(results: Any, *names: str) -> dict[str, torch.Tensor]:
    """Results by name, without those that are empty."""
    values = results if isinstance(results, tuple) else (results,)
    return {n: v for n, v in zip(names, values, strict=False) if v is not None and v.numel()}
