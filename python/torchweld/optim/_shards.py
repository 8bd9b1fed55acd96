"""Sharded parameters: a step runs on the local part, and states are sharded like parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld.dispatch.dtensor import is_dtensor, move_placement
from torchweld.errors import ArgumentError


def local_part(t: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor; any other tensor is its own."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def is_sharded(p: torch.Tensor) -> bool:
    """Whether devices hold different parts of p."""
    return is_dtensor(p) and not all(placement.is_replicate() for placement in p.placements)  # type: ignore[attr-defined]


def shard_like(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Make a tensor that is sharded as p, from the local part."""
    return make_dtensor(p, part, p.placements, p.shape) if is_dtensor(p) else part  # type: ignore[attr-defined]


def make_dtensor(
    p: torch.Tensor, part: torch.Tensor, placements: Sequence[Any], shape: torch.Size
) -> torch.Tensor:
    """Make a DTensor of this shape on the mesh of p, a DTensor, from the local part."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = p.device_mesh  # type: ignore[attr-defined]
    if part.device.type not in (mesh.device_type, "meta"):
        # from_local would move this part from the host to the mesh's device.
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(shape, stride, part.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
        return DTensor(part, spec, requires_grad=False)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def make_zeros(
    p: torch.Tensor, shape: torch.Size, dims: Sequence[int | None], dtype: torch.dtype
) -> torch.Tensor:
    """Make zeros with dimensions of p, sharded like p, or of size 1."""
    part = local_part(p.detach())
    if not is_dtensor(p):
        return part.new_zeros(shape, dtype=dtype)
    zeros = part.new_zeros([1 if dim is None else part.shape[dim] for dim in dims], dtype=dtype)
    return make_dtensor(p, zeros, find_placements(p, dims), shape)


def find_placements(p: torch.Tensor, dims: Sequence[int | None]) -> tuple[Any, ...]:
    """Find the placements of a tensor with these dimensions of p, a DTensor; None: not of p."""
    from torch.distributed.tensor import Replicate

    def translate(placement: Any) -> Any:
        if placement.is_replicate() or placement.dim not in dims:
            return Replicate()
        return move_placement(placement, dims.index(placement.dim))

    return tuple(translate(placement) for placement in p.placements)  # type: ignore[attr-defined]


def check_gradient(function: str, p: torch.Tensor) -> None:
    """Check that the gradient is sharded like its parameter, and the parameter not partial."""
    assert p.grad is not None
    actual, accepted = sharing_key(p.grad), sharing_key(p)
    if any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
        raise ArgumentError(function, "a parameter", f"on {accepted}", "sharded or replicated")
    if actual != accepted:
        raise ArgumentError(
            function, "a gradient", f"on {actual}", f"{accepted}, as its parameter is"
        )


def sharing_key(t: torch.Tensor) -> object:
    """A key that is equal for all tensors that the same devices share in the same way."""
    return (t.device_mesh, t.placements) if is_dtensor(t) else t.device  # type: ignore[attr-defined]
