"""Rows of LayerNorm and RMSNorm in Triton, shared by the plain and the residual norms.

csrc/cpu/norm.h is its counterpart on the CPU. norm.py has the argument for the shapes of the work.

RMSNorm is CENTERED=False. The ops differ in the functions LOAD and FINISH, which are constants.
`load`, `finish` and their like are tuples of these functions' other arguments.
"""

# ruff: noqa: N803, SIM300 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .chunks import add_chunks_launches, chunk_range, partials_of, store_partial
from .launch import Launch, launch, processors
from .tensors import are_aligned, check_beside, load, load_parameter, store


@triton.jit
def _statistics(x, inside, width, eps, CENTERED: tl.constexpr):
    """Mean and rstd of whole rows x, and x minus its mean; x is 0 outside of the tensor."""
    mean = tl.zeros([x.shape[0]], tl.float32)
    if CENTERED:
        mean = tl.sum(x, 1) / width
        x = tl.where(inside, x - mean[:, None], 0)
    return mean, tl.rsqrt(tl.sum(x * x, 1) / width + tl.cast(eps, tl.float32)), x


@triton.jit
def normalize(
    x,
    row,
    column,
    rows,
    width,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    CENTERED: tl.constexpr,
    SAVED: tl.constexpr = tl.float32,
):
    """Store y, and for the backward pass the statistics of x converted to SAVED."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    mean, rstd, centered = _statistics(x, inside, width, eps, CENTERED)
    weight = load_parameter(weight_ptr, column, width, 1)
    bias = load_parameter(bias_ptr, column, width, 0)
    y = centered * rstd[:, None] * weight[None, :] + bias[None, :]
    store(y_ptr, row[:, None], column[None, :], width, y, inside)
    if SAVED != tl.float32:
        mean, rstd, _ = _statistics(x.to(SAVED).to(tl.float32), inside, width, eps, CENTERED)
    if CENTERED:
        tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _add_to_lanes(x, lane_mean, lane_squares, seen, inside, CENTERED: tl.constexpr):
    """Update each lane's mean and sum of squares with one more element `seen` (Welford)."""
    if CENTERED:
        deviation = tl.where(inside, x - lane_mean, 0)
        lane_mean += deviation * (1 / seen)
        lane_squares += deviation * (x - lane_mean)
    else:
        lane_squares += x * x
    return lane_mean, lane_squares


@triton.jit
def _join_lanes(lane_mean, lane_squares, lane_count, width, eps, CENTERED: tl.constexpr):
    """Mean and rstd of a row, combined from its lanes."""
    mean = 0.0
    if CENTERED:
        mean = tl.sum(lane_mean * lane_count, 0) / width
        lane_squares += lane_count * (lane_mean - mean) * (lane_mean - mean)
    return mean, tl.rsqrt(tl.sum(lane_squares, 0) / width + tl.cast(eps, tl.float32))


