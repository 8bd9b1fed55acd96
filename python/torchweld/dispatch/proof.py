"""Whether a kernel's results are right, by the reference in float64 on the same inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

Results = Mapping[str, torch.Tensor]

# Results may be this many times farther off than eager's, or than rounding the exact ones. The
# contract's bounds are tighter (tests/contract/test_oracle.py); bugs are far beyond both.
SLACK = 4.0
# The largest error may always be this many times the RMS error's bound.
_LARGEST = 8.0
# Rows of a real input are enough: a kernel's blocks are alike.
ROWS = 4096


class Judge:
    """Judges contenders by exact results, and by the errors of trusted ones.

    Numbers may also be off by this part, `rounded`, of the largest, where no result is exact: a few
    of those at 16 bits are then rounded the other way.
    """

    def __init__(self, exact: Results, trusted: Results, rounded: float = 0.0) -> None:
        self._exact = exact
        self._bounds: dict[str, tuple[float, float]] = {}
        for name, value in exact.items():
            theirs = _errors(trusted[name], value)
            rounding = _errors(value.to(trusted[name].dtype), value)
            rms, most = (SLACK * max(pair) for pair in zip(theirs, rounding, strict=True))
            if rounded and value.is_floating_point() and value.numel():
                largest = value.double().nan_to_num(0, 0, 0).abs().max().item()
                step = torch.finfo(value.dtype).eps
                rms = max(rms, largest * max(rounded, step / 64))
                most = max(most, largest * 2 * step)
            # With few elements, the largest error varies by more than the slack.
            self._bounds[name] = rms, max(most, _LARGEST * rms)

    def fault(self, found: Results) -> str | None:
        """What is wrong with the results; None if nothing is."""
        for name, exact in self._exact.items():
            if found[name].shape != exact.shape:
                return f"wrong result: {name} has shape {list(found[name].shape)}"
            errors = _errors(found[name], exact)
            for kind, error, bound in zip(("RMS", "max"), errors, self._bounds[name], strict=True):
                if not error <= bound:  # also if the error is NaN
                    return f"wrong result: {name} is off by {error:.2g} ({kind}), not {bound:.2g}"
        return None

    def fault_of(self, function: Callable[[], Results]) -> str | None:
        """What is wrong with a function's results, or the error that it raises.

        An OutOfMemoryError goes on to the caller: it says nothing about the function.
        """
        try:
            return self.fault(function())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel on trial never fails the user's call
            return in_a_line(error)


def in_a_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def some_rows(t: torch.Tensor, most: int = ROWS) -> torch.Tensor:
    """At most `most` of a tensor's first and last rows, as a matrix."""
    matrix = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    if matrix.shape[0] <= most:
        return matrix
    return torch.cat([matrix[: most // 2], matrix[-(most - most // 2) :]])


def refuse(what: str, reason: str) -> None:
    """Tell the user, once, that a kernel is not used for a class of calls."""
    warnings.warn(f"torchweld: {what} is not used: {reason}", RuntimeWarning, stacklevel=2)


def _errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The RMS error and the largest error; NaN and infinity are right where the exact ones are."""
    found = found.double()
    same = (found == exact) | (found.isnan() & exact.isnan())
    error = torch.where(same, 0.0, found - exact)
    return error.square().mean().sqrt().item(), error.abs().max().item()


def named(results: Any, *names: str) -> dict[str, torch.Tensor]:
    """Results by name, without those that are empty."""
    values = results if isinstance(results, tuple) else (results,)
    return {n: v for n, v in zip(names, values, strict=False) if v is not None and v.numel()}
