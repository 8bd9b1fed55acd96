"""Sharded parameters: a step runs on this device's part, and state is sharded as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld.distributed.dtensor import is_one
from torchweld.errors import ArgumentError
from torchweld.ops._optimizer import Sums


def local(t: torch.Tensor) -> torch.Tensor:
    """This device's part."""
    return t.to_local() if is_one(t) else t  # type: ignore[attr-defined]


def indices(shape: Sequence[int], mesh: Any, placements: Sequence[Any], dim: int) -> torch.Tensor:
    """Of a dimension of a tensor that is so sharded: those that this device has."""
    here = torch.arange(shape[dim], device="cpu").view(*[1] * dim, shape[dim])
    for at, placement in enumerate(placements):
        if getattr(placement, "dim", None) == dim:
            parts = placement._split_tensor(here, mesh.size(at), with_padding=False)[0]
            here = parts[mesh.get_coordinate()[at]]
    return here.flatten()


def is_sharded(p: torch.Tensor) -> bool:
    """Whether devices have parts of it."""
    return is_one(p) and not all(placement.is_replicate() for placement in p.placements)  # type: ignore[attr-defined]


def like(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The whole, sharded as p, of which this is the part."""
    return from_part(p, part, p.placements, p.shape) if is_one(p) else part  # type: ignore[attr-defined]


def from_part(
    p: torch.Tensor, part: torch.Tensor, placements: Sequence[Any], shape: torch.Size
) -> torch.Tensor:
    """The whole of this shape, on the devices of p, a DTensor, of which this is the part."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = p.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def zeros_of(
    p: torch.Tensor, shape: torch.Size, dims: Sequence[int | None], dtype: torch.dtype
) -> torch.Tensor:
    """Zeros of which each dimension is one of p, sharded as that, or of one element."""
    part = local(p.detach())
    if not is_one(p):
        return part.new_zeros(shape, dtype=dtype)
    zeros = part.new_zeros([1 if dim is None else part.shape[dim] for dim in dims], dtype=dtype)
    return from_part(p, zeros, placements(p, dims), shape)


def placements(p: torch.Tensor, dims: Sequence[int | None]) -> tuple[Any, ...]:
    """Of a tensor whose dimensions are these of p, a DTensor; None is one that p has not."""
    from torch.distributed.tensor import Replicate, Shard

    def moved(placement: Any) -> Any:
        if placement.is_replicate() or placement.dim not in dims:
            return Replicate()
        at = dims.index(placement.dim)
        if hasattr(placement, "split_factor"):
            return type(placement)(at, split_factor=placement.split_factor)
        return Shard(at)

    return tuple(moved(placement) for placement in p.placements)  # type: ignore[attr-defined]


def check_gradient(function: str, p: torch.Tensor) -> None:
    """Sharded as its parameter, which is no sum over devices."""
    assert p.grad is not None
    came, accepted = layout(p.grad), layout(p)
    if any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
        raise ArgumentError(function, "a parameter", f"on {accepted}", "sharded or replicated")
    if came != accepted:
        raise ArgumentError(
            function, "a gradient", f"on {came}", f"{accepted}, as its parameter is"
        )


def sum_over_shards(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum of what the devices that share `like` have, with replicas counted once."""
    if is_one(like):
        mesh = like.device_mesh  # type: ignore[attr-defined]
        for dim, placement in enumerate(like.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


def sum_of_each(sums: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
    """A row for each parameter, summed over its shards: one reduction for each layout."""
    alike: dict[object, list[int]] = {}
    for i, p in enumerate(params):
        if is_one(p):
            alike.setdefault(layout(p), []).append(i)
    for rows in alike.values():
        sums[rows] = sum_over_shards(sums[rows], params[rows[0]])
    return sums


def add_up(params: list[torch.Tensor], sums: list[Sums]) -> list[list[torch.Tensor]]:
    """Of each parameter, float64 sums over some of its dimensions, over all devices' parts.

    One reduction for all that are summed over the same devices.
    """
    alike: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    for p, of_param in zip(params, sums, strict=True):
        if not is_one(p):
            continue
        placements = p.placements  # type: ignore[attr-defined]
        for part, dims in of_param:
            shard_dims = [getattr(placement, "dim", None) for placement in placements]
            along = tuple(at for at, dim in enumerate(shard_dims) if dim in dims)
            mesh = p.device_mesh  # type: ignore[attr-defined]
            alike.setdefault((mesh, along), []).append(part)
    for (mesh, along), parts in alike.items():
        flat = torch.cat([part.flatten() for part in parts])
        for at in along:
            torch.distributed.all_reduce(flat, group=mesh.get_group(at))
        for part, of_all in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(of_all.view_as(part))
    return [[part for part, _ in of_param] for of_param in sums]


def layout(t: torch.Tensor) -> object:
    """What tensors that are shared by the same devices in the same way have in common."""
    return (t.device_mesh, t.placements) if is_one(t) else t.device  # type: ignore[attr-defined]
