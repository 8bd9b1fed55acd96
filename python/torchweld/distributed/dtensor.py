"""DTensors: each device runs an op on its shard, told where that lies in the whole tensor.

Only a row's own dimensions (`Op.columns`) have to be whole on a device; x may be sharded in any
other, and the other arguments follow it as they broadcast to it: sharded where they are as large,
else replicated, with a gradient that is a sum over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.registry import Op


def is_one(x: Any) -> bool:
    """Whether x is a DTensor; torch.distributed.tensor takes half a second to import."""
    return type(x).__name__ == "DTensor"


def on_shards(op: Op, inputs: Sequence[Any], run: Callable[..., Any]) -> Any:
    """Runs the op on this device's shards of DTensors; its results are sharded as x then is."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x = inputs[0]
    mesh, rank = x.device_mesh, x.ndim
    rows = rank - op.columns(*inputs)
    placements = [
        p if isinstance(p, Shard) and p.dim % rank < rows else Replicate() for p in x.placements
    ]

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or name == "seed":
            return value
        if not isinstance(value, DTensor):
            if value.requires_grad:
                raise ArgumentError(op.name, name, "a plain tensor", "a DTensor, as x is")
            value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        missing = rank - value.ndim
        own, grad = [], []
        for placement in placements:
            dim = placement.dim % rank if isinstance(placement, Shard) else -1
            follows = dim >= missing and value.shape[dim - missing] == x.shape[dim]
            own.append(Shard(dim - missing) if follows else Replicate())
            shared = isinstance(placement, Shard) and not follows
            grad.append(Partial() if shared else own[-1])
        return value.redistribute(mesh, own).to_local(grad_placements=grad)

    names = op.forward_signature.arguments
    given = {name: local(name, value) for name, value in zip(names, inputs, strict=True)}
    if "whole" in given:
        if given["whole"]:
            raise ArgumentError(op.name, "shard", "given with a DTensor", "one of the two")
        given["whole"], given["offset"] = list(x.shape), _offset(x.shape, mesh, placements)
    results = run(op, list(given.values()))

    def whole(result: torch.Tensor) -> Any:
        stride = torch.empty(x.shape, device="meta").stride()
        return DTensor.from_local(
            result, mesh, placements, run_check=False, shape=x.shape, stride=stride
        )

    return tuple(map(whole, results)) if isinstance(results, tuple) else whole(results)


def _offset(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[int]:
    """Where this device's shard begins: every mesh dimension cuts what the last one left."""
    sizes, offset = list(shape), [0] * len(shape)
    coordinates = mesh.get_coordinate()
    for at, placement in enumerate(placements):
        if not placement.is_shard():
            continue
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh.size(at))
        begin = min(chunk * coordinates[at], sizes[dim])
        offset[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return offset
