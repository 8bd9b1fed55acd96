"""Tiles of a GEMM's result: sizes, order and parts, and the matrices that are copied by tiles."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """The part of y that a program computes at a time: rows x columns, by `inner` products."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    specialised: bool = False  # its warps: linear_act_specialised.py

    def __str__(self) -> str:
        how = ", warp-specialised" if self.specialised else ""
        return f"{self.rows} x {self.columns} x {self.inner} by {self.warps} warps{how}"


_ALIGNMENT = 16


def fits(*matrices: torch.Tensor | None) -> bool:
    """Whether these matrices can have descriptors (TMA), which take contiguous, aligned rows."""
    return all(_fits(matrix) for matrix in matrices if matrix is not None)


def _fits(matrix: torch.Tensor) -> bool:
    size = matrix.element_size()
    places = matrix.data_ptr() if matrix.device.type != "meta" else 0, matrix.stride(0) * size
    return (
        matrix.stride(1) == 1
        and matrix.numel() > 0
        and max(matrix.shape) < 2**31
        and matrix.stride(0) > 0
        and all(place % _ALIGNMENT == 0 for place in places)
    )


@triton.jit
def tile_in_band(
    tile, rows, columns, BAND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Row and column of a tile. Tiles go down the rows of a band, then to its next column."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    first = tile // (BAND * column_tiles) * BAND
    height = tl.minimum(BAND, row_tiles - first)
    within = tile - first * column_tiles
    return first + within % height, within // height


@triton.jit
def halves(tile):
    """The left and the right half of a tile's columns."""
    return tl.split(tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1))
