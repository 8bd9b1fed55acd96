"""linear_act's GEMM in Triton, with the bias and the activation in its epilogue.

With M rows, K inputs and N outputs it does 2 M N K operations. At 16 bits it reads 2 (M K + N K)
bytes and writes 2 M N of y and, with a gradient, as many of z, the sum before the activation.
torch's GEMM followed by bias_act writes z, reads it and writes y. That is 2 M N bytes more: one of
its three trips, or two of three if nothing is saved.

On an H200, in milliseconds (132 processors; 989 TFLOP/s dense at bf16, a library's GEMM reaches
about 720; copies of 4.3 TB/s):

    (M, K) x N            bare GEMM    y and z   a pass over z   unfused
    (8192, 4096) x 16384     1.53        0.12        0.12         1.08x the GEMM
    (8192, 1024) x 4096      0.095       0.03        0.03         1.33x

The floor of a fused kernel is the GEMM with one tensor more to write: 1.04x the GEMM at the first
shape and 1.16x at the second. Without z it is the GEMM itself. On sm_90 the warp-specialised kernel
of `linear_act_specialised.py` reaches it: a tile's end overlaps the products of the next one. This
kernel, which loads through pointers and is for all GPUs, takes 1.26x the GEMM there, and two steps
take 1.09x. On sm_80, where loads through pointers are as fast as any, it should win. So all forms,
the unfused one included, are timed on the GPU at hand to choose one:
`torchweld/ops/gemm/fused_choice.py`.

A program has one tile of y. Its epilogue for erf takes 20 operations an element.
For a tile of 128 x 256 that is about 5 us, and the two stores take as long; at K = 4096 the
products take 36 us. Tiles of 128 x 128 by eight warps in at most 128 registers (sm_90) let two
programs share a processor, one in its epilogue while the other multiplies. Programs walk a band of
BAND rows of tiles column by column: 132 of them then share about 8 + 17 tiles' worth of x and
weight in L2, not 1 + 132.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .act import _kind, activate
from .launch import Launch, forbid_replay, launch, processors, replayed, run
from .linear_act_specialised import runs_on as runs_specialised
from .linear_act_specialised import specialised_launch
from .tensors import aligned, check_beside, contiguous, load_parameter, store
from .tile import Tile, fits, halves, tile_in_band


@triton.jit(do_not_specialize=["rows"])
def _linear_act(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    rows,
    columns,
    inner,
    x_row_stride,
    x_stride,
    weight_row_stride,
    weight_stride,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER_FITS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    row_tile, column_tile = tile_in_band(tl.program_id(0), rows, columns, BAND, ROWS, COLUMNS)
    first_row, first_column = row_tile.to(tl.int64) * ROWS, column_tile.to(tl.int64) * COLUMNS
    row, column, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    rows_inside = (first_row + row < rows)[:, None]
    columns_inside = (first_column + column < columns)[None, :]
    # 32 bits are enough for positions within a tile, and take half of the registers.
    x_place = row[:, None] * x_row_stride + k[None, :] * x_stride
    weight_place = column[None, :] * weight_row_stride + k[:, None] * weight_stride
    x_ptr += first_row * x_row_stride
    weight_ptr += first_column * weight_row_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inner, INNER):
        x_inside, weight_inside = rows_inside, columns_inside
        if not INNER_FITS:
            x_inside &= (start + k < inner)[None, :]
            weight_inside &= (start + k < inner)[:, None]
        x = tl.load(x_ptr + x_place, mask=x_inside, other=0)
        weight = tl.load(weight_ptr + weight_place, mask=weight_inside, other=0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_ptr += INNER * x_stride
        weight_ptr += INNER * weight_stride
    # Stored in quarters: data on its way from registers to memory takes registers too.
    left, right = halves(total)
    for half in tl.static_range(2):
        for quarter in tl.static_range(2):
            part = halves(right if half else left)[quarter]
            column = (
                column_tile * COLUMNS  # 32 bits, which take half of the registers
                + (2 * half + quarter) * (COLUMNS // 4)
                + tl.arange(0, COLUMNS // 4)
            )
            _finish(
                part, first_row + row, column, rows, columns, bias_ptr, y_ptr, z_ptr, ACTIVATION
            )


@triton.jit
def _finish(total, row, column, rows, columns, bias_ptr, y_ptr, z_ptr, ACTIVATION: tl.constexpr):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    z = total + load_parameter(bias_ptr, column, columns, 0)[None, :]
    if z_ptr is not None:
        store(z_ptr, row[:, None], column[None, :], columns, z, inside)
    store(y_ptr, row[:, None], column[None, :], columns, activate(z, ACTIVATION), inside)


# A large tile, for the most products per byte; half of it, for two programs on a processor; a tile
# for fewer rows. The last serves elements whose loads would not fit the registers of larger tiles:
# those loaded one by one because rows are not a multiple of 16 bytes, and float32 without tensor
# cores. All three stages fit the shared memory of sm_80; warp-specialised tiles are for sm_90.
_LAST = Tile(64, 64, 32, 4, 3)
_TILES = {
    2: (
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 3),
        Tile(64, 128, 64, 4, 3),
        Tile(128, 256, 64, 8, 3, specialised=True),
        _LAST,
    ),
    4: (Tile(128, 128, 32, 8, 3), _LAST),
}


# The warp-specialised tile. Where its tiles fill the processors it serves without being timed: on
# an H200 it takes 1.00x to 1.03x the bare GEMM's time at (8192, 4096) x 16384, 1.02x to 1.23x at
# (8192, 1024) x 4096, where a GEMM and a pass take 1.09x and 1.35x.
BY_RULE = 3


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles, in the order of the numbers that `linear_act` takes."""
    return _TILES[dtype.itemsize]