@triton.jit
def normalize_wide(
    source,
    row,
    width,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    LOAD: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SAVED: tl.constexpr = tl.float32,
):
    """Store y and the statistics of one row, in two passes of BLOCK columns at a time.

    LOAD(source, row, start, width, AGAIN, BLOCK) returns the columns from start on, in either pass.
    """
    lane = tl.arange(0, BLOCK)
    lane_mean = tl.zeros([BLOCK], tl.float32)
    lane_squares = tl.zeros([BLOCK], tl.float32)
    if SAVED != tl.float32:
        saved_mean = tl.zeros([BLOCK], tl.float32)
        saved_squares = tl.zeros([BLOCK], tl.float32)
    seen = 0.0
    for start in tl.range(0, width, BLOCK, loop_unroll_factor=2):
        x = LOAD(source, row, start, width, False, BLOCK)
        inside = start + lane < width
        seen += 1
        lane_mean, lane_squares = _add_to_lanes(x, lane_mean, lane_squares, seen, inside, CENTERED)
        if SAVED != tl.float32:
            saved = x.to(SAVED).to(tl.float32)
            saved_mean, saved_squares = _add_to_lanes(
                saved, saved_mean, saved_squares, seen, inside, CENTERED
            )
    lane_count = ((width - lane + BLOCK - 1) // BLOCK).to(tl.float32)
    mean, rstd = _join_lanes(lane_mean, lane_squares, lane_count, width, eps, CENTERED)
    if SAVED != tl.float32:
        stored_mean, stored_rstd = _join_lanes(
            saved_mean, saved_squares, lane_count, width, eps, CENTERED
        )
    else:
        stored_mean, stored_rstd = mean, rstd
    if CENTERED:
        tl.store(mean_ptr + row, stored_mean)
    tl.store(rstd_ptr + row, stored_rstd)
    for start in tl.range(0, width, BLOCK, loop_unroll_factor=2):
        column = start + lane
        x = LOAD(source, row, start, width, True, BLOCK)
        weight = load_parameter(weight_ptr, column, width, 1)
        bias = load_parameter(bias_ptr, column, width, 0)
        y = (x - mean) * rstd * weight + bias
        store(y_ptr, row, column, width, y, column < width)


@triton.jit
def _load_grad_y_and_x_hat(
    grad_y_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    row,
    column,
    rows,
    width,
    grad_y_stride,
    x_stride,
    CENTERED: tl.constexpr,
):
    # Zeros outside the tensor: there mean times rstd may overflow.
    inside_rows = row < rows
    inside = inside_rows[:, None] & (column < width)[None, :]
    grad_y = load(grad_y_ptr, row[:, None], column[None, :], grad_y_stride, inside)
    x_hat = load(x_ptr, row[:, None], column[None, :], x_stride, inside)
    if CENTERED:
        x_hat -= tl.load(mean_ptr + row, mask=inside_rows, other=0)[:, None]
    rstd = tl.load(rstd_ptr + row, mask=inside_rows, other=0)
    return grad_y, tl.where(inside, x_hat * rstd[:, None], 0), rstd, inside


@triton.jit
def _grad_x(g, x_hat, rstd, sum_g, sum_g_x_hat, width, CENTERED: tl.constexpr):
    grad_x = g - x_hat * (sum_g_x_hat / width)[:, None]
    if CENTERED:
        grad_x -= (sum_g / width)[:, None]
    return grad_x * rstd[:, None]


@triton.jit
def differentiate(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row_sums_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    rows,
    width,
    grad_y_stride,
    x_stride,
    chunks,
    finish,
    FINISH: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk a chunk of rows for the gradients of the parameters and of the rows.

    FINISH(finish, grad_x, row, start, inside) stores the rows' gradients. If columns are in several
    tiles, `row_sums_ptr` gets the tile's sums of every row instead, for `differentiate_wide`.
    """
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    weight = load_parameter(weight_ptr, column, width, 1)
    weight_partial = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_partial = tl.zeros([ROWS, BLOCK], tl.float32)
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    for row_tile in tl.range(first, last, num_stages=STAGES, disable_licm=True):
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        grad_y, x_hat, rstd, inside = _load_grad_y_and_x_hat(
            grad_y_ptr,
            x_ptr,
            mean_ptr,
            rstd_ptr,
            row,
            column,
            rows,
            width,
            grad_y_stride,
            x_stride,
            CENTERED,
        )
        weight_partial += grad_y * x_hat
        bias_partial += grad_y
        g = grad_y * weight[None, :]
        sum_g = tl.sum(g, 1)
        sum_g_x_hat = tl.sum(g * x_hat, 1)
        if row_sums_ptr is None:
            grad_x = _grad_x(g, x_hat, rstd, sum_g, sum_g_x_hat, width, CENTERED)
            FINISH(finish, grad_x, row, column_tile * BLOCK, inside)
        else:
            sums_ptr = row_sums_ptr + row * 2 * column_tiles + column_tile
            if CENTERED:
                tl.store(sums_ptr, sum_g, mask=row < rows)
            tl.store(sums_ptr + column_tiles, sum_g_x_hat, mask=row < rows)
    there = column < width
    store_partial(weight_partials_ptr, chunk, column, width, there, weight_partial)
    store_partial(bias_partials_ptr, chunk, column, width, there, bias_partial)


@triton.jit
def differentiate_wide(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row_sums_ptr,
    width,
    grad_y_stride,
    x_stride,
    finish,
    FINISH: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED_BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The gradient of BLOCK columns of a row, once the sums of its tiles are known."""
    column_tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) + tl.arange(0, 1)
    start = tl.program_id(0) % column_tiles * BLOCK
    column = start + tl.arange(0, BLOCK)
    grad_y, x_hat, rstd, inside = _load_grad_y_and_x_hat(
        grad_y_ptr,
        x_ptr,
        mean_ptr,
        rstd_ptr,
        row,
        column,
        row + 1,
        width,
        grad_y_stride,
        x_stride,
        CENTERED,
    )
    g = grad_y * load_parameter(weight_ptr, column, width, 1)[None, :]
    sums = tl.cdiv(width, SUMMED_BLOCK)
    summed = tl.arange(0, SUMS)[None, :]
    sums_ptr = row_sums_ptr + row[:, None] * 2 * sums + summed
    sum_g = tl.zeros([1], tl.float32)
    if CENTERED:
        sum_g = tl.sum(tl.load(sums_ptr, mask=summed < sums, other=0), 1)
    sum_g_x_hat = tl.sum(tl.load(sums_ptr + sums, mask=summed < sums, other=0), 1)
    grad_x = _grad_x(g, x_hat, rstd, sum_g, sum_g_x_hat, width, CENTERED)
    FINISH(finish, grad_x, row, start, inside)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _sum_columns(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row_sums_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    rows,
    width,
    grad_y_stride,
    x_stride,
    chunks,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    tensors = (grad_y_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr)
    sums = (row_sums_ptr, weight_partials_ptr, bias_partials_ptr)
    sizes = (rows, width, grad_y_stride, x_stride, chunks)
    differentiate(*tensors, *sums, *sizes, None, None, CENTERED, ROWS, BLOCK, STAGES)


def check_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    *parameters: torch.Tensor | None,
    eps: float = 0,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse what the native bindings refuse too; y has x's dtype, or this one."""
    trailing = len(normalized_shape)
    if trailing == 0 or x.shape[max(0, x.dim() - trailing) :] != tuple(normalized_shape):
        raise ValueError("x does not end in normalized_shape")
    check_beside(x, normalized_shape, *parameters, dtype=dtype, narrow=True)
    if len({parameter.dtype for parameter in parameters if parameter is not None}) > 1:
        raise ValueError("weight and bias differ in dtype")
    if not eps >= 0:
        raise ValueError("eps is negative or NaN")


def statistics(
    x: torch.Tensor, normalized_shape: Sequence[int], centered: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Allocate the rows' rstd, and their mean if there is one."""
    leading = x.shape[: x.dim() - len(normalized_shape)]
    rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
    return torch.empty_like(rstd) if centered else None, rstd


def epsilon_of(eps: float | None) -> float:
    """The default eps of RMSNorm: as in eager, the epsilon of the type that it computes in."""
    return torch.finfo(torch.float32).eps if eps is None else eps


def check_statistics(
    x: torch.Tensor, normalized_shape: Sequence[int], *saved: torch.Tensor | None
) -> None:
    leading = x.shape[: x.dim() - len(normalized_shape)]
    check_beside(x, leading, *saved, dtype=torch.float32)


# Columns per program for rows wider than the registers hold.
_WIDE_BACKWARD_BLOCK = 1024
_WIDE_GRADIENT_BLOCK = 4096


@functools.cache
def forward_tile(width: int, columns_a_thread: int) -> dict[str, int]:
    """Options of a launch that holds whole rows in registers."""
    block = max(8, triton.next_power_of_2(width))  # dropout draws eight columns at a time
    rows = max(1, 4096 // block)
    return {
        "ROWS": rows,
        "BLOCK": block,
        "num_warps": min(16, rows * block // (32 * columns_a_thread)),
    }


@functools.cache
def _backward_tile(
    width: int, itemsize: int, columns_a_thread: int, aligned: bool, read: int
) -> dict[str, int]:
    block = max(8, triton.next_power_of_2(width))
    # Rows that Triton does not know to be aligned are loaded one element at a time, and the
    # addresses take registers too.
    if width % 16:
        columns_a_thread //= 2
    # In the widest rows, 32 warps leave a thread too few registers for a view's addresses.
    if block > (512 if aligned else 256) * columns_a_thread:
        block = _WIDE_BACKWARD_BLOCK
    rows = max(1, 2048 // block)
    prefetched = read * rows * block * itemsize
    return {
        "ROWS": rows,
        "BLOCK": block,
        "STAGES": 3 if prefetched <= 32768 else 2,
        "num_warps": 16 if block > 256 * columns_a_thread else 8,
        # Without a limit ptxas spills a few bytes although registers are free.
        "maxnreg": 128,
    }


def _chunks(rows: int, width: int, tile: dict[str, int], multiprocessors: int) -> int:
    resident = multiprocessors * (16 // tile["num_warps"])
    column_tiles = triton.cdiv(width, tile["BLOCK"])
    if column_tiles > 1:
        # Several waves of programs, since a single wave would seldom fill the GPU.
        resident = max(1, 4 * resident // column_tiles)
    return min(resident, triton.cdiv(rows, tile["ROWS"]))


def backward_launches(
    whole: Any,
    wide: Any,
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    finish: tuple[Any, ...],
    columns_a_thread: int = 16,
    read: int = 2,
) -> Iterator[Launch]:
    """Launches of the kernel `whole`, or `wide`, whose last arguments are `finish`.

    They read so many tensors of grad_y's shape.
    """
    rows, width = x.shape
    if not width:  # there is nothing to write, and a kernel would divide by its tiles of columns
        return
    itemsize = max(x.element_size(), grad_y.element_size())
    aligned = are_aligned(grad_y, x, weight, *finish)
    tile = _backward_tile(width, itemsize, columns_a_thread, aligned, read)
    column_tiles = triton.cdiv(width, tile["BLOCK"])
    chunks = _chunks(rows, width, tile, processors(x.device))
    gradients = (grad_weight, grad_bias)
    partials = partials_of(gradients, chunks, width)
    tensors = (grad_y, x, weight, mean, rstd)
    sizes = (rows, width, grad_y.stride(0), x.stride(0), chunks)
    centered = mean is not None
    if column_tiles <= 1:
        arguments = (*tensors, *partials, *sizes, *finish)
        fills = width % 16 == 0 and tile["num_warps"] == 16
        made = launch(whole, chunks, *arguments, CENTERED=centered, **tile)
        yield made._replace(spreads=not fills, aligned=fills)
    else:
        row_sums = x.new_empty((rows, 2, column_tiles), dtype=torch.float32)
        yield launch(
            _sum_columns,
            chunks * column_tiles,
            *(*tensors, row_sums, *partials, *sizes),
            CENTERED=centered,
            **tile,
        )
        yield launch(
            wide,
            rows * triton.cdiv(width, _WIDE_GRADIENT_BLOCK),
            *(*tensors, row_sums, *sizes[1:4], *finish),
            CENTERED=centered,
            BLOCK=_WIDE_GRADIENT_BLOCK,
            SUMMED_BLOCK=tile["BLOCK"],
            SUMS=triton.next_power_of_2(column_tiles),
            num_warps=16,
            maxnreg=64,
        )
    yield from add_chunks_launches(gradients, partials, chunks, width, wide=column_tiles > 1)
