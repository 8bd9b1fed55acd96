"""A wrong result is not timed: every contender is compared with the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.bench.cases import Problem

Results = dict[str, torch.Tensor]

# A contender may be this many times farther off than eager, or than rounding the exact result. The
# contract's bounds are tighter (tests/contract/test_oracle.py); peers need not meet those.
SLACK = 4.0


class Judge:
    """The exact results of a problem, and the errors that a contender may have."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._exact = results(problem.double(), problem.op.reference)
        eager = results(problem, problem.op.reference)
        self._bounds = {
            name: [
                SLACK * max(theirs, rounding)
                for theirs, rounding in zip(
                    _errors(eager[name], exact),
                    _errors(exact.to(eager[name].dtype), exact),
                    strict=True,
                )
            ]
            for name, exact in self._exact.items()
        }

    def fault(self, function: Callable[..., Any]) -> str | None:
        """What is wrong with the function's results; None if nothing is."""
        found = results(self._problem, function)
        for name, exact in self._exact.items():
            if found[name].shape != exact.shape:
                return f"wrong result: {name} has shape {list(found[name].shape)}"
            errors = _errors(found[name], exact)
            for kind, error, bound in zip(("RMS", "max"), errors, self._bounds[name], strict=True):
                if not error <= bound:  # also if the error is NaN
                    return f"wrong result: {name} is off by {error:.2g} ({kind}), not {bound:.2g}"
        return None


def results(problem: Problem, function: Callable[..., Any]) -> Results:
    """The function's results and gradients by name."""
    outputs = problem.forward(function)
    gradients = problem.backward(outputs)
    found = dict(zip(problem.op.public, [o.detach() for o in outputs], strict=True))
    named = zip(problem.leaves(), gradients, strict=True)
    return found | {f"grad_{name}": gradient for name, gradient in named}


def _errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The RMS error and the largest error."""
    error = found.double() - exact
    return error.square().mean().sqrt().item(), error.abs().max().item()
