"""fuse: welds what it recognises in a model, in place; unfuse restores it."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch

from torchweld.errors import ArgumentError
from torchweld.fuse.patterns import PATTERNS, Pattern
from torchweld.fuse.plan import Filter, Weldable, WeldReport, decide, rows_of_welds
from torchweld.fuse.view import Left, Proposal, View
from torchweld.fuse.weld import Change, Weld, find_welds, restored, set_class

__all__ = [
    "PATTERNS",
    "Change",
    "Left",
    "Pattern",
    "Proposal",
    "View",
    "Weld",
    "WeldReport",
    "Weldable",
    "fuse",
    "report",
    "unfuse",
]

_Model = TypeVar("_Model", bound=torch.nn.Module)


def fuse(model: _Model, filter_fn: Filter | None = None, *, verify: bool = True) -> _Model:
    """Weld what is recognised in a model, in place.

    A welded module stays the same object, with its parameters, hooks and state_dict, and gets
    another class. What is recognised is tried first, once for each configuration: on a copy, with
    numbers of its own, its results and gradients are compared with the original's. What differs is
    left alone, and `torchweld.explain(model)` says why. Either all changes are made or none. What
    torch.compile compiled before is compiled anew.

    Args:
        model: any module.
        filter_fn: gets a module and its name; False leaves that module alone.
        verify: False: do not compare where there is only one way to weld what is recognised.

    Returns:
        The model.
    """
    _check("fuse", model, filter_fn)
    accepted, _ = decide(model, filter_fn, verify)
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
    """Give every welded module of a model the class back that it had.

    Args:
        model: any module.

    Returns:
        The model.
    """
    _check("unfuse", model, None)
    welds = list(find_welds(model))
    for _, module in welds:
        set_class(module, restored(type(module)))
    if welds:
        _forget_compiled()
    return model


def report(model: torch.nn.Module, filter_fn: Filter | None = None) -> WeldReport:
    """What fuse() would change in a model, or has changed; `torchweld.explain` calls it."""
    _check("explain", model, filter_fn)
    accepted, left = decide(model, filter_fn, True)
    rows = [*rows_of_welds(model), *(decided.row for decided in accepted), *left]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return WeldReport(sorted(rows, key=lambda row: order[row.where]))


def _forget_compiled() -> None:
    """What torch.compile made would go on as it was: it does not ask for the class of a part."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _check(function: str, model: Any, filter_fn: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(function, "model", f"a {type(model).__name__}", "a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        accepted = "a function of a module and its name, or None"
        raise ArgumentError(function, "filter_fn", repr(filter_fn), accepted)
