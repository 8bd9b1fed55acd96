"""Sharded parameters: a step runs on the local part, and states are sharded alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld.dispatch.dtensor import is_one, moved
from torchweld.errors import ArgumentError


def local(t: torch.Tensor) -> torch.Tensor:
    """The local part."""
    return t.to_local() if is_one(t) else t  # type: ignore[attr-defined]


def is_sharded(p: torch.Tensor) -> bool:
    """Whether devices hold different parts of it."""
    return is_one(p) and not all(placement.is_replicate() for placement in p.placements)  # type: ignore[attr-defined]


def like(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor, sharded as p, from the local part."""
    return from_part(p, part, p.placements, p.shape) if is_one(p) else part  # type: ignore[attr-defined]


def from_part(
    p: torch.Tensor, part: torch.Tensor, placements: Sequence[Any], shape: torch.Size
) -> torch.Tensor:
    """A DTensor of this shape on the mesh of p, a DTensor, from the local part."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = p.device_mesh  # type: ignore[attr-defined]
    if part.device.type not in (mesh.device_type, "meta"):
        # The part is on the host; from_local would move it to the mesh's device.
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(shape, stride, part.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def zeros_of(
    p: torch.Tensor, shape: torch.Size, dims: Sequence[int | None], dtype: torch.dtype
) -> torch.Tensor:
    """Zeros, with each dimension either p's, sharded alike, or of size 1."""
    part = local(p.detach())
    if not is_one(p):
        return part.new_zeros(shape, dtype=dtype)
    zeros = part.new_zeros([1 if dim is None else part.shape[dim] for dim in dims], dtype=dtype)
    return from_part(p, zeros, placements(p, dims), shape)


def placements(p: torch.Tensor, dims: Sequence[int | None]) -> tuple[Any, ...]:
    """Placements of a tensor with these dimensions of p, a DTensor; None: not one of p's."""
    from torch.distributed.tensor import Replicate

    def of_dim(placement: Any) -> Any:
        if placement.is_replicate() or placement.dim not in dims:
            return Replicate()
        return moved(placement, dims.index(placement.dim))

    return tuple(of_dim(placement) for placement in p.placements)  # type: ignore[attr-defined]


def check_gradient(function: str, p: torch.Tensor) -> None:
    """Check that the gradient is sharded as its parameter, which must not be partial."""
    assert p.grad is not None
    came, accepted = layout(p.grad), layout(p)
    if any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
        raise ArgumentError(function, "a parameter", f"on {accepted}", "sharded or replicated")
    if came != accepted:
        raise ArgumentError(
            function, "a gradient", f"on {came}", f"{accepted}, as its parameter is"
        )


def layout(t: torch.Tensor) -> object:
    """A key common to all tensors that the same devices share in the same way."""
    return (t.device_mesh, t.placements) if is_one(t) else t.device  # type: ignore[attr-defined]
