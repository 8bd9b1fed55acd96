"""8-bit blocks of sharded parameters, whose rows may be split across devices.

Blocks lie within rows of the whole tensor. If a row is split, its blocks are split into pieces, and
the absmax of a block covers all of its pieces. Each device with a part of a row stores the absmax
of all blocks of the row. So absmaxes are replicated over the devices that share a row, and sharded
like the parameter over devices with different rows.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld.dispatch.dtensor import find_indices, find_sharded_dim, is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import SplitRows
from torchweld.ops.optimizer.passes import Exchange, across_rows
from torchweld.ops.quantize_8bit import (
    BLOCK,
    MAPS,
    absmax_reference,
    dequantize_8bit,
    dequantize_reference,
    quantize_8bit,
    quantize_reference,
    scales_shape,
)
from torchweld.optim._shards import (
    cache_tensors,
    exchange,
    find_placements,
    local_part,
    make_dtensor,
)

# The parameter's dimension for each dimension of its absmax; a row's blocks have none.
ABSMAX_DIMS = (0, None)


def split_rows(p: torch.Tensor, device: torch.device | None = None) -> SplitRows | None:
    """Find how the rows of p are split; None if this device has whole rows.

    The result's tensors are on `device`; default: the device of p.
    """
    if not is_dtensor(p):
        return None
    mesh, shards = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return _split_rows(p.shape, mesh, shards, device or p.device)


def wrap_absmax(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Make the absmax of all blocks of p, a DTensor if p is one, from the local part."""
    if not is_dtensor(p):
        return part
    return make_dtensor(p, part, find_placements(p, ABSMAX_DIMS), scales_shape(p.shape))


def check_blocks(function: str, p: torch.Tensor) -> None:
    """Check that the local part of rows is the one that the placements imply."""
    split, part = split_rows(p), local_part(p)
    if split is not None and part.numel() != len(part) * split.width:
        actual = f'"8bit" for a part of shape {list(part.shape)} of a parameter of {list(p.shape)}'
        shards = p.placements  # type: ignore[attr-defined]
        accepted = f"rows of {split.width} elements by {shards}, or another state_dtype"
        raise ArgumentError(function, "state_dtype", actual, accepted)


def make_zeros(p: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Make codes and absmax of a moment of p that is zero."""
    zero = int((MAPS[signed] == 0).nonzero())
    codes = torch.full_like(p, zero, dtype=torch.uint8, memory_format=torch.contiguous_format)
    part = local_part(p.detach())
    absmax = part.new_zeros(len(part), scales_shape(p.shape)[1], dtype=torch.float32)
    return codes, wrap_absmax(p, absmax)


def quantize(
    p: torch.Tensor, part: torch.Tensor, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute codes and absmax of the local part of a moment of p, from its values."""
    split = split_rows(p, part.device)
    if split is None:
        return quantize_8bit(part.float().contiguous(), signed=signed)
    blocks = split.of_blocks(absmax_reference(part, split.edges))
    exchange(Exchange.LARGEST, [across_rows(blocks, p)])
    absmax = blocks.view(torch.float32)
    codes, _ = quantize_reference(part, signed, split.edges, split.of_pieces(absmax))
    return codes, absmax


def dequantize(
    p: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, signed: bool
) -> torch.Tensor:
    """Compute the values that `quantize` stored."""
    split = split_rows(p, codes.device)
    if split is None:
        return dequantize_8bit(codes, absmax, signed=signed)
    return dequantize_reference(codes, split.of_pieces(absmax), signed, torch.float32, split.edges)


@cache_tensors(maxsize=1024)
def _split_rows(
    shape: torch.Size, mesh: Any, shards: tuple[Any, ...], device: torch.device
) -> SplitRows | None:
    """Find how rows are split; cached, because the host waits for the copy to the device."""
    if not any(find_sharded_dim(shard) for shard in shards):
        return None
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    columns = zero  # the numbers, in the whole row, of the elements on this device
    for dim, size in enumerate(shape[1:], start=1):
        here = find_indices(shape, mesh, shards, dim)
        columns = (columns.unsqueeze(1) * size + here).flatten()
    blocks, sizes = torch.unique_consecutive(columns // BLOCK, return_counts=True)
    edges = torch.cat([zero, sizes.cumsum(0)])
    whole = scales_shape(shape)[1]
    return SplitRows(edges.to(device), blocks.to(device), len(columns), whole)
