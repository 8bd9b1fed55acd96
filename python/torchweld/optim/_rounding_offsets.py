"""The places of parameters in whole tensors, from which stochastic rounding derives its bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.dtensor import indices, is_one
from torchweld.errors import ArgumentError
from torchweld.optim._kept import keep
from torchweld.optim._shards import local


class _Part(NamedTuple):
    """A device's part of a tensor."""

    sizes: torch.Size
    first: int | None  # element of the whole; None if the part has gaps


_ARGUMENT = "a parameter with stochastic_rounding"


def check_dtype(function: str, p: torch.Tensor) -> None:
    """Check that p can be rounded stochastically, or needs no rounding."""
    if p.dtype == torch.float16:
        accepted = "bfloat16, or float32, which is not rounded"
        raise ArgumentError(function, _ARGUMENT, "of float16", accepted)


def check_part(function: str, p: torch.Tensor) -> None:
    """Check that the local part of p, a DTensor, has no gaps."""
    part, here = _part(p.shape, p.device_mesh, p.placements), local(p.detach()).shape  # type: ignore[attr-defined]
    if part.first is None or part.sizes != here:
        shards = p.placements  # type: ignore[attr-defined]
        came = f"of {list(p.shape)}, sharded by {shards}; the local part is {list(here)}"
        accepted = "a part without gaps, as these placements divide it"
        raise ArgumentError(function, _ARGUMENT, came, accepted)


def offset_of(p: torch.Tensor, number: int) -> torch.Tensor:
    """The rounding offset of p, the optimizer's parameter of this number."""
    if not is_one(p):
        return _offset(number, 0, p.shape)
    first = _part(p.shape, p.device_mesh, p.placements).first  # type: ignore[attr-defined]
    assert first is not None
    return _offset(number, first, p.shape)


@keep(maxsize=8192)
def _offset(number: int, first: int, shape: torch.Size) -> torch.Tensor:
    strides = torch.empty(shape, device="meta").stride()
    return torch.tensor([number, first, *strides], dtype=torch.int64, device="cpu")


@lru_cache(maxsize=1024)
def _part(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> _Part:
    sizes, first = list(shape), 0
    strides = torch.empty(shape, device="meta").stride()
    for dim in {placement.dim for placement in placements if not placement.is_replicate()}:
        here = indices(shape, mesh, placements, dim)
        sizes[dim] = len(here)
        if len(here) == 0:
            continue
        if here[-1] - here[0] + 1 != len(here):
            return _Part(torch.Size(sizes), None)
        first += int(here[0]) * strides[dim]
    return _Part(torch.Size(sizes), first)
