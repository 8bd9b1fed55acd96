"""The exchanges between passes, among the devices that share DTensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchweld.dispatch.dtensor import is_one, sharded_dim
from torchweld.ops.optimizer.passes import Exchange, Part


def exchange(kind: Exchange, parts: Iterable[Part]) -> None:
    """Reduce each part's numbers over all devices, in place, to their sum or maximum.

    Parts shared by the same devices take one reduction.
    """
    alike: dict[object, list[Part]] = {}
    for part in parts:
        if is_one(part.param):
            mesh = part.param.device_mesh  # type: ignore[attr-defined]
            key = (mesh, _along(part), part.here.device, part.here.dtype)
            alike.setdefault(key, []).append(part)
    for some in alike.values():
        _reduce(kind, some)


def _along(part: Part) -> tuple[int, ...]:
    """The mesh's dimensions whose devices hold different parts; replicas hold the same."""
    placements = part.param.placements  # type: ignore[attr-defined]
    shards = (sharded_dim(placement) for placement in placements)
    return tuple(at for at, dim in enumerate(shards) if dim is not None and dim in part.dims)


def _reduce(kind: Exchange, parts: list[Part]) -> None:
    along = _along(parts[0])
    if not along:
        return
    mesh = parts[0].param.device_mesh  # type: ignore[attr-defined]
    # Move parts of states on the host to where the mesh communicates.
    flat = torch.cat([part.here.flatten() for part in parts]).to(mesh.device_type)
    for at in along:
        operation = getattr(torch.distributed.ReduceOp, kind.value)
        torch.distributed.all_reduce(flat, operation, group=mesh.get_group(at))
    of_parts = flat.split([part.here.numel() for part in parts])
    for part, of_all in zip(parts, of_parts, strict=True):
        part.here.copy_(of_all.view_as(part.here))
