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

from torchweld.errors import ArgumentError
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_8bit import (
    BLOCK,
    MAPS,
    absmax_reference,
    dequantize_reference,
    quantize_reference,
    scales_shape,
)
from torchweld.optim._shards import from_part, indices, is_one, local, placements

# Which dimensions of a parameter those of its absmax are: a row's blocks are of none.
ABSMAX_DIMS = (0, None)


class CutRows(NamedTuple):
    """How rows are cut where this device has a part of each."""

    edges: torch.Tensor  # [pieces + 1]: where pieces of blocks begin and end in a row's part
    blocks: torch.Tensor  # [pieces]: which of the whole row's blocks they are of
    blocks_of_row: int
    mesh: Any
    dims: tuple[int, ...]  # of the mesh: the devices along them share rows

    def of_pieces(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, pieces], from those of blocks."""
        return absmax[:, self.blocks.to(absmax.device)]

    def of_step(self, absmax: torch.Tensor) -> torch.Tensor:
        """[2, rows, pieces], as a step takes them: as they are, twice if nothing is measured."""
        pieces = self.of_pieces(absmax)
        return torch.stack((pieces, pieces))

    def of_blocks(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, blocks], from those of the pieces that are here; as ordered bits."""
        bits = absmax.contiguous().view(torch.int32)
        index = self.blocks.to(bits.device).expand_as(bits)
        zeros = bits.new_zeros(len(bits), self.blocks_of_row)
        return zeros.scatter_reduce(1, index, bits, "amax")


def cut_rows(p: torch.Tensor) -> CutRows | None:
    """Or None, where this device has whole rows."""
    if not is_one(p):
        return None
    return _cut_rows(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]


def absmax_like(p: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The absmax of p's blocks, of which this device has this part."""
    if not is_one(p):
        return part
    return from_part(p, part, placements(p, ABSMAX_DIMS), scales_shape(p.shape))


def check_blocks(function: str, p: torch.Tensor) -> None:
    """That this device has the part of rows which placements say."""
    cut, part = cut_rows(p), local(p)
    if cut is not None and part.numel() != len(part) * cut.edges[-1]:
        came = f'"8bit" for a part of shape {list(part.shape)} of a parameter of {list(p.shape)}'
        shards = p.placements  # type: ignore[attr-defined]
        accepted = f"rows of {int(cut.edges[-1])} elements by {shards}, or another state_dtype"
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
    cut = cut_rows(p)
    if cut is None:
        return quantize_8bit(part.float().contiguous(), signed=signed)
    (absmax,) = joined([(cut, absmax_reference(part, cut.edges.to(part.device)))])
    codes, _ = quantize_reference(part, signed, cut.edges.to(part.device), cut.of_pieces(absmax))
    return codes, absmax


def dequantize(
    p: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, signed: bool
) -> torch.Tensor:
    """What `quantize` kept."""
    cut = cut_rows(p)
    if cut is None:
        return dequantize_8bit(codes, absmax, signed=signed)
    scales, edges = cut.of_pieces(absmax), cut.edges.to(codes.device)
    return dequantize_reference(codes, scales, signed, torch.float32, edges)


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
def _cut_rows(shape: torch.Size, mesh: Any, shards: tuple[Any, ...]) -> CutRows | None:
    dims = tuple(at for at, shard in enumerate(shards) if getattr(shard, "dim", 0) != 0)
    if not dims:
        return None
    columns = torch.zeros(1, dtype=torch.int64)  # of the row's elements that are here
    for dim, size in enumerate(shape[1:], start=1):
        here = indices(shape, mesh, shards, dim)
        columns = (columns.unsqueeze(1) * size + here).flatten()
    blocks, sizes = torch.unique_consecutive(columns // BLOCK, return_counts=True)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return CutRows(edges, blocks, scales_shape(shape)[1], mesh, dims)
