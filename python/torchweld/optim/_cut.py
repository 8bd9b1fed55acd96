"""8-bit blocks of sharded parameters: rows of which other devices have a part cut blocks to pieces.

Blocks lie within rows of the whole tensor, so that their absmax is that of all their pieces. Each
device that has a part of a row keeps the absmax of all its blocks: replicated over these devices,
sharded as the parameter over those that have other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.dtensor import indices, is_one
from torchweld.errors import ArgumentError
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
from torchweld.optim._shards import from_part, local, placements

# Which dimensions of a parameter those of its absmax are: a row's blocks are of none.
ABSMAX_DIMS = (0, None)


class CutRows(NamedTuple):
    """How rows are cut where this device has a part of each."""

    edges: torch.Tensor  # [pieces + 1]: where pieces of blocks begin and end in a row's part
    blocks: torch.Tensor  # [pieces]: which of the whole row's blocks they are of
    width: int  # of a row's part
    blocks_of_row: int
    mesh: Any
    dims: tuple[int, ...]  # of the mesh: the devices along them share rows

    def of_pieces(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, pieces], from those of blocks."""
        return absmax[:, self.blocks]

    def of_step(self, absmax: torch.Tensor) -> torch.Tensor:
        """[2, rows, pieces], as a step takes them: as they are, twice if nothing is measured."""
        pieces = self.of_pieces(absmax)
        return torch.stack((pieces, pieces))

    def of_blocks(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, blocks], from those of the pieces that are here; as ordered bits."""
        bits = absmax.contiguous().view(torch.int32)
        zeros = bits.new_zeros(len(bits), self.blocks_of_row)
        return zeros.scatter_reduce(1, self.blocks.expand_as(bits), bits, "amax")


def cut_rows(p: torch.Tensor, device: torch.device | None = None) -> CutRows | None:
    """Or None, where this device has whole rows. On p's device, if none is named."""
    if not is_one(p):
        return None
    mesh, shards = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return _cut_rows(p.shape, mesh, shards, device or p.device)


def absmax_like(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The absmax of p's blocks, of which this device has this part."""
    if not is_one(p):
        return part
    return from_part(p, part, placements(p, ABSMAX_DIMS), scales_shape(p.shape))


def check_blocks(function: str, p: torch.Tensor) -> None:
    """That this device has the part of rows which placements say."""
    cut, part = cut_rows(p), local(p)
    if cut is not None and part.numel() != len(part) * cut.width:
        came = f'"8bit" for a part of shape {list(part.shape)} of a parameter of {list(p.shape)}'
        shards = p.placements  # type: ignore[attr-defined]
        accepted = f"rows of {cut.width} elements by {shards}, or another state_dtype"
        raise ArgumentError(function, "state_dtype", came, accepted)


def zeros(p: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and absmax of a moment of p that is zero."""
    zero = int((MAPS[signed] == 0).nonzero())
    codes = torch.full_like(p, zero, dtype=torch.uint8, memory_format=torch.contiguous_format)
    part = local(p.detach())
    absmax = part.new_zeros(len(part), scales_shape(p.shape)[1], dtype=torch.float32)
    return codes, absmax_like(p, absmax)


def quantize(
    p: torch.Tensor, part: torch.Tensor, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and absmax of this device's part of a moment of p, from its values."""
    cut = cut_rows(p, part.device)
    if cut is None:
        return quantize_8bit(part.float().contiguous(), signed=signed)
    (absmax,) = joined([(cut, absmax_reference(part, cut.edges))])
    codes, _ = quantize_reference(part, signed, cut.edges, cut.of_pieces(absmax))
    return codes, absmax


def dequantize(
    p: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, signed: bool
) -> torch.Tensor:
    """What `quantize` kept."""
    cut = cut_rows(p, codes.device)
    if cut is None:
        return dequantize_8bit(codes, absmax, signed=signed)
    return dequantize_reference(codes, cut.of_pieces(absmax), signed, torch.float32, cut.edges)


def joined(pieces: Sequence[tuple[CutRows, torch.Tensor]]) -> list[torch.Tensor]:
    """The absmax of all blocks, from those of the pieces here and on the devices that share rows.

    One reduction for all that are shared by the same devices.
    """
    alike: dict[tuple[Any, tuple[int, ...], torch.device], list[int]] = {}
    for i, (cut, absmax) in enumerate(pieces):
        alike.setdefault((cut.mesh, cut.dims, absmax.device), []).append(i)
    results: dict[int, torch.Tensor] = {}
    for (mesh, dims, _), numbers in alike.items():
        blocks = [pieces[i][0].of_blocks(pieces[i][1]) for i in numbers]
        flat = torch.cat([bits.flatten() for bits in blocks])
        for dim in dims:
            largest = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(flat, largest, group=mesh.get_group(dim))
        parts = flat.view(torch.float32).split([bits.numel() for bits in blocks])
        for i, part, bits in zip(numbers, parts, blocks, strict=True):
            results[i] = part.view_as(bits)
    return [results[i] for i in range(len(pieces))]


@lru_cache(maxsize=1024)
def _cut_rows(
    shape: torch.Size, mesh: Any, shards: tuple[Any, ...], device: torch.device
) -> CutRows | None:
    """Copied to a device once, for which it has to wait."""
    dims = tuple(at for at, shard in enumerate(shards) if getattr(shard, "dim", 0) != 0)
    if not dims:
        return None
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    columns = zero  # of the row's elements that are here
    for dim, size in enumerate(shape[1:], start=1):
        here = indices(shape, mesh, shards, dim)
        columns = (columns.unsqueeze(1) * size + here).flatten()
    blocks, sizes = torch.unique_consecutive(columns // BLOCK, return_counts=True)
    edges = torch.cat([zero, sizes.cumsum(0)])
    whole = scales_shape(shape)[1]
    return CutRows(edges.to(device), blocks.to(device), len(columns), whole, mesh, dims)
