"""Whether results are equal up to rounding: each strictness has its name here.

Errors are measured against exact results, in float64 where they can be: their root mean square
(RMS) and the largest. A bound compares them with the errors of a result that is trusted, or with
units of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Errors = tuple[float, float]


class Strictness(NamedTuple):
    """How far errors may be from zero: the RMS error, and the largest."""

    of_trusted: Errors  # times the error of the trusted result
    roundings: Errors = (0.0, 0.0)  # units of rounding of the largest measure, which are added
    slack: float = 1.0  # times both


# The contract of an op (tests/contract), by errors pooled over samples; an op adds its own factors.
CONTRACT = Strictness(of_trusted=(1.1, 4 * 1.1))
# A GPU's kernel at first use. The contract's bounds are tighter; bugs exceed both by far. Roundings
# of float32 are added, since the error of few trusted numbers may be small by luck.
KERNEL = Strictness(of_trusted=(4.0, 4.0), roundings=(4.0, 0.0))
# Dtypes of 16 bits.
SHORT = (torch.bfloat16, torch.float16)
# A module, or a part of a model, that computes the same as before a change.
MODULE = {
    torch.float32: Strictness((2.0, 4.0), (4.0, 16.0)),
    torch.bfloat16: Strictness((2.0, 4.0), (1.5, 4.0)),
    torch.float16: Strictness((2.0, 4.0), (1.5, 4.0)),
}
# Further runs of it look for another path through the module, not for exactness.
PATHS = {dtype: strict._replace(slack=8.0) for dtype, strict in MODULE.items()}
# Where the trusted result is no more exact than a kernel's, since it adds in another order: errors
# up to this part of the largest number are accepted. Bugs make far larger ones.
REORDERED = 2.0**-20


def _near(relative: float, absolute: float, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Tolerances of two equally exact results in units of rounding: of a number, and about one."""
    unit = float(torch.finfo(dtype).eps)
    return {"rtol": relative * unit, "atol": absolute * unit}


# The tolerances of torch.testing.assert_close for results that are equally exact.
# The same operations on the same numbers.
SAME = _near(0, 0)
# The same float32 formula of each number, written otherwise.
ROUNDED = _near(8, 0.8)
# Sums of up to some thousand float32 terms in another order; terms are about one, or a tenth.
SUMMED, SUMMED_SMALL = _near(80, 80), _near(80, 8)
# Several sums after another, as in a layer and its gradients; also of float64 numbers.
CHAINED, CHAINED_SMALL = _near(800, 800), _near(800, 80)
CHAINED64 = _near(4500, 4500, torch.float64)
# Second derivatives of float64 numbers, which are sums of large terms.
SECOND64 = _near(2**22, 2**22, torch.float64)
# Results that are rounded to 16 bits, a few of them the other way.
HALF = _near(2, 2, torch.float16)
BFLOAT16 = _near(2.5, 2.5, torch.bfloat16)
# Gradients that are small sums of large terms, as those before a norm.
CANCELLED = _near(8000, 8000)
# Sums of float64 numbers in another order.
FLOAT64 = {"rtol": 1e-11, "atol": 1e-12}
# Two functions whose formulas are equal, on a few float32 numbers.
_FORMULA = 1e-5
# Two functions whose formulas are equal but for an epsilon in a divisor.
_ALMOST = 1e-3

# The largest error of a kernel may always be this many times the RMS error's bound.
_LARGEST = 8.0
# It may also be this many float32 units of the largest value: a few elements, such as the gradients
# of keys that many queries see, can be sums of far more terms than the others.
_UNITS = 32.0
# The RMS errors of two equally exact results differ by more than the slack only once in a million
# times from this many numbers on (F(16, 16) > 16); with one number, once in six times.
_FEW = 16
# From this many units of rounding on, something else is computed.
_ANOTHER = 1e4
# In 16 bits errors differ by more than the slack from run to run where a derivative jumps, as
# relu's. Of modules of 178 models none had more than 0.92 of the bound without this factor.
_ANOTHER_RUN = 2.0


def measure_errors(result: torch.Tensor, exact: torch.Tensor) -> Errors:
    """The RMS error and the largest error; NaN and infinity must be where the exact ones are."""
    if not result.numel():
        return 0.0, 0.0
    result = result.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    error = torch.where(same, 0.0, result - exact)
    return measure(error)


def measure(values: torch.Tensor) -> Errors:
    """The RMS and the largest magnitude of values; zeros of none."""
    if not values.numel():
        return 0.0, 0.0
    values = values.double()
    return float(values.square().mean().sqrt()), float(values.abs().max())