def candidates(x: torch.Tensor, weight: torch.Tensor) -> list[int]:
    """The tiles that may be fastest for these factors, on their device."""
    every = tiles(x.dtype)
    (columns, inner), size = weight.shape, x.dtype.itemsize
    tensor_cores = size == 2 or precision() == "tf32"
    if not tensor_cores or inner * size % 16:
        return [every.index(_LAST)]
    specialised = (
        runs_specialised(x.device)
        and fits(x.reshape(-1, inner), _as_row_major(weight))
        and columns * size % 16 == 0
    )
    if specialised and _fills(x, columns, every[BY_RULE]):
        return [BY_RULE]  # others need not be compiled to be checked
    return [i for i, tile in enumerate(every[:-1]) if specialised or not tile.specialised]


def _fills(x: torch.Tensor, columns: int, tile: Tile) -> bool:
    """Whether every processor has a tile of the result."""
    tiles = triton.cdiv(x.shape[:-1].numel(), tile.rows) * triton.cdiv(columns, tile.columns)
    return tiles >= processors(x.device)


# Two products in one tile take the registers of one with twice the columns.
_GATED = _TILES[2][BY_RULE]._replace(columns=_TILES[2][BY_RULE].columns // 2)


def serves_gated(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> bool:
    """Whether `gated_linear` runs for these factors, and fills their device."""
    columns, inner = gate_weight.shape
    return (
        x.dtype.itemsize == 2
        and runs_specialised(x.device)
        and fits(x.reshape(-1, inner), gate_weight, up_weight)
        and columns * x.dtype.itemsize % 16 == 0
        and _fills(x, columns, _GATED)
    )


def _as_row_major(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.stride(1) == 1 else weight.t()


def precision() -> str:
    """How float32 products are computed: as torch's older or newer switch allows its GEMMs."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _factor(matrix: torch.Tensor) -> torch.Tensor:
    """A GEMM's factor, copied if it is not aligned or positions in a tile would not fit 32 bits."""
    if max(matrix.stride()) < _LONGEST_STRIDE:
        return aligned(matrix)
    if matrix.shape[1] >= _LONGEST_STRIDE:
        raise ValueError("rows of x and weight are too long")
    return matrix.contiguous()


_LONGEST_STRIDE = 2**22


def _linear_act_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    kind: str,
    tile: Tile,
    precision: str,
) -> Launch:
    (rows, inner), columns = x.shape, weight.shape[0]
    as_matrices = y.view(rows, columns), None if z is None else z.view(rows, columns)
    # A sum that is rounded before the bias is added may change the sign, where relu's slope jumps.
    keeps_sign = kind != "relu" or bias is None
    factors = x, _as_row_major(weight)
    if (
        tile.specialised
        and keeps_sign
        and runs_specialised(x.device)
        and fits(*factors, *as_matrices)
    ):
        return specialised_launch(x, weight, bias, *as_matrices, kind, tile)
    return launch(
        _linear_act,
        triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),
        *(x, weight, bias, y, z, rows, columns, inner, *x.stride(), *weight.stride()),
        ACTIVATION=kind,
        PRECISION=precision,
        INNER_FITS=inner % tile.inner == 0,
        BAND=8,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@replayed
def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    tile: int,
    save_z: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and z or nothing; `tile` is an index into `tiles(x.dtype)`."""
    columns, inner = weight.shape
    if x.shape[-1] != inner or (weight.dtype, weight.device) != (x.dtype, x.device):
        raise ValueError("a weight does not fit x")
    check_beside(x, (columns,), bias)
    if x.dtype is torch.float32:
        forbid_replay()  # torch's setting decides how exact its products are
    y = x.new_empty((*x.shape[:-1], columns))
    z = torch.empty_like(y) if save_z else None
    chosen = tiles(x.dtype)[tile]
    run(
        x,
        _linear_act_launch(
            _factor(x.reshape(x.shape[:-1].numel(), inner)),
            _factor(weight),
            *(contiguous(bias), y, z),
            _kind(activation, approximate),
            chosen,
            precision(),
        ),
    )
    return y, x.new_empty(0) if z is None else z


@replayed
def gated_linear(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: str,
    approximate: str,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """activation(x gate_weight^T) * x up_weight^T; both products too, or nothing."""
    if not serves_gated(x, gate_weight, up_weight):
        raise ValueError("these factors do not fit the kernel")
    columns, inner = gate_weight.shape
    y = x.new_empty((*x.shape[:-1], columns))
    saved = [torch.empty_like(y) if save else None for _ in range(2)]
    products = [None if t is None else t.view(-1, columns) for t in saved]
    kind = _kind(activation, approximate)
    matrices = x.reshape(-1, inner), gate_weight, None, y.view(-1, columns), products[0]
    run(x, specialised_launch(*matrices, kind, _GATED, up_weight, products[1]))
    return y, *(x.new_empty(0) if t is None else t for t in saved)


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""

    def case(
        dtype: torch.dtype, width: int, kind: str, tile: Tile, precision: str
    ) -> tuple[str, Launch]:
        x, y = (torch.empty(4096, width, dtype=dtype, device="meta") for _ in range(2))
        name = f"{kind} {precision} {width} {tile}"
        weight = x[:width]
        return name, _linear_act_launch(x, weight, weight[0], y, y, kind, tile, precision)

    for tile in tiles(torch.bfloat16):
        if tile != _LAST and not tile.specialised:
            yield case(torch.bfloat16, 4096, "gelu", tile, "ieee")
    yield case(torch.bfloat16, 4095, "gelu_tanh", _LAST, "ieee")
    yield case(torch.float32, 4096, "gelu", tiles(torch.float32)[0], "tf32")
    yield case(torch.float32, 4096, "gelu", _LAST, "ieee")
