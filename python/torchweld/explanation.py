"""explain: which backend a call runs on, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from torchweld import functional
from torchweld.dispatch import choice
from torchweld.dispatch.call import automatic, too_small
from torchweld.errors import ArgumentError
from torchweld.fuse import WeldReport, report
from torchweld.registry import BACKENDS, EAGER, OPS, Composite, Op


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call and how, and why the others do not."""

    op: str
    chosen: str
    reasons: dict[str, str]
    detail: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.chosen}" + (f": {self.detail}" if self.detail else "")]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.reasons.items()]
        return "\n".join(lines)


@overload
def explain(  # type: ignore[overload-overlap] # modules can be called too
    function: torch.nn.Module, filter_fn: Callable[[torch.nn.Module, str], bool] | None = None
) -> WeldReport: ...


@overload
def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation: ...


def explain(
    function: torch.nn.Module | Callable[..., Any] | str, *args: Any, **kwargs: Any
) -> Explanation | WeldReport:
    """Which backend `function(*args, **kwargs)` would run on, and why the others would not.

    `function` is one of torchweld.functional, or its name. Nothing is computed.

    For a model the result is a sequence of rows, which prints as a table: what torchweld.fuse
    changes or has changed, what it leaves unchanged, and why. Copies of the model's modules run on
    small inputs; the model itself does not.
    """
    if isinstance(function, torch.nn.Module):
        return report(function, *args, **kwargs)
    name = function if isinstance(function, str) else function.__name__
    if name not in OPS:
        raise ArgumentError("explain", "function", repr(name), ", ".join(sorted(OPS)))
    op = OPS[name]
    bound = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    inputs = _inputs(op, bound.arguments)
    op.check(*inputs)
    chosen = automatic(op, inputs)
    reasons = {}
    for backend in [EAGER, *BACKENDS]:
        if backend == chosen:
            continue
        if backend != EAGER and (reason := choice.why_not_automatic(op, backend, inputs)):
            reasons[backend] = reason
        elif choice.forced is not None:
            reasons[backend] = f"{', '.join(choice.forced)} was asked for by name"
        elif too_small(op, inputs):
            reasons[backend] = f"fewer than {op.small} elements: too small to gain"
        else:
            reasons[backend] = f"{chosen} comes first"
    detail = op.detail(chosen, *inputs) if isinstance(op, Composite) and op.detail else ""
    return Explanation(name, chosen, reasons, detail)


def _inputs(op: Op, given: dict[str, Any]) -> Sequence[Any]:
    """The forward's arguments from the public function's, without drawing a seed."""
    if op.inputs is None:
        return [given[argument] for argument in op.forward_signature.arguments]
    if "seed" in given and given["seed"] is None:
        given["seed"] = 0
    return op.inputs(**given)
