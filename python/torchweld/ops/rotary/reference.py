"""Rotary embeddings in plain torch: the formulas of csrc/core/rotary.h."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchweld import checks


def gather(table: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """The rows of a table at these positions; without positions the table itself."""
    return table if positions is None else torch.embedding(table, positions)


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    rounded: str,
    heads: int | None,
) -> torch.Tensor:
    """The norm of rows, or of all rows along dimension `heads`, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [-1] if heads is None else [heads, -1]
    y = wide * wide.square().mean(dims, keepdim=True).add(eps).rsqrt()
    if rounded == "both":
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        weight = weight.to(wide.dtype)
        if heads is not None:
            between = [1] * (-heads - 2)
            weight = weight.view(x.shape[heads], *between, x.shape[-1])
        y = y * (1 + weight if plus_one else weight)
    return y if rounded == "none" else y.to(x.dtype).to(wide.dtype)


def turn(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Sequence[Any],
    transposed: bool = False,
) -> torch.Tensor:
    """The rotation of x's pairs, or its transpose, which differ where cos^2 + sin^2 is not 1.

    The layout is rotary_dim, interleaved and proportional.
    """
    rotary_dim, interleaved, proportional = layout
    pairs = rotary_dim // 2
    if pairs == 0:
        return x
    ends = range(2)
    if interleaved:
        first, second = (x[..., at:rotary_dim:2] for at in ends)
        angles = [(t[..., ::2], t[..., 1::2]) for t in (cos, sin)]
    else:
        distance = x.shape[-1] // 2 if proportional else pairs
        first, second = x[..., :pairs], x[..., distance : distance + pairs]
        angles = [(t[..., :pairs], t[..., pairs:]) for t in (cos, sin)]
    if cos.shape[-1] == pairs:
        angles = [(t, t) for t in (cos, sin)]
    (cos_first, cos_second), (sin_first, sin_second) = angles
    if transposed:
        sin_first, sin_second = -sin_second, -sin_first
    one = first * cos_first - second * sin_first
    other = second * cos_second + first * sin_second
    if interleaved:
        both = concatenate((one[..., None], other[..., None])).flatten(-2)
        parts = [both, x[..., rotary_dim:]]
    else:
        between = x[..., pairs:distance]
        parts = [one, between, other, x[..., distance + pairs :]]
    return concatenate(parts)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat along columns. Under autocast it would refuse 16 bits of another kind."""
    kind = parts[0].device.type
    with torch.autocast(kind, enabled=False) if checks.autocasts(kind) else nullcontext():
        return torch.cat(tuple(parts), -1)


def empty_result(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor as torch.empty_like makes it, or contiguous if its columns would be apart."""
    y = torch.empty_like(x)
    if y.shape[-1] <= 1 or y.stride(-1) == 1:
        return y
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def laid_out_like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y in x's dtype, with the strides of a result."""
    empty = empty_result(x)
    y = y.to(x.dtype)
    return y if y.stride() == empty.stride() else empty.copy_(y)
