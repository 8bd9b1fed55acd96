"""DTensors: each device runs an op on its shard, and passes the shard's place in the whole.

The op's declaration says which dimensions may be sharded (registry/sharding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.registry import Op

# An attribute of parameters whose gradients may be parts, which their owner adds up later.
SUMMED_LATER = "torchweld_summed_later"


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor; torch.distributed.tensor takes half a second to import."""
    return type(x).__name__ == "DTensor"


def find_sharded_dim(placement: Any) -> int | None:
    """The dimension that a placement shards; None if it shards none."""
    return getattr(placement, "dim", None)


def move_placement(placement: Any, dim: int) -> Any:
    """The same kind of shard along another dimension."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    # Dynamo can construct a placement only of a class that is named, not of type(placement).
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def run_on_shards(op: Op, run: Callable[..., Any], *inputs: Any) -> Any:
    """Run the op on this device's shards of DTensors; results get the placements used for x."""
    from torch.distributed.tensor import Replicate, Shard

    x = inputs[0]
    mesh, rank = x.device_mesh, x.ndim
    rows = rank - op.sharding.columns(*inputs)
    names = op.forward_signature.arguments
    placements, offsets = [], []
    for placement in x.placements:
        dim = find_sharded_dim(placement)
        keeps = dim is not None and dim % rank < rows
        placements.append(move_placement(placement, dim % rank) if keeps else Replicate())
    if "whole" in names:
        shard_offsets = find_offsets(x.shape, mesh, placements)
        if shard_offsets is None:
            # The op takes a shard that is a range, so strided shards become whole dimensions.
            dims = [find_sharded_dim(placement) for placement in placements]
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            shard_offsets = find_offsets(x.shape, mesh, placements)
        assert shard_offsets is not None
        offsets = shard_offsets

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or name == "seed":
            return value
        own, grads = _follow(placements, x.shape, value.shape)
        # The derivative of redistribute adds up at once.
        shard: Any = value
        if getattr(shard, SUMMED_LATER, False) and shard.placements == tuple(own):
            return shard.to_local(grad_placements=grads)
        return take_part(op.name, name, value, mesh, own, grads)

    local_inputs = {name: local(name, value) for name, value in zip(names, inputs, strict=True)}
    if "whole" in local_inputs:
        if local_inputs["whole"]:
            raise ArgumentError(op.name, "shard", "given with a DTensor", "one of the two")
        local_inputs["whole"], local_inputs["offset"] = list(x.shape), offsets
    results = run(*local_inputs.values())

    local_rows = local_inputs[names[0]].shape[0] if rank else 0

    def whole(result: torch.Tensor) -> Any:
        if result.ndim == 1 < rank and result.shape[0] == 0 < local_rows:
            return result  # it stands for the result of an absent argument
        # Statistics have no columns, and attention's values may have others than x.
        shape = (*x.shape[:rows][: result.ndim], *result.shape[rows:])
        return as_dtensor(result, mesh, placements, shape)

    return tuple(map(whole, results)) if isinstance(results, tuple) else whole(results)


def _follow(
    placements: Sequence[Any], shape: Sequence[int], own_shape: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """The placements of an argument that follows x by broadcasting, and of its gradient.

    `placements` and `shape` are those that x has.
    """
    from torch.distributed.tensor import Partial, Replicate

    missing = len(shape) - len(own_shape)
    own, grads = [], []
    for placement in placements:
        dim = find_sharded_dim(placement)
        if dim is None:
            own.append(placement)
        elif dim >= missing and own_shape[dim - missing] == shape[dim]:
            own.append(move_placement(placement, dim - missing))
        else:  # every device uses all of it
            own.append(Replicate())
            grads.append(Partial())
            continue
        grads.append(own[-1])
    return own, grads


def replicate(mesh: Any) -> list[Any]:
    """The placements of a tensor that every device has."""
    from torch.distributed.tensor import Replicate

    return [Replicate()] * mesh.ndim


def is_strided(placement: Any) -> bool:
    """Whether the positions that a placement gives a device may be no range."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def as_dtensor(part: torch.Tensor, mesh: Any, placements: Any, shape: Sequence[int]) -> Any:
    """The contiguous DTensor of this shape whose part on this device is `part`."""
    from torch.distributed.tensor import DTensor

    stride, size = torch.empty(shape, device="meta").stride(), torch.Size(shape)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


def take_part(function: str, name: str, value: Any, mesh: Any, placements: Any, grads: Any) -> Any:
    """This device's part of an argument; `placements` place it, and `grads` its gradient.

    A plain tensor is the same on every device.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor):
        return value
    if not is_dtensor(value):
        if value.requires_grad and torch.is_grad_enabled():
            actual = "a plain tensor that requires grad"
            raise ArgumentError(function, name, actual, "a DTensor, as input is")
        value = DTensor.from_local(value, mesh, replicate(mesh), run_check=False)
    elif value.device_mesh != mesh:  # type: ignore[attr-defined]
        raise ArgumentError(function, name, "on another mesh", "the mesh of input")
    value = value.redistribute(mesh, placements)
    return value.to_local(grad_placements=grads)


def find_indices(
    shape: Sequence[int],
    mesh: Any,
    placements: Sequence[Any],
    dim: int,
    coordinate: Sequence[int] | None = None,
) -> torch.Tensor:
    """The positions along a dimension of the whole tensor that a device of the mesh has.

    Default: this device.
    """
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    here = torch.arange(shape[dim], device="cpu").view(*[1] * dim, shape[dim])
    for at, placement in enumerate(placements):
        if find_sharded_dim(placement) == dim:
            parts = placement._split_tensor(here, mesh.size(at), with_padding=False)[0]
            here = parts[coordinate[at]]
    return here.flatten()


def find_offsets(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[int] | None:
    """The begin of this device's shard in each dimension; None if its positions are no range."""
    # Dynamo of torch 2.10 cannot ask a placement for its attributes.
    if any(map(is_strided, placements)):
        return _strided_offsets(shape, mesh, placements)
    # Only numbers: Dynamo cannot read the elements of a tensor.
    begins, ends = [0] * len(shape), list(shape)
    for at, placement in enumerate(placements):
        if (dim := find_sharded_dim(placement)) is not None:
            each = -(-(ends[dim] - begins[dim]) // mesh.size(at))
            begins[dim] = min(begins[dim] + each * mesh.get_local_rank(at), ends[dim])
            ends[dim] = min(begins[dim] + each, ends[dim])
    return begins


def _strided_offsets(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Any:
    """Like find_offsets, but shards may be strided."""
    offsets = [0] * len(shape)
    for dim in {
        dim for placement in placements if (dim := find_sharded_dim(placement)) is not None
    }:
        here = find_indices(shape, mesh, placements, dim)
        if len(here) == 0:
            offsets[dim] = shape[dim]
        elif not torch.equal(here, torch.arange(len(here), device="cpu") + here[0]):
            return None
        else:
            offsets[dim] = int(here[0])
    return offsets
