"""Sharded parameters: a step runs on the local part, and states are sharded like parameters.

Devices that share DTensors exchange numbers between the passes of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from torchweld import state
from torchweld.dispatch.dtensor import find_sharded_dim, is_dtensor, move_placement
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.passes import Exchange, Part

T = TypeVar("T")


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


# --- Exchanges ---


def exchange(kind: Exchange, parts: Iterable[Part]) -> None:
    """Reduce the numbers of each part over all devices, in place, to their sum or maximum.

    Parts that the same devices share are reduced together.
    """
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        if is_dtensor(part.param):
            mesh = part.param.device_mesh  # type: ignore[attr-defined]
            along = find_split_dims(part.param, part.dims)
            alike.setdefault((mesh, along, part.here.device, part.here.dtype), []).append(part)
    for (mesh, along, *_), parts_together in alike.items():
        if along:
            _reduce(kind, parts_together, mesh, along)


def find_split_dims(p: torch.Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Find the mesh's dimensions whose devices hold different parts of these dimensions of p."""
    if not is_dtensor(p):
        return ()
    shards = map(find_sharded_dim, p.placements)  # type: ignore[attr-defined]
    mesh = p.device_mesh  # type: ignore[attr-defined]
    return tuple(at for at, dim in enumerate(shards) if dim in dims and mesh.size(at) > 1)


def _reduce(kind: Exchange, parts: list[Part], mesh: Any, along: tuple[int, ...]) -> None:
    # Numbers of states on the host are copied to the device on which the mesh communicates.
    flat = torch.cat([part.here.flatten() for part in parts]).to(mesh.device_type)
    for at in along:
        operation = getattr(torch.distributed.ReduceOp, kind.value)
        torch.distributed.all_reduce(flat, operation, group=mesh.get_group(at))
    reduced = flat.split([part.here.numel() for part in parts])
    for part, numbers in zip(parts, reduced, strict=True):
        part.here.copy_(numbers.view_as(part.here))


def cache_tensors(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache results like functools.lru_cache, except under a dispatch mode or inference mode.

    A FakeTensorMode makes and accepts only fake tensors, and autograd cannot save tensors that were
    made in inference_mode.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        cached = functools.lru_cache(maxsize=maxsize)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> T:
            has_mode = state.count_dispatch_modes() or torch.is_inference_mode_enabled()
            return function(*arguments) if has_mode else cached(*arguments)

        return call

    return decorate
