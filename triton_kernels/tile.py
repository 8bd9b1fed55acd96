"""Tiles of a GEMM's result: their sizes, their order, and their parts."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """The part of y that a program computes at a time: rows x columns, by `inner` products.

    `persistent` programs take one tile after another, by descriptors; so do those whose warps have
    `roles`.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    persistent: bool = False
    roles: bool = False

    def __str__(self) -> str:
        how = ", persistent" if self.persistent else ", with roles" if self.roles else ""
        return f"{self.rows} x {self.columns} x {self.inner} by {self.warps} warps{how}"


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
