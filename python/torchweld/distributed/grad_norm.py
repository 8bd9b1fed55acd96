"""grad_norm: the norm of all gradients across processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

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
    for parameter in parameters:
        # A process without a gradient takes part in the sums of the others.
        grad = parameter.grad if parameter.grad is not None else parameter.detach()
        key, device = (), grad.device
        if isinstance(grad, DTensor):
            if any(p.is_partial() for p in grad.placements):  # add the parts before squaring
                whole = [Replicate() if p.is_partial() else p for p in grad.placements]
                grad = grad.redistribute(placements=whole)
            dims = [at for at, p in enumerate(grad.placements) if not p.is_replicate()]
            key, grad = tuple(grad.device_mesh.get_group(at) for at in dims), grad.to_local()  # type: ignore[assignment]
        square = squares.setdefault(key, torch.zeros((), device=device))
        if parameter.grad is not None:
            square += grad.detach().float().square().sum() / getattr(parameter, COPIES, 1)
    total = torch.zeros((), device=device)
    for groups, square in squares.items():
        for shared in groups:
            dist.all_reduce(square, group=shared)
        total += square
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()
