"""Styles for modules that no other style knows: whole parameters, and the module's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from torchweld.distributed.styles import Style


class Held(Style):
    """A module that no other style knows: its parameters are replicated, and its code is its own.

    It runs on local tensors, with the local parts of its parameters. Given DTensors, it runs on
    DTensors.

    Args:
        grads: placement of the gradients that its use leaves: Partial() where a device has only
            some of the rows or heads, Replicate() where it has all of them.
        names: the parameters that its code reads, from it on; those of modules inside included.
    """

    def __init__(self, grads: Placement, names: Sequence[str]) -> None:
        super().__init__()
        self.grads, self.names = grads, names

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.replicate("", module, device_mesh)
        paths = [name.rpartition(".")[::2] for name in self.names]
        owners = [(module.get_submodule(path), name) for path, name in paths]
        grads = (Partial(), self.grads) if self.ring else (self.grads,)
        module.forward = partial(_on_local_parts, module.forward, owners, device_mesh, grads)  # type: ignore[method-assign]
        return module


def _on_local_parts(
    forward: Callable[..., Any],
    owners: Any,
    mesh: DeviceMesh,
    grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a forward whose parameters are local tensors meanwhile, unless it is given DTensors."""
    if any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    hidden = []
    try:
        for owner, name in owners:
            whole = owner._parameters[name]
            # One that an outer call has hidden stays; one that FSDP has not gathered comes later.
            if name not in vars(owner) and getattr(whole, "device_mesh", None) == mesh:
                vars(owner)[name] = whole.to_local(grad_placements=grads)
                hidden.append((owner, name))
        return forward(*args, **kwargs)
    finally:
        for owner, name in hidden:
            del vars(owner)[name]


class Together(Style):
    """Several styles of one module, the first one innermost."""

    def __init__(self, styles: Sequence[Style]) -> None:
        super().__init__()
        self.styles = styles

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        for style in self.styles:
            style.check(name, module, count)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for style in self.styles:
            style.ring = self.ring
            style._change(module, device_mesh)
        return module
