"""fuse() welds what a model computes to torchweld's ops; unfuse() restores the model."""

from __future__ import annotations

import gc
import sys
import warnings
from inspect import isfunction
from typing import Any, TypeVar

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.report import Filter, Weldable, WeldReport
from torchweld.fusion.weld import find_original, find_welds, set_class

__all__ = ["WeldReport", "Weldable", "explain_fusion", "fuse", "unfuse"]

_Model = TypeVar("_Model", bound=torch.nn.Module)


def fuse(model: _Model, filter_fn: Filter | None = None) -> _Model:
    """Weld what the forward of a model computes to torchweld's ops, in place.

    Modules stay the same objects, with their parameters, hooks and state_dict; the model and its
    repeated layers get other classes. The first call of a kind is captured by torch.compile's front
    end. Operations of its graph that are proven to be those of an op's definition become the op,
    and the graph runs in eager torch. Nothing runs before that call, and nothing on copies.
    torch.compile recompiles existing graphs.

    Args:
        model: any module.
        filter_fn: a function of a module and its name; False leaves its operations unchanged.

    Returns:
        The model.
    """
    _check("fuse", model, filter_fn)
    try:
        from torchweld.fusion.graph import regions  # imports Dynamo
    except (ImportError, AttributeError) as error:
        version = f"torch {torch.__version__} has another Dynamo than the tested releases"
        warnings.warn(f"fuse: {version} ({error}): the model runs as it is", stacklevel=2)
        return model
    if regions.weld(model, filter_fn):
        _forget_compiled()
    return model


def unfuse(model: _Model) -> _Model:
    """Restore the original class of every fused module of a model.

    Args:
        model: any module.

    Returns:
        The model.
    """
    _check("unfuse", model, None)
    welds = list(find_welds(model))
    for _, module in welds:
        set_class(module, find_original(type(module)))
    if welds:
        _forget_compiled()
        _wrap_again({id(module) for module in model.modules()})
    return model


def explain_fusion(
    model: torch.nn.Module, *example: Any, filter_fn: Filter | None = None, **named: Any
) -> WeldReport:
    """Say what fuse() would weld in a model or has welded, what it leaves unchanged, and why.

    The call is captured on fake tensors; the model does not run.

    Args:
        model: any module.
        example: the arguments of a call. A language model of transformers needs none, nor does a
            fused model that has run. One function is taken for `filter_fn`.
        filter_fn: as for fuse().
        named: arguments of the call by name.

    Returns:
        A sequence of rows, which prints as a table.
    """
    if len(example) == 1 and filter_fn is None and isfunction(example[0]):
        (filter_fn,), example = example, ()
    _check("explain_fusion", model, filter_fn)
    from torchweld.fusion.graph.explain import explain  # imports Dynamo

    rows = explain(model, example, named, filter_fn)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return WeldReport(sorted(rows, key=lambda row: order.get(row.where, 0)))


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


def _check(function: str, model: Any, filter_fn: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(function, "model", f"a {type(model).__name__}", "a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        accepted = "a function of a module and its name, or None"
        raise ArgumentError(function, "filter_fn", repr(filter_fn), accepted)
