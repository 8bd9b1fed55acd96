"""fuse() welds the modules of a model that it recognises, in place; unfuse() restores them."""

from __future__ import annotations

import gc
import sys
from inspect import isfunction
from typing import Any, TypeVar

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion import peer
from torchweld.fusion.kernelized import list_kernelized
from torchweld.fusion.patterns import PATTERNS, Pattern
from torchweld.fusion.plan import Filter, Weldable, WeldReport, decide, list_welds
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Change,
    Proposal,
    Skipped,
    Weld,
    find_original,
    find_welds,
    set_class,
)

__all__ = [
    "PATTERNS",
    "Change",
    "Pattern",
    "Proposal",
    "Skipped",
    "View",
    "Weld",
    "WeldReport",
    "Weldable",
    "explain_fusion",
    "fuse",
    "unfuse",
]

_WAYS = ("trial", "graph")
_Model = TypeVar("_Model", bound=torch.nn.Module)


def fuse(
    model: _Model, filter_fn: Filter | None = None, *, verify: bool = True, by: str = "graph"
) -> _Model:
    """Weld the recognised modules of a model, in place.

    A welded module stays the same object, with its parameters, hooks and state_dict, but gets
    another class. torch's own classes are known. Any other configuration is tried first, on a copy
    with random values: its results and gradients are compared with the original's. A module that
    differs is not changed, and `torchweld.explain_fusion(model)` says why. Either all changes are
    made or none. torch.compile recompiles existing graphs.

    Args:
        model: any module.
        filter_fn: a function of a module and its name; False leaves that module unchanged.
        verify: False skips the comparison if there is only one way to weld a module.
        by: "trial" recognises modules as above. "graph" welds what it proves in the graphs that
            torch.compile's front end captures: the first call captures, and runs in eager torch.

    Returns:
        The model.
    """
    _check("fuse", model, filter_fn, by)
    if by == "graph":
        from torchweld.fusion.graph import regions

        if regions.weld(model, filter_fn):
            _forget_compiled()
        return model
    accepted, _ = decide(model, filter_fn, verify, measure=False)
    changes = [change for decided in accepted for change in decided.proposal.changes]
    before = [(change.module, type(change.module)) for change in changes]
    try:
        for change in changes:
            change.apply()
    except BaseException:
        for module, cls in before:
            set_class(module, cls)
        raise
    if changes:
        _forget_compiled()
    return model


def unfuse(model: _Model) -> _Model:
    """Restore the original class of every welded module of a model.

    Args:
        model: any module.

    Returns:
        The model.
    """
    _check("unfuse", model, None, "trial")
    welds = list(find_welds(model))
    for _, module in welds:
        set_class(module, find_original(type(module)))
    if welds:
        _forget_compiled()
        _wrap_again({id(module) for module in model.modules()})
    return model


def explain_fusion(
    model: torch.nn.Module,
    *example: Any,
    filter_fn: Filter | None = None,
    by: str = "graph",
    **named: Any,
) -> WeldReport:
    """Say what fuse() would change in a model or has changed, what it leaves unchanged, and why.

    Copies of the model's modules run on small inputs; the model itself does not.

    Args:
        model: any module.
        example: with by="graph" the arguments of a call, which is captured on fake tensors. A
            language model of transformers needs none, nor does a fused model that has run. One
            function is taken for `filter_fn`.
        filter_fn: as for fuse().
        by: as for fuse().
        named: arguments of the call by name.

    Returns:
        A sequence of rows, which prints as a table.
    """
    if len(example) == 1 and filter_fn is None and (by == "trial" or isfunction(example[0])):
        (filter_fn,), example = example, ()
    _check("explain_fusion", model, filter_fn, by)
    if by == "graph":
        from torchweld.fusion.graph.explain import explain

        return WeldReport(explain(model, example, named, filter_fn))
    accepted, left = decide(model, filter_fn, True, measure=True)
    rows = [*list_welds(model), *(decided.row for decided in accepted)]
    changed = {(row.where, row.what) for row in rows}
    kernelized = [each for each in list_kernelized(model) if each[:2] not in changed]
    rows += [Weldable(*each[:3], bool(each.becomes), reason=each.reason) for each in kernelized]
    told = {each[:2] for each in kernelized}
    rows += [row for row in left if (row.where, row.what) not in told]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    warning = peer.warn_of_newer() if peer.is_from_transformers(model) else None
    return WeldReport(sorted(rows, key=lambda row: order[row.where]), warning)


def _forget_compiled() -> None:
    """Drop torch.compile's graphs: torch.compile does not guard on the class of a submodule."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _wrap_again(modules: set[int]) -> None:
    """Let the wrappers that torch.compile returned see the classes of now.

    A wrapper of a module with a forward of torch's, such as a Sequential, is another one.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return
    wrapper = torch._dynamo.eval_frame.OptimizedModule
    for each in gc.get_objects():
        if type(each) is wrapper and id(each._orig_mod) in modules:
            each._initialize()


def _check(function: str, model: Any, filter_fn: Any, by: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(function, "model", f"a {type(model).__name__}", "a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        accepted = "a function of a module and its name, or None"
        raise ArgumentError(function, "filter_fn", repr(filter_fn), accepted)
    if by not in _WAYS:
        raise ArgumentError(function, "by", repr(by), " or ".join(map(repr, _WAYS)))
