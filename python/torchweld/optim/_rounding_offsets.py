"""Offsets of parameters in whole tensors; stochastic rounding derives its random bits from them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.dtensor import find_indices, is_dtensor
from torchweld.errors import ArgumentError
from torchweld.optim._shards import cache_tensors, local_part


class _Part(NamedTuple):
    """The part of a tensor that a device holds."""

    sizes: torch.Size
    first: int | None  # the number of its first element in the whole; None: it has gaps


_ARGUMENT = "a parameter with stochastic_rounding"


def check_dtype(function: str, p: torch.Tensor) -> None:
    """Check that p can be rounded stochastically, or needs no rounding."""
    if p.dtype == torch.float16:
        accepted = "bfloat16, or float32, which is not rounded"
        raise ArgumentError(function, _ARGUMENT, "of float16", accepted)


def check_part(function: str, p: torch.Tensor) -> None:
    """Check that the local part of p, a DTensor, has no gaps."""
    part, here = _find_part(p.shape, p.device_mesh, p.placements), local_part(p.detach()).shape  # type: ignore[attr-defined]
    if part.first is None or part.sizes != here:
        shards = p.placements  # type: ignore[attr-defined]
        actual = f"of {list(p.shape)}, sharded by {shards}; the local part is {list(here)}"
        accepted = "a part without gaps, as these placements divide it"
        raise ArgumentError(function, _ARGUMENT, actual, accepted)


def find_offset(p: torch.Tensor, number: int) -> torch.Tensor:
    """Find the rounding offset of p, the optimizer's parameter of this number."""
    if not is_dtensor(p):
        return _make_offset(number, 0, p.shape)
    first = _find_part(p.shape, p.device_mesh, p.placements).first  # type: ignore[attr-defined]
    return _make_offset(number, first, p.shape)


@cache_tensors(maxsize=8192)
def _make_offset(number: int, first: int, shape: torch.Size) -> torch.Tensor:
    strides = torch.empty(shape, device="meta").stride()
    return torch.tensor([number, first, *strides], dtype=torch.int64, device="cpu")


@lru_cache(maxsize=1024)
def _find_part(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> _Part:
    sizes, first = list(shape), 0
    strides = torch.empty(shape, device="meta").stride()
    for dim in {placement.dim for placement in placements if not placement.is_replicate()}:
        here = find_indices(shape, mesh, placements, dim)
        sizes[dim] = len(here)
        if len(here) == 0:
            continue
        if here[-1] - here[0] + 1 != len(here):
            return _Part(torch.Size(sizes), None)
        first += int(here[0]) * strides[dim]
    return _Part(torch.Size(sizes), first)
