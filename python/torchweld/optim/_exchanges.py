"""Exchanges between the passes of a step, among the devices that share DTensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchweld.dispatch.dtensor import find_sharded_dim, is_dtensor
from torchweld.ops.optimizer.passes import Exchange, Part


def exchange(kind: Exchange, parts: Iterable[Part]) -> None:
    """Reduce the numbers of each part over all devices, in place, to their sum or maximum.

    Parts that the same devices share are reduced together.
    """
    alike: dict[object, list[Part]] = {}
    for part in parts:
        if is_dtensor(part.param):
            mesh = part.param.device_mesh  # type: ignore[attr-defined]
            key = (mesh, _find_split_dims(part), part.here.device, part.here.dtype)
            alike.setdefault(key, []).append(part)
    for parts_together in alike.values():
        _reduce(kind, parts_together)


def _find_split_dims(part: Part) -> tuple[int, ...]:
    """Find the mesh's dimensions whose devices hold different parts, not replicas."""
    placements = part.param.placements  # type: ignore[attr-defined]
    shards = (find_sharded_dim(placement) for placement in placements)
    return tuple(at for at, dim in enumerate(shards) if dim is not None and dim in part.dims)


def _reduce(kind: Exchange, parts: list[Part]) -> None:
    along = _find_split_dims(parts[0])
    if not along:
        return
    mesh = parts[0].param.device_mesh  # type: ignore[attr-defined]
    # Numbers of states on the host are copied to the device on which the mesh communicates.
    flat = torch.cat([part.here.flatten() for part in parts]).to(mesh.device_type)
    for at in along:
        operation = getattr(torch.distributed.ReduceOp, kind.value)
        torch.distributed.all_reduce(flat, operation, group=mesh.get_group(at))
    reduced = flat.split([part.here.numel() for part in parts])
    for part, numbers in zip(parts, reduced, strict=True):
        part.here.copy_(numbers.view_as(part.here))
