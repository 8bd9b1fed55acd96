"""Welds of fused models in graphs that torch.compile makes for any backend.

Each compiler of Dynamo gets a graph with the welds in what belongs to a region. The name of Dynamo
that has an underscore or may change is here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo.output_graph import OutputGraph

from torchweld.dispatch import choice
from torchweld.fusion.graph.backend import with_lazy
from torchweld.fusion.graph.patterns import FINDERS, list_for_inductor
from torchweld.fusion.graph.rewrite import Finder, read_name, rewrite

_lock = threading.Lock()


def install() -> None:
    """Let torch.compile weld the graphs of fused models; graphs without one stay as they are."""
    with _lock:
        call_compiler: Any = OutputGraph.call_user_compiler
        if not hasattr(call_compiler, "welds_first"):
            welding: Any = _weld_first(call_compiler)
            welding.welds_first = True
            OutputGraph.call_user_compiler = welding  # type: ignore[method-assign]


def _weld_first(call_compiler: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: Any, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if hasattr(output.compiler_fn, "is_torchwelds") or output.export:
            return call_compiler(output, module, inputs)
        root = type(output.root_tx.f_locals.get("self"))  # no node tells that it belongs to it
        regions = [("", root)] if hasattr(root, "weld_captures") else []
        if not regions and not any(map(_list_regions, module.graph.nodes)):
            return call_compiler(output, module, inputs)
        made = rewrite(module, _list_finders(inputs), functools.partial(_is_outside, regions))
        return with_lazy(call_compiler(output, module, inputs), made.lazy)

    return call


def _list_finders(inputs: list[Any]) -> Iterable[Finder]:
    """All that a backend was asked for by name, else what pays next to a compiler's own code."""
    if choice.forced is not None:
        return FINDERS
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return list_for_inductor(tensors[0]) if tensors else []


def _list_modules(node: torch.fx.Node) -> list[tuple[str, Any]]:
    """The modules around a node: their names, and their classes."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [(read_name(path), cls) for path, cls in stack]


def _list_regions(node: torch.fx.Node) -> list[tuple[str, Any]]:
    return [(name, cls) for name, cls in _list_modules(node) if hasattr(cls, "weld_captures")]


def _is_outside(regions: list[tuple[str, Any]], node: torch.fx.Node) -> bool:
    """Whether a node belongs to no region, or to a module that a region's filter leaves out."""
    regions = [*regions, *_list_regions(node)]
    names = ["", *(name for name, _ in _list_modules(node))]
    return not regions or any(
        name.removeprefix(region).removeprefix(".") in cls.weld_left_out
        for region, cls in regions
        for name in names
        if name == region or not region or name.startswith(f"{region}.")
    )