def unit_of(dtype: torch.dtype) -> float:
    """The step from 1 to the next number."""
    return float(torch.finfo(dtype).eps)


class Bound:
    """The bound of a kernel's errors, by exact results and the errors of trusted ones.

    If no result is exact, numbers may also be off by `rounded` times the largest number: a few
    16-bit numbers are then rounded the other way.
    """

    def __init__(
        self,
        exact: torch.Tensor,
        trusted: torch.Tensor,
        rounded: float = 0.0,
        strictness: Strictness = KERNEL,
    ) -> None:
        self._exact = exact
        theirs = measure_errors(trusted, exact)
        rounding = measure_errors(exact.to(trusted.dtype), exact)
        pairs = zip(strictness.of_trusted, theirs, rounding, strict=True)
        rms, most = (factor * max(pair) for factor, *pair in pairs)
        has_numbers = exact.is_floating_point() and exact.numel()
        finite = exact.double().nan_to_num(0, 0, 0) if has_numbers else exact.new_zeros(0)
        typical, largest = measure(finite)
        if rounded and has_numbers:
            step = unit_of(exact.dtype)
            rms = max(rms, largest * max(rounded, step / 64))
            most = max(most, largest * 2 * step)
        # With few elements, the largest error varies by more than the slack.
        most = max(most, _LARGEST * rms)
        if has_numbers:
            unit = min(unit_of(trusted.dtype), unit_of(torch.float32))
            most = max(most, _UNITS * unit * largest)
        rms += strictness.roundings[0] * unit_of(torch.float32) * typical
        # One number's error, such as a loss's, is small by luck: eager's says little of others.
        self.errors = (most if exact.numel() < _FEW else rms), most

    def find_fault(self, result: torch.Tensor) -> str | None:
        """How a result is wrong; None if it is right."""
        if result.shape != self._exact.shape:
            return f"has shape {list(result.shape)}"
        errors = measure_errors(result, self._exact)
        for kind, error, bound in zip(("RMS", "max"), errors, self.errors, strict=True):
            if not error <= bound:  # also if the error is NaN
                return f"is off by {error:.2g} ({kind}), not {bound:.2g}"
        return None


def find_change(
    before: torch.Tensor,
    after: torch.Tensor,
    exact: torch.Tensor | None,
    rounded: torch.Tensor | None,
    dtype: torch.dtype,
    strictness: Strictness,
    sizes: Errors = (0.0, 0.0),
) -> str | None:
    """How a result differs after a change; None if it is as exact as before.

    `rounded` is the exact result but for a rounding of each operation's result to `dtype`, that of
    the computation. In 16 bits both results must be as near: else one of them takes a branch that
    the exact one does not take. Errors are relative to the exact result, or to `sizes` if they are
    larger.
    """
    if not before.is_floating_point() or exact is None or exact.shape != before.shape:
        return None if torch.equal(before, after) else "differ"
    if not before.numel():
        return None
    if not (exact.isfinite().all() and before.isfinite().all()):
        same = any(torch.equal(after.isfinite(), other.isfinite()) for other in (before, exact))
        return None if same else "are finite elsewhere"
    exact, unit = exact.double(), unit_of(dtype)
    runs = (before, after, before if rounded is None else rounded)
    errors = (measure(value.double() - exact) for value in runs)
    sizes = tuple(map(max, sizes, measure(exact)))  # type: ignore[assignment]
    each = zip(strictness.of_trusted, strictness.roundings, *errors, sizes, strict=True)
    for factor, roundings, own, new, by_rounding, size in each:
        added = roundings * unit * size
        if not new <= strictness.slack * (factor * own + added):
            units = new / (unit * size) if size else _ANOTHER
            return f"differ by {units:.0f} units of rounding" if units < _ANOTHER else "differ"
        if dtype in SHORT and not max(own, new) <= _ANOTHER_RUN * (factor * by_rounding + added):
            return "differ"
    return None


def have_equal_formulas(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether two functions' float32 results on the same numbers differ by roundings only."""
    return all(torch.allclose(*each, atol=_FORMULA) for each in zip(found, wanted, strict=True))


def is_almost(y: torch.Tensor, z: torch.Tensor) -> bool:
    """Whether results are equal but for an epsilon in a divisor."""
    return torch.allclose(y, z, rtol=_ALMOST, atol=_ALMOST)


def have_equal_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two results have the same numbers, NaN included."""
    return x.shape == y.shape and torch.allclose(x, y, 0, 0, equal_nan=True)
