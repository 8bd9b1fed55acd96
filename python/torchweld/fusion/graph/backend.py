"""The backend of torch.compile: torch.compile(model, backend="torchweld")."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.graph.patterns import FINDERS, list_for_inductor
from torchweld.fusion.graph.rewrite import Lazy, Rewritten, rewrite
from torchweld.fusion.graph.trace import checkpoint
from torchweld.fusion.logits import Deferred, LastLayer

_COMPILERS = ("eager", "inductor")


def torchweld(module: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Weld a graph of Dynamo, then run it in eager torch or hand it to Inductor.

    Args:
        module: the graph.
        inputs: its inputs, fake tensors.
        options: `compiler="eager"` runs the graph in eager torch; the default is Inductor. Others
            are Inductor's.
    """
    given = dict(options.get("options") or {})
    compiler = given.pop("compiler", "inductor")
    if compiler not in _COMPILERS:
        accepted = " or ".join(map(repr, _COMPILERS))
        raise ArgumentError("torchweld", "options['compiler']", repr(compiler), accepted)
    if compiler == "eager":
        return run_eagerly(module, rewrite(module, FINDERS))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    rewritten = rewrite(module, list_for_inductor(tensors[0]) if tensors else [])
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, inputs, config_patches=given or None)
    return with_lazy(compiled, rewritten.lazy)


def run_eagerly(module: torch.fx.GraphModule, rewritten: Rewritten) -> Callable[..., Any]:
    """What runs a rewritten graph in eager torch."""
    checkpoint(module)
    return with_lazy(module.forward, rewritten.lazy)


def with_lazy(run: Callable[..., Any], lazy: list[Lazy]) -> Callable[..., Any]:
    """Make the results lazy that a rewritten graph leaves out."""
    if not lazy:
        return run

    @torch._dynamo.disable
    def call(*args: Any) -> Any:
        results = list(run(*args))
        for each in lazy:
            steps = each.steps
            if each.row is not None:
                row = args[each.row]
                steps = tuple((f, row) if f is operator.add else (f, *n) for f, *n in steps)
            deferred = Deferred(results[each.at], each.classes, steps)
            results[each.at] = deferred
            if each.weight is not None:
                bias = None if each.bias is None else args[each.bias]
                results[each.at] = deferred.make_tensor(LastLayer(args[each.weight], bias))
        return results

    return call
