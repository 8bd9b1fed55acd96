"""grad_norm: the norm of all gradients across processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from torchweld.distributed.tensor.sums import extend_parts

# The name of a parameter's attribute that counts the pipeline stages with a copy of it.
COPIES = "torchweld_copies"


def grad_norm(
    parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Compute the norm of the gradients of all processes' parameters.

    A DTensor counts once. A parameter that several stages of a `pipeline` share counts once.

    Args:
        parameters: the parameters of this process, on any meshes.
        group: processes that have other parameters, such as the stages of a pipeline; None: this
            process has all parameters.
    """
    squares: dict[Any, torch.Tensor] = {}
    device: torch.device | None = None
    parameters = [*parameters]
    parts = _find_parts(parameters)
    for at, parameter in enumerate(parameters):
        # A process without a gradient takes part in the sums of the others.
        has_grad = parameter.grad is not None or at in parts
        grad: Any = parameter.grad if parameter.grad is not None else parameter.detach()
        key, device = (), grad.device
        if isinstance(grad, DTensor):
            if at in parts:  # add the parts before squaring
                if parameter.grad is None:
                    zeros, mesh = torch.zeros_like(grad.to_local()), grad.device_mesh
                    grad = DTensor.from_local(zeros, mesh, parts[at], run_check=False)
                whole = [Replicate() if p.is_partial() else p for p in parts[at]]
                grad = extend_parts(grad, parts[at]).redistribute(placements=whole)
            dims = [dim for dim, p in enumerate(grad.placements) if not p.is_replicate()]
            key, grad = tuple(grad.device_mesh.get_group(dim) for dim in dims), grad.to_local()  # type: ignore[assignment]
        square = squares.setdefault(key, torch.zeros((), device=device))
        if has_grad:
            square += grad.detach().float().square().sum() / getattr(parameter, COPIES, 1)
    total = torch.zeros((), device=device)
    for groups, square in squares.items():
        for shared in groups:
            dist.all_reduce(square, group=shared)
        total += square
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _find_parts(parameters: Sequence[torch.Tensor]) -> dict[int, list[Placement]]:
    """Find the parameters whose gradients are parts of sums in some process, and their placements.

    Gradients are whole, except after `no_sync`; but a process without a gradient cannot know.
    """
    meshes: dict[Any, list[int]] = {}
    for at, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor) and any(p.is_replicate() for p in parameter.placements):
            meshes.setdefault(parameter.device_mesh, []).append(at)
    found: dict[int, list[Placement]] = {}
    for mesh, places in meshes.items():
        grads: list[Any] = [parameters[at].grad for at in places]
        none = [_WHOLE] * mesh.ndim
        flags = torch.tensor(
            [none if g is None else list(map(_find_kind, g.placements)) for g in grads],
            dtype=torch.int32,
            device=parameters[places[0]].device,
        )
        for dim in range(mesh.ndim):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for at, row in zip(places, flags.tolist(), strict=True):
            if any(row):
                own: Any = parameters[at] if parameters[at].grad is None else parameters[at].grad
                pairs = zip(row, own.placements, strict=True)
                found[at] = [_KINDS.get(kind, place) for kind, place in pairs]
    return found


# How a mesh dimension's parts become a gradient, as a number that processes can exchange.
_WHOLE, _SUM, _MEAN = range(3)
_KINDS: dict[int, Placement] = {_SUM: Partial(), _MEAN: Partial("avg")}


def _find_kind(placement: Placement) -> int:
    if not placement.is_partial():
        return _WHOLE
    return _MEAN if placement.reduce_op == "avg" else _SUM  # type: ignore[attr-defined]
