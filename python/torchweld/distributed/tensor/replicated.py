"""Styles for modules that no recipe knows: they keep whole parameters and their own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from torchweld.distributed.tensor.styles import Style


class ReplicatedParallel(Style):
    """Replicate the parameters of a module that no recipe knows, and run its own code.

    The module runs on local tensors, with the local parts of its parameters. If its inputs are
    DTensors, it runs on DTensors.

    Args:
        grads: placement of the parameters' gradients: Partial() where a device has only some of
            the rows or heads, Replicate() where it has all of them.
        names: the parameters that the module's code reads, relative to the module; parameters of
            submodules are included.
    """

    def __init__(self, grads: Placement, names: Sequence[str]) -> None:
        super().__init__()
        self.grads, self.names = grads, names

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.replicate("", module, device_mesh)
        paths = [name.rpartition(".")[::2] for name in self.names]
        owners = [(module.get_submodule(path), name) for path, name in paths]
        grads = (Partial(), self.grads) if self.ring else (self.grads,)
        module.forward = partial(
            _call_with_local_parameters, module.forward, owners, device_mesh, grads
        )  # type: ignore[method-assign]
        return module


def _call_with_local_parameters(
    forward: Callable[..., Any],
    owners: Any,
    mesh: DeviceMesh,
    grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a forward while its parameters are local tensors, unless an input is a DTensor."""
    if any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    hidden = []
    try:
        for owner, name in owners:
            whole = owner._parameters[name]
            # Skip parameters that an outer call replaced and those that FSDP has not gathered yet.
            if name not in vars(owner) and getattr(whole, "device_mesh", None) == mesh:
                vars(owner)[name] = _CopyGradient.apply(whole.to_local(grad_placements=grads))
                hidden.append((owner, name))
        return forward(*args, **kwargs)
    finally:
        for owner, name in hidden:
            del vars(owner)[name]


class _CopyGradient(torch.autograd.Function):
    """Return the same values, and copy the gradient in the backward pass.

    The gradient of `a + b` is one tensor for both `a` and `b`. Autograd copies it for one of two
    plain parameters, but not for two DTensors: adding to one gradient would change both.
    """

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clone()


class CombinedParallel(Style):
    """Apply several styles to one module, the first one innermost."""

    def __init__(self, styles: Sequence[Style]) -> None:
        super().__init__()
        self.styles = styles

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        for style in self.styles:
            style.check(name, module, count)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for style in self.styles:
            style.ring, style.sums = self.ring, self.sums
            style._change(module, device_mesh)
        return module
