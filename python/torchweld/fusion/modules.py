"""Questions about one module that need no run: its state, its hooks, and whether it can change."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchweld.fusion.weld import Weld, why_not_own_forward

# A scope with fewer parameters (elements) than this is small enough in any case.
_SMALL = 2**24
# The most elements of a scope: a copy takes 4 GiB.
_LARGEST = 2**30
# A scope is a block, not a model: it has at most this many times the elements of its largest
# parameter.
_BLOCK = 24


def is_welded(module: torch.nn.Module) -> bool:
    """Whether the module is already welded."""
    return isinstance(module, Weld)


def has_state(module: torch.nn.Module) -> bool:
    """Whether the module itself has parameters or buffers, not only its submodules."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in tensors)


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard made the module a unit of its own."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def forward_of(module: Any) -> Any:
    """The forward function of a module's class, or None if the class does not define one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return getattr(type(module), "forward", None)


def count_elements(module: torch.nn.Module) -> int:
    """Count the elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def why_not_change(module: torch.nn.Module) -> str | None:
    """Why a module's class cannot be changed, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted: fuse before scripting"
    if isinstance(module, torch.fx.GraphModule):
        return "its forward is a traced graph: fuse before tracing"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized: its weight is computed at each call"
    return why_not_own_forward(module)


def why_not_copy(module: torch.nn.Module) -> str | None:
    """Why a module is too large to copy, or None."""
    elements = count_elements(module)
    largest = max((p.numel() for p in module.parameters() if not is_lazy(p)), default=0)
    if elements <= max(_SMALL, _BLOCK * largest) and elements <= _LARGEST:
        return None
    return f"with {elements / 1e6:.0f} million parameters its surroundings are too large to try"
