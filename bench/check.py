"""Compares contenders with the float64 reference; wrong results are not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.bench.cases import Problem
from torchweld.dispatch import proof

Results = dict[str, torch.Tensor]


class Judge:
    """The exact results of a problem, and the error bounds for contenders.

    A problem of more than MOST_JUDGED elements may not fit a GPU in float64. Of such a problem it
    checks some of the rows, and that no element of the whole is NaN.
    """

    def __init__(self, problem: Problem) -> None:
        self._whole, self._part = problem, problem.part()
        exact = results(self._part.double(), problem.op.reference)
        self._judge = proof.Judge(exact, results(self._part, problem.op.reference))

    def fault(self, function: Callable[..., Any]) -> str | None:
        """What is wrong with the function's results, or None."""
        fault = self._judge.fault(results(self._part, function))
        if fault is None and self._part is not self._whole:
            found = results(self._whole, function)
            unsound = [name for name, value in found.items() if _has_nan(value)]
            fault = f"wrong result: NaN in {', '.join(unsound)}" if unsound else None
        return fault


def results(problem: Problem, function: Callable[..., Any]) -> Results:
    """The function's results and gradients by name."""
    outputs = problem.forward(function)
    gradients = problem.backward(outputs)
    found = dict(zip(problem.op.public, [o.detach() for o in outputs], strict=True))
    named = zip(problem.leaves(), gradients, strict=True)
    return found | {f"grad_{name}": gradient for name, gradient in named}


def _has_nan(value: torch.Tensor) -> bool:
    """Check the sum, which needs no temporary of the tensor's size."""
    return bool(value.sum(dtype=torch.float32).isnan())
