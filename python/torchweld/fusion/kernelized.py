"""Modules that went through `kernels.kernelize`, which puts another forward on each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch

from torchweld.fusion.report import Weldable

# The attribute with functions that `kernels` made modules of: parts of a file, not of a model.
_FUNCTIONS = "_kernel_funcs"


def list_kernelized(model: torch.nn.Module) -> Iterator[Weldable]:
    """List what `kernelize` looked at in a model."""
    for name, module in model.named_modules():
        cls: Any = type(module)
        if hasattr(cls, "kernel_layer_name") and _is_of_a_class(vars(module).get("forward")):
            yield Weldable(name, cls.__name__, **_explain(module))
        for function in vars(module).get(_FUNCTIONS, {}).values():
            if "forward" not in vars(function):
                continue
            what = f"{type(function).kernel_layer_name} of {cls.__name__}"
            own_file = vars(sys.modules.get(cls.__module__, torch))
            if any(value is function for value in own_file.values()):
                yield Weldable(name, what, **_explain(function))
            else:
                reason = "kernelize changed a copy of the function, which nothing calls: the model"
                yield Weldable(name, what, reason=f"{reason} is a deep copy")


def _is_of_a_class(forward: Any) -> bool:
    """Whether a forward is a layer's, as kernelize binds it; others put functions on instances."""
    owner = getattr(forward, "__qualname__", "").rpartition(".")[0]
    return bool(owner) and not owner.endswith("<locals>")


def _explain(module: Any) -> dict[str, Any]:
    forward, layer = vars(module)["forward"], type(module).kernel_layer_name
    function: Any = getattr(forward, "__func__", forward)
    if isinstance(forward, MethodType) and function is type(module).forward:
        if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
            return {"reason": "kernelize kept its own forward: DISABLE_KERNEL_MAPPING is set"}
        lacks = f"no {layer!r} for the device and the mode that it was given"
        return {"reason": f"kernelize kept its own forward: the mapping then in force had {lacks}"}
    becomes = getattr(function, "torchweld_becomes", None)
    if becomes is not None:
        return {"becomes": f"{becomes}, by kernelize", "welded": True}
    name = f"{function.__module__}.{function.__qualname__.removesuffix('.forward')}"
    return {"reason": f"kernelize put {name} in its place"}
