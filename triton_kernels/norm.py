"""LayerNorm and RMSNorm in Triton; RMSNorm is CENTERED=False of the same kernels.

csrc/core/norm.h has the formulas. A unit below is rows x width elements, once over DRAM.

Forward, 2 units: x is read, y written; weight and bias come from L1 and L2.
    _forward holds whole rows in registers (width <= 16384), so the mean and then the squares of
    what is left after it are exact two-pass sums. 64 bytes of x a thread, in four 16-byte loads:
    at bf16 x 4096 a row is 128 threads of at most 64 registers, so eight rows (64 KiB) are in
    flight on a multiprocessor; an H200 needs about 30 KiB for 4.8 TB/s at 800 ns. Narrower rows
    share a program of 4096 elements.
    _forward_wide gives a row 1024 threads, one row a multiprocessor, and reads it twice: first for
    the statistics, then for y. A 128 KiB row (bf16 x 65536) lies in L1 by then, a larger one in L2.
    Every lane keeps its own mean and sum of squares (Welford), and the lanes are combined at the
    end (Chan): accurate as two passes are, without their third read and without a block-wide
    reduction an iteration, which would hold back the loads of the next.

Backward, 3 units and the partials: grad_y and x are read, grad_x written.
    _backward walks a chunk of rows a program, all programs resident at once (16 warps a
    multiprocessor at 128 registers are its whole register file). weight, and the sums for
    grad_weight and grad_bias, stay in registers: 16 columns a thread, hence width <= 8192. The
    next rows arrive in shared memory meanwhile (cp.async, STAGES), 32 KiB or more in flight.
    Each chunk writes its sums once, 8 bytes a column, see chunks.py. At bf16 32768 x 4096 that is
    264 chunks, 17 MB written and read beside 805 MB; at 4096 x 1024 4 MB beside 25 MB, which L2
    holds.

    Wider rows do not fit: neither the row nor its parameter sums. The same _backward then takes
    column tiles, and writes the tile's two sums of every row instead of grad_x, which _grad_x_wide
    computes once all are known. This reads grad_y and x again: 5 units, so at most 60% of the copy
    bandwidth counted at 3. To get below, a row must be spread over a cluster.

Nothing is tuned at run time: launch overhead is what decides at 4096 x 1024.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from .chunks import add_chunks_launches, chunk_range, partials_of, store_partial
from .launch import Launch, launch, processors, run
from .tensors import as_rows, contiguous, empty_like, gradient_of, or_empty


@triton.jit
def _load_parameter(ptr, column, width, absent: tl.constexpr):
    if ptr is None:
        return tl.full(column.shape, absent, tl.float32)
    else:
        value = tl.load(ptr + column, mask=column < width, other=0, eviction_policy="evict_last")
        return value.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    x_stride,
    eps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(
        x_ptr + row[:, None] * x_stride + column[None, :],
        mask=inside,
        other=0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = _load_parameter(weight_ptr, column, width, 1)
    bias = _load_parameter(bias_ptr, column, width, 0)
    y = x * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(
        y_ptr + row[:, None] * width + column[None, :],
        y.to(y_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _forward_wide(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    x_stride,
    eps,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lane_mean = tl.zeros([BLOCK], tl.float32)
    lane_squares = tl.zeros([BLOCK], tl.float32)
    seen = 0.0
    for start in tl.range(0, width, BLOCK, loop_unroll_factor=2):
        column = start + lane
        inside = column < width
        x = tl.load(
            x_ptr + row * x_stride + column, mask=inside, other=0, eviction_policy="evict_last"
        ).to(tl.float32)
        if CENTERED:
            seen += 1
            deviation = tl.where(inside, x - lane_mean, 0)
            lane_mean += deviation * (1 / seen)
            lane_squares += deviation * (x - lane_mean)
        else:
            lane_squares += x * x
    if CENTERED:
        lane_count = ((width - lane + BLOCK - 1) // BLOCK).to(tl.float32)
        mean = tl.sum(lane_mean * lane_count, 0) / width
        tl.store(mean_ptr + row, mean)
        lane_squares += lane_count * (lane_mean - mean) * (lane_mean - mean)
    else:
        mean = 0.0
    rstd = tl.rsqrt(tl.sum(lane_squares, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, width, BLOCK, loop_unroll_factor=2):
        column = start + lane
        inside = column < width
        x = tl.load(
            x_ptr + row * x_stride + column, mask=inside, other=0, eviction_policy="evict_first"
        ).to(tl.float32)
        weight = _load_parameter(weight_ptr, column, width, 1)
        bias = _load_parameter(bias_ptr, column, width, 0)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


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
    # Outside the tensor grad_y is 0, and so is what is summed: x_hat is finite there, unless the
    # row's own statistics are not.
    inside_rows = row < rows
    inside = inside_rows[:, None] & (column < width)[None, :]
    grad_y = tl.load(
        grad_y_ptr + row[:, None] * grad_y_stride + column[None, :], mask=inside, other=0
    ).to(tl.float32)
    x_hat = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0).to(
        tl.float32
    )
    if CENTERED:
        x_hat -= tl.load(mean_ptr + row, mask=inside_rows, other=0)[:, None]
    rstd = tl.load(rstd_ptr + row, mask=inside_rows, other=0)
    return grad_y, x_hat * rstd[:, None], rstd, inside


@triton.jit
def _grad_x(g, x_hat, rstd, sum_g, sum_g_x_hat, width, CENTERED: tl.constexpr):
    grad_x = g - x_hat * (sum_g_x_hat / width)[:, None]
    if CENTERED:
        grad_x -= (sum_g / width)[:, None]
    return grad_x * rstd[:, None]


@triton.jit(do_not_specialize=["rows", "chunks"])
def _backward(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
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
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    weight = _load_parameter(weight_ptr, column, width, 1)
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
            tl.store(
                grad_x_ptr + row[:, None] * width + column[None, :],
                grad_x.to(grad_x_ptr.dtype.element_ty),
                mask=inside,
            )
        else:
            sums_ptr = row_sums_ptr + row * 2 * column_tiles + column_tile
            if CENTERED:
                tl.store(sums_ptr, sum_g, mask=row < rows)
            tl.store(sums_ptr + column_tiles, sum_g_x_hat, mask=row < rows)
    there = column < width
    store_partial(weight_partials_ptr, chunk, column, width, there, weight_partial)
    store_partial(bias_partials_ptr, chunk, column, width, there, bias_partial)


@triton.jit
def _grad_x_wide(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    row_sums_ptr,
    width,
    grad_y_stride,
    x_stride,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED_BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
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
    g = grad_y * _load_parameter(weight_ptr, column, width, 1)[None, :]
    sums = tl.cdiv(width, SUMMED_BLOCK)
    summed = tl.arange(0, SUMS)[None, :]
    sums_ptr = row_sums_ptr + row[:, None] * 2 * sums + summed
    sum_g = tl.zeros([1], tl.float32)
    if CENTERED:
        sum_g = tl.sum(tl.load(sums_ptr, mask=summed < sums, other=0), 1)
    sum_g_x_hat = tl.sum(tl.load(sums_ptr + sums, mask=summed < sums, other=0), 1)
    grad_x = _grad_x(g, x_hat, rstd, sum_g, sum_g_x_hat, width, CENTERED)
    tl.store(
        grad_x_ptr + row[:, None] * width + column[None, :],
        grad_x.to(grad_x_ptr.dtype.element_ty),
        mask=inside,
    )


# The widest rows that registers hold without a spill; _backward_tile has those of the backward.
_WIDEST_FORWARD_ROW = 16384
# Columns a program, or an iteration of it, when rows are wider.
_WIDE_FORWARD_BLOCK = 8192
_WIDE_BACKWARD_BLOCK = 1024
_WIDE_GRAD_X_BLOCK = 4096


def _block(width: int) -> int:
    return triton.next_power_of_2(max(width, 1))


@functools.cache
def _forward_tile(width: int, itemsize: int) -> dict[str, int]:
    block = _block(width)
    rows = max(1, 4096 // block)
    threads = rows * block * itemsize // 64
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, threads // 32)}


@functools.cache
def _backward_tile(width: int, itemsize: int) -> dict[str, int]:
    block = _block(width)
    # Rows that Triton does not know to be aligned are loaded one element at a time, and the
    # addresses take registers too.
    columns_a_thread = 16 if width % 16 == 0 else 8
    if block > 512 * columns_a_thread:
        block = _WIDE_BACKWARD_BLOCK
    rows = max(1, 2048 // block)
    prefetched = 2 * rows * block * itemsize
    return {
        "ROWS": rows,
        "BLOCK": block,
        "STAGES": 3 if prefetched <= 32768 else 2,
        "num_warps": 16 if block > 256 * columns_a_thread else 8,
        # Left to itself, ptxas spills a few bytes below the number that is free.
        "maxnreg": 128,
    }


def _chunks(rows: int, width: int, tile: dict[str, int], multiprocessors: int) -> int:
    resident = multiprocessors * (16 // tile["num_warps"])
    column_tiles = triton.cdiv(width, tile["BLOCK"])
    if column_tiles > 1:
        # Several waves: a single one would seldom be full.
        resident = max(1, 4 * resident // column_tiles)
    return min(resident, triton.cdiv(rows, tile["ROWS"]))


def _forward_launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> Launch:
    rows, width = x.shape
    centered = mean is not None
    if width > _WIDEST_FORWARD_ROW:
        return launch(
            _forward_wide,
            rows,
            *(x, weight, bias, y, mean, rstd, width, x.stride(0), eps),
            CENTERED=centered,
            BLOCK=_WIDE_FORWARD_BLOCK,
            num_warps=32,
        )
    tile = _forward_tile(width, x.element_size())
    return launch(
        _forward,
        triton.cdiv(rows, tile["ROWS"]),
        *(x, weight, bias, y, mean, rstd, rows, width, x.stride(0), eps),
        CENTERED=centered,
        **tile,
    )


def _backward_launches(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> Iterator[Launch]:
    rows, width = x.shape
    centered = mean is not None
    tile = _backward_tile(width, x.element_size())
    column_tiles = triton.cdiv(width, tile["BLOCK"])
    chunks = _chunks(rows, width, tile, processors(x.device))

    gradients = (grad_weight, grad_bias)
    partials = partials_of(gradients, chunks, width)
    wide = column_tiles > 1
    row_sums = x.new_empty((rows, 2, column_tiles), dtype=torch.float32) if wide else None
    strides = (grad_y.stride(0), x.stride(0))
    yield launch(
        _backward,
        chunks * column_tiles,
        *(grad_y, x, weight, mean, rstd, None if wide else grad_x, row_sums),
        *(*partials, rows, width, *strides, chunks),
        CENTERED=centered,
        **tile,
    )
    if wide:
        yield launch(
            _grad_x_wide,
            rows * triton.cdiv(width, _WIDE_GRAD_X_BLOCK),
            *(grad_y, x, weight, mean, rstd, grad_x, row_sums, width, *strides),
            CENTERED=centered,
            BLOCK=_WIDE_GRAD_X_BLOCK,
            SUMMED_BLOCK=tile["BLOCK"],
            SUMS=triton.next_power_of_2(column_tiles),
            num_warps=16,
            maxnreg=64,
        )
    yield from add_chunks_launches(gradients, partials, chunks, width, wide=wide)


def _norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    leading = x.shape[: x.dim() - len(normalized_shape)]
    y = empty_like(x)
    rstd = torch.empty(leading, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centered else None
    weight, bias = contiguous(weight), contiguous(bias)
    matrix = as_rows(x, rstd.numel(), math.prod(normalized_shape))
    run(x, _forward_launch(matrix, weight, bias, y, mean, rstd, eps))
    return y, mean, rstd


def _norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> torch.Tensor:
    grad_x = empty_like(x)
    rows, width = rstd.numel(), math.prod(normalized_shape)
    grad_y, x = as_rows(grad_y, rows, width), as_rows(x, rows, width)
    weight, mean, rstd = contiguous(weight), contiguous(mean), rstd.contiguous()
    run(x, *_backward_launches(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias))
    return grad_x


# What the registry calls: the signatures are those of the ops' schemas.


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _norm(x, normalized_shape, weight, bias, eps, centered=True)


def layer_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_weight, grad_bias = gradient_of(weight, need_weight), gradient_of(bias, need_bias)
    grad_x = _norm_backward(grad_y, x, normalized_shape, weight, mean, rstd, grad_weight, grad_bias)
    return grad_x, or_empty(grad_weight, x), or_empty(grad_bias, x)


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Eager takes the epsilon of the type that it computes in.
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    y, _, rstd = _norm(x, normalized_shape, weight, None, eps, centered=False)
    return y, rstd


def rms_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
    rstd: torch.Tensor,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weight = gradient_of(weight, need_weight)
    grad_x = _norm_backward(grad_y, x, normalized_shape, weight, None, rstd, grad_weight, None)
    return grad_x, or_empty(grad_weight, x)


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Launches, each with a name, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    widths = (64, 1024, 4096, 8192, 65536, 131073)
    for centered, dtype, width in itertools.product((True, False), dtypes, widths):
        if dtype == torch.float16 and not centered:
            continue  # Nothing new: LayerNorm has its conversions, bfloat16 its shapes.
        x = torch.empty(32, width, dtype=dtype, device="meta")
        rstd = x.new_empty(32, dtype=torch.float32)
        weight, mean, bias = x[0], rstd if centered else None, x[0] if centered else None
        name = f"{'layer' if centered else 'rms'}_norm {str(dtype).removeprefix('torch.')} {width}"
        yield name, _forward_launch(x, weight, bias, x, mean, rstd, 1e-5)
        for step in _backward_launches(x, x, weight, mean, rstd, x, weight, bias):
            yield name, step
