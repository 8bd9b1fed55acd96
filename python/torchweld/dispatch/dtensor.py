"""DTensors: each device runs an op on its shard, told where that lies in the whole tensor.

The op's declaration says which dimensions may be sharded (registry/sharding.py).
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


def sharded_dim(placement: Any) -> int | None:
    """The dimension that a placement cuts; None: it cuts none."""
    return getattr(placement, "dim", None)


def moved(placement: Any, dim: int) -> Any:
    """The same way of cutting, along another dimension."""
    if hasattr(placement, "split_factor"):
        return type(placement)(dim, split_factor=placement.split_factor)
    return type(placement)(dim)


def on_shards(op: Op, inputs: Sequence[Any], run: Callable[..., Any]) -> Any:
    """Run the op on this device's shards of DTensors; its results are sharded as x then is."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x = inputs[0]
    mesh, rank = x.device_mesh, x.ndim
    rows = rank - op.sharding.columns(*inputs)
    names = op.forward_signature.arguments
    placements, offsets = [], []
    for placement in x.placements:
        dim = sharded_dim(placement)
        keeps = dim is not None and dim % rank < rows
        placements.append(moved(placement, dim % rank) if keeps else Replicate())
    if "whole" in names:
        found = _offsets(x.shape, mesh, placements)
        if found is None:  # the op takes a shard that is a range, so strided ones become one
            dims = [sharded_dim(placement) for placement in placements]
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            found = _offsets(x.shape, mesh, placements)
        assert found is not None
        offsets = found

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
            dim = sharded_dim(placement)
            if dim is None:
                own.append(placement)
                grad.append(placement)
            elif dim >= missing and value.shape[dim - missing] == x.shape[dim]:
                own.append(moved(placement, dim - missing))
                grad.append(own[-1])
            else:  # every device uses all of it
                own.append(Replicate())
                grad.append(Partial())
        return value.redistribute(mesh, own).to_local(grad_placements=grad)

    given = {name: local(name, value) for name, value in zip(names, inputs, strict=True)}
    if "whole" in given:
        if given["whole"]:
            raise ArgumentError(op.name, "shard", "given with a DTensor", "one of the two")
        given["whole"], given["offset"] = list(x.shape), offsets
    results = run(op, list(given.values()))

    def whole(result: torch.Tensor) -> Any:
        shape = x.shape[: result.ndim]  # statistics have no columns
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            result, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return tuple(map(whole, results)) if isinstance(results, tuple) else whole(results)


def indices(shape: Sequence[int], mesh: Any, placements: Sequence[Any], dim: int) -> torch.Tensor:
    """The positions along a dimension of the whole tensor that this device has."""
    here = torch.arange(shape[dim], device="cpu").view(*[1] * dim, shape[dim])
    for at, placement in enumerate(placements):
        if sharded_dim(placement) == dim:
            parts = placement._split_tensor(here, mesh.size(at), with_padding=False)[0]
            here = parts[mesh.get_coordinate()[at]]
    return here.flatten()


def _offsets(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[int] | None:
    """Where this device's shard begins in each dimension; None if its positions are not a range."""
    offsets = [0] * len(shape)
    for dim in {dim for placement in placements if (dim := sharded_dim(placement)) is not None}:
        here = indices(shape, mesh, placements, dim)
        if len(here) == 0:
            offsets[dim] = shape[dim]
        elif not torch.equal(here, torch.arange(len(here), device="cpu") + here[0]):
            return None
        else:
            offsets[dim] = int(here[0])
    return offsets
