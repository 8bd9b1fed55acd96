"""explain: which backend a call runs on, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweld import functional
from torchweld.dispatch import choice
from torchweld.dispatch.call import choose_automatically, is_too_small
from torchweld.dispatch.warm.cache import list_generated
from torchweld.dispatch.warm.generate import show_code
from torchweld.errors import ArgumentError
from torchweld.registry import BACKENDS, EAGER, OPS, Composite, Op


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a call, how it does, and why the others do not."""

    op: str
    chosen: str
    reasons: dict[str, str]
    detail: str = ""
    code: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.chosen}" + (f": {self.detail}" if self.detail else "")]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.reasons.items()]
        return "\n".join([*lines, *filter(None, [self.code])])


def explain(
    function: Callable[..., Any] | str, *args: Any, code: bool = False, **kwargs: Any
) -> Explanation:
    """Say which backend would run `function(*args, **kwargs)`, and why the others would not.

    `function` is one of torchweld.functional, or its name. Nothing is computed.
    `torchweld.explain_fusion` explains a model.

    With `code` the explanation has the generated code that serves the call, if one like it has run:
    the look-up, the comparison of arguments, the function that serves, and its node in autograd's
    graph.
    """
    if isinstance(function, torch.nn.Module):
        accepted = "a function; torchweld.explain_fusion takes a model"
        raise ArgumentError("explain", "function", f"a {type(function).__name__}", accepted)
    name = function if isinstance(function, str) else function.__name__
    if name not in OPS:
        raise ArgumentError("explain", "function", repr(name), ", ".join(sorted(OPS)))
    op = OPS[name]
    public = getattr(functional, name)
    bound = inspect.signature(public).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    inputs = _inputs(op, arguments)
    op.check(*inputs)
    chosen = choose_automatically(op, inputs)
    reasons = {}
    for backend in [EAGER, *BACKENDS]:
        if backend == chosen:
            continue
        if backend != EAGER and (reason := choice.why_not_automatic(op, backend, inputs)):
            reasons[backend] = reason
        elif choice.forced is not None:
            reasons[backend] = f"{', '.join(choice.forced)} was selected by name"
        elif is_too_small(op, inputs):
            few = f"fewer than {op.small} elements: too small to gain"
            is_slower = inputs[0].dtype in op.slower
            reasons[backend] = f"eager takes less time in {inputs[0].dtype}" if is_slower else few
        else:
            reasons[backend] = f"{chosen} comes first"
    detail = op.detail(chosen, *inputs) if isinstance(op, Composite) and op.detail else ""
    shown = _show_code(public, [*bound.arguments.values()]) if code else ""
    return Explanation(name, chosen, reasons, detail, shown)


def _show_code(public: Callable[..., Any], given: Sequence[Any]) -> str:
    sources = list(map(show_code, list_generated(public, given)))
    missing = (
        "" if len(sources) > 1 else "# No call like this one has run, so no more is generated."
    )
    return "\n\n".join(filter(None, [*dict.fromkeys(sources), missing]))


def _inputs(op: Op, arguments: dict[str, Any]) -> Sequence[Any]:
    """The forward's arguments from the public function's, without drawing a seed."""
    if op.inputs is None:
        return [arguments[argument] for argument in op.forward_signature.arguments]
    if "seed" in arguments and arguments["seed"] is None:
        arguments["seed"] = 0
    return op.inputs(**arguments)
