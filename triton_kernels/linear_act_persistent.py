"""linear_act's GEMM for GPUs that copy tiles by descriptors (TMA, sm_90 and later).

`linear_act.py` has the arithmetic of a tile's end and the figures. Here a program stays on its
processor and takes one tile after another, so that the loads of the next tile start while the last
one is finished. With descriptors the hardware computes addresses and handles elements past a
matrix's end. They require contiguous rows that start at multiples of 16 bytes.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .act import activate
from .launch import Launch, launch, processors
from .tensors import load_parameter
from .tile import Tile, halves, tile_in_band

_ALIGNMENT = 16
# The first GPUs that have descriptors.
CAPABILITY = 90


@triton.jit(do_not_specialize=["rows"])
def _linear_act_persistent(
    x,
    weight,
    bias_ptr,
    y,
    z,
    rows,
    columns,
    inner,
    ACTIVATION: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_in_band(tile, rows, columns, BAND, ROWS, COLUMNS)
        first_row, first_column = row_tile * ROWS, column_tile * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(tl.cdiv(inner, INNER)):
            k = step * INNER
            total = tl.dot(x.load([first_row, k]), weight.load([first_column, k]).T, total)
        # Stored in quarters, to need less shared memory.
        left, right = halves(total)
        for half in tl.static_range(2):
            for quarter in tl.static_range(2):
                part = halves(right if half else left)[quarter]
                start = first_column + (2 * half + quarter) * (COLUMNS // 4)
                column = start + tl.arange(0, COLUMNS // 4)
                sums = part + load_parameter(bias_ptr, column, columns, 0)[None, :]
                if z is not None:
                    z.store([first_row, start], sums.to(z.dtype))
                y.store([first_row, start], activate(sums, ACTIVATION).to(y.dtype))


def fits(*matrices: torch.Tensor | None) -> bool:
    """Whether these matrices can have descriptors."""
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


def persistent_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    kind: str,
    tile: Tile,
) -> Launch:
    """The launch for matrices that fit; y and z are matrices too."""
    (rows, inner), columns = x.shape, weight.shape[0]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    stored = [tile.rows, tile.columns // 4]
    return launch(
        _linear_act_persistent,
        min(tiles, processors(x.device)),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
        bias,
        TensorDescriptor.from_tensor(y, stored),
        None if z is None else TensorDescriptor.from_tensor(z, stored),
        *(rows, columns, inner),
        ACTIVATION=kind,
        BAND=8,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )._replace(least_capability=CAPABILITY)
