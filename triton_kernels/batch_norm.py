"""normalize_act and the passes of batch_norm_act; csrc/core/batch_norm.h has the formulas.

They are written in Triton, not CUDA, for the same reasons as in act.py: element-wise passes over
tiles, with its activations.

A unit below is rows x width elements, once over DRAM.

normalize_act, 2 units: a program walks a chunk of rows in one tile of columns, whose values it
    loads once; the next rows arrive in shared memory meanwhile.
column_statistics, 1 unit: a program walks a chunk of rows in one tile of columns. Each lane keeps a
    running mean and sum of squares (Welford), and lanes are combined at the end (Chan). This is as
    accurate as two passes, without reading x again and without a reduction an iteration. A chunk
    writes 8 bytes a column once. Chunks are combined in a fixed order, relative to the first one's
    mean: no atomics, the same bits every run. At bf16 8192 x 16384 on 132 processors that is 24
    chunks of 342 rows: 3.1 MB for 268 MB.
normalize_act_backward, 3 units, or 2 if grad_x is left to a later pass: a chunk of rows a program,
    both column sums in registers. batch_norm_act_grad_x, 3 units: the same walk.

In training that is 3 units forward and 5 backward. Doing better would need a GEMM that computes the
sums in its epilogue: its tile holds the columns of 128 rows, but the variance would be taken about
a shift, not about the mean. An element takes about 25 operations of float32 in each pass, as in
act.py: half of an H200's rate keeps up with the bytes of bf16.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .act import KINDS, _kind, _tile_of, activate, activation_gradient
from .approximate import reciprocal
from .chunks import (
    add_chunks_launches,
    chunk_range,
    chunks_of,
    partials_of,
    store_partial,
)
from .launch import Launch, launch, replayed, run
from .tensors import (
    check_like,
    contiguous,
    empty_like,
    gradient_of,
    load,
    load_parameter,
    or_empty,
    rows_of,
    store,
)


@triton.jit
def _load_columns(mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, width):
    """Mean, rstd, weight and bias of each column, as one row."""
    mean = load_parameter(mean_ptr, column, width, 0)[None, :]
    rstd = tl.rsqrt(load_parameter(var_ptr, column, width, 0) + tl.cast(eps, tl.float32))[None, :]
    weight = load_parameter(weight_ptr, column, width, 1)[None, :]
    return mean, rstd, weight, load_parameter(bias_ptr, column, width, 0)[None, :]


@triton.jit(do_not_specialize=["rows", "chunks"])
def _normalize_act(
    x_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    width,
    x_stride,
    chunks,
    eps,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    mean, rstd, weight, bias = _load_columns(
        mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, width
    )
    scale = rstd * weight
    first, last = chunk_range(tl.program_id(0) // column_tiles, rows, chunks, ROWS)
    for row_tile in tl.range(first, last, num_stages=STAGES):
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)[None, :]
        z = (load(x_ptr, row, column[None, :], x_stride, inside) - mean) * scale + bias
        store(y_ptr, row, column[None, :], width, activate(z, ACTIVATION), inside)


@triton.jit
def _differentiate_rows(
    tensors,
    strides,
    row_tile,
    rows,
    column,
    columns,
    means,
    sums,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write the gradient of a tile of rows, which may end within it if MASKED, and add to the sums.

    Columns outside the tensor may have NaN in their sums, which nobody reads.
    """
    grad_y_ptr, x_ptr, grad_x_ptr = tensors
    grad_y_stride, x_stride, width = strides
    mean, rstd, weight, bias = columns
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (column < width)[None, :] & (row >= 0)
    if MASKED:
        inside = inside & (row < rows)
    grad_y = load(grad_y_ptr, row, column[None, :], grad_y_stride, inside)
    x = load(x_ptr, row, column[None, :], x_stride, inside)
    x_hat = (x - mean) * rstd
    g = activation_gradient(x_hat * weight + bias, grad_y, ACTIVATION)
    g_x_hat = g * x_hat
    if MASKED:
        # Outside the tensor grad_y is 0, but the derivative may be NaN.
        g, g_x_hat = tl.where(inside, g, 0), tl.where(inside, g_x_hat, 0)
    if grad_x_ptr is not None:
        # Given statistics have no gradient; a zero times x_hat would make NaN of infinity.
        grad_x = g
        if means[0] is not None:
            grad_x = g - means[0] - x_hat * means[1]
        store(grad_x_ptr, row, column[None, :], width, grad_x * (weight * rstd), inside)
    return sums[0] + g_x_hat, sums[1] + g


@triton.jit(do_not_specialize=["rows", "chunks"])
def _normalize_act_backward(
    grad_y_ptr,
    x_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    mean_g_ptr,
    mean_g_x_hat_ptr,
    grad_x_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    rows,
    width,
    grad_y_stride,
    x_stride,
    chunks,
    eps,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    means = (None, None)
    if mean_g_ptr is not None:
        mean_g = load_parameter(mean_g_ptr, column, width, 0)[None, :]
        means = (mean_g, load_parameter(mean_g_x_hat_ptr, column, width, 0)[None, :])
    columns = _load_columns(mean_ptr, var_ptr, weight_ptr, bias_ptr, eps, column, width)
    zero = tl.zeros([ROWS, BLOCK], tl.float32)
    weight_partial, bias_partial = zero, zero
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    tensors, strides = (grad_y_ptr, x_ptr, grad_x_ptr), (grad_y_stride, x_stride, width)
    whole = tl.minimum(last, rows // ROWS)
    for row_tile in tl.range(first, whole, num_stages=STAGES):
        at = (tensors, strides, row_tile, rows, column, columns, means)
        weight_partial, bias_partial = _differentiate_rows(
            *at, (weight_partial, bias_partial), ACTIVATION, ROWS, False
        )
    if whole < last:
        at = (tensors, strides, whole, rows, column, columns, means)
        weight_partial, bias_partial = _differentiate_rows(
            *at, (weight_partial, bias_partial), ACTIVATION, ROWS, True
        )
    there = column < width
    store_partial(weight_partials_ptr, chunk, column, width, there, weight_partial)
    store_partial(bias_partials_ptr, chunk, column, width, there, bias_partial)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _column_statistics(
    x_ptr,
    means_ptr,
    squares_ptr,
    rows,
    width,
    x_stride,
    chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    lane_mean = tl.zeros([ROWS, BLOCK], tl.float32)
    lane_squares = tl.zeros([ROWS, BLOCK], tl.float32)
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    whole = tl.minimum(last, rows // ROWS)
    for row_tile in tl.range(first, whole, num_stages=STAGES):
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        x = load(x_ptr, row, column[None, :], x_stride, (column < width)[None, :] & (row >= 0))
        deviation = x - lane_mean
        lane_mean += deviation * reciprocal((row_tile - first + 1).to(tl.float32))
        lane_squares += deviation * (x - lane_mean)
    if whole < last:
        row = (whole * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)[None, :]
        x = load(x_ptr, row, column[None, :], x_stride, inside)
        deviation = tl.where(inside, x - lane_mean, 0)
        lane_mean += deviation * (1 / (whole - first + 1))
        lane_squares += deviation * tl.where(inside, x - lane_mean, 0)
    # Only the very last tile may lack rows.
    lacking = (last - 1) * ROWS + tl.arange(0, ROWS) >= rows
    count = ((last - first) - lacking.to(tl.int32)).to(tl.float32)[:, None]
    mean = tl.sum(lane_mean * count, 0) / tl.maximum(tl.sum(count, 0), 1)
    off = lane_mean - mean[None, :]
    partial = chunk.to(tl.int64) * width + column
    tl.store(means_ptr + partial, mean, mask=column < width)
    squares = tl.sum(lane_squares + count * off * off, 0)
    tl.store(squares_ptr + partial, squares, mask=column < width)


@triton.jit
def _load_chunks(ptr, start, column, chunks, rows, width, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    # The values of several chunks, and the number of rows in each.
    chunk = start + tl.arange(0, CHUNKS)
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    count = (tl.minimum(last * ROWS, rows) - first * ROWS).to(tl.float32)
    inside = (chunk < chunks)[:, None] & (column < width)[None, :]
    at = chunk.to(tl.int64)[:, None] * width + column[None, :]
    return tl.load(ptr + at, mask=inside, other=0), count[:, None], inside


@triton.jit(do_not_specialize=["rows", "chunks"])
def _statistics_of_chunks(
    mean_ptr,
    var_ptr,
    means_ptr,
    squares_ptr,
    rows,
    chunks,
    width,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(means_ptr + column, mask=column < width, other=0)
    total = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for start in tl.range(0, chunks, CHUNKS):
        means, count, inside = _load_chunks(
            means_ptr, start, column, chunks, rows, width, ROWS, CHUNKS
        )
        total += tl.where(inside, (means - base[None, :]) * count, 0)
    whole = tl.maximum(rows, 1).to(tl.float32)
    mean = base + tl.sum(total, 0) / whole
    total = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for start in tl.range(0, chunks, CHUNKS):
        means, count, inside = _load_chunks(
            means_ptr, start, column, chunks, rows, width, ROWS, CHUNKS
        )
        squares, _, _ = _load_chunks(squares_ptr, start, column, chunks, rows, width, ROWS, CHUNKS)
        off = means - mean[None, :]
        total += tl.where(inside, squares + off * off * count, 0)
    tl.store(mean_ptr + column, mean, mask=column < width)
    tl.store(var_ptr + column, tl.sum(total, 0) / whole, mask=column < width)


# Programs a processor: 32 of normalize_act. Of the statistics six, which fit: one wave, with 48 KB
# of rows on their way.
_PASSING, _FITTING = 32, 6


def _walked_tile(width: int) -> dict[str, int]:
    """A tile of 1024 elements: with two sums each, twice as many do not fit the registers."""
    tile = _tile_of(width)
    return {**tile, "ROWS": tile["ROWS"] // 2}


def _chunks(x: torch.Tensor, tile: dict[str, int], programs: int = 16) -> tuple[int, int]:
    """Chunks of rows, and their tiles of columns, for so many programs a processor."""
    row_tiles, column_tiles = triton.cdiv(x.shape[0], tile["ROWS"]), -(-x.shape[1] // tile["BLOCK"])
    return chunks_of(row_tiles, column_tiles, x.device, programs), column_tiles


def _normalize_act_launch(
    x: torch.Tensor,
    columns: tuple[torch.Tensor | None, ...],
    eps: float,
    y: torch.Tensor,
    kind: str,
) -> Launch:
    tile = _tile_of(x.shape[1])
    chunks, column_tiles = _chunks(x, tile, _PASSING)
    return launch(
        _normalize_act,
        chunks * column_tiles,
        *(x, *columns, y, *x.shape, x.stride(0), chunks, eps),
        ACTIVATION=kind,
        STAGES=3,
        **tile,
    )


def _backward_launches(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    columns: tuple[torch.Tensor | None, ...],
    eps: float,
    means: tuple[torch.Tensor | None, ...],
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    kind: str,
) -> Iterator[Launch]:
    width = x.shape[1]
    tile = _walked_tile(width)
    chunks, column_tiles = _chunks(x, tile)
    sums = (grad_weight, grad_bias)
    partials = partials_of(sums, chunks, width)
    yield launch(
        _normalize_act_backward,
        chunks * column_tiles,
        *(grad_y, x, *columns, *means, grad_x, *partials, *x.shape),
        *(grad_y.stride(0), x.stride(0), chunks, eps),
        ACTIVATION=kind,
        STAGES=4,
        maxnreg=128,
        **tile,
    )
    yield from add_chunks_launches(sums, partials, chunks, width)


def _statistics_launches(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> Iterator[Launch]:
    tile = _tile_of(x.shape[1])
    chunks, column_tiles = _chunks(x, tile, _FITTING)
    partials = [_floats(x, chunks, x.shape[1]) for _ in range(2)]
    yield launch(
        _column_statistics,
        chunks * column_tiles,
        *(x, *partials, *x.shape, x.stride(0), chunks),
        STAGES=7,
        maxnreg=128,
        **tile,
    )
    yield launch(
        _statistics_of_chunks,
        triton.cdiv(x.shape[1], 32),
        *(mean, var, *partials, x.shape[0], chunks, x.shape[1]),
        ROWS=tile["ROWS"],
        CHUNKS=32,
        BLOCK=32,
        num_warps=4,
        maxnreg=64,
    )


def _floats(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _columns(x: torch.Tensor, *columns: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Check and pack tensors: a kernel would read past the end of a smaller one."""
    if any(c is not None and (c.shape != x.shape[-1:] or c.device != x.device) for c in columns):
        raise ValueError("mean, var, weight or bias does not fit x")
    return tuple([contiguous(c) for c in columns])


# --- Called by the registry, with the signatures of the ops' schemas ---


@replayed
def normalize_act(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    columns, y = _columns(x, mean, var, weight, bias), empty_like(x)
    run(x, _normalize_act_launch(rows_of(x), columns, eps, y, _kind(activation, approximate)))
    return y


@replayed
def normalize_act_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    approximate: str,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_like(x, grad_y)
    columns = _columns(x, mean, var, weight, bias)
    grad_x = empty_like(x) if need_x else None
    sums = gradient_of(weight, need_weight), gradient_of(bias, need_bias)
    matrices, kind = (rows_of(grad_y), rows_of(x)), _kind(activation, approximate)
    run(x, *_backward_launches(*matrices, columns, eps, (None, None), grad_x, *sums, kind))
    return or_empty(grad_x, x), or_empty(sums[0], x), or_empty(sums[1], x)


@replayed
def batch_norm_act_grad_x(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean_g: torch.Tensor,
    mean_g_x_hat: torch.Tensor,
    eps: float,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    check_like(x, grad_y)
    columns, grad_x = _columns(x, mean, var, weight, bias), empty_like(x)
    means = _columns(x, mean_g, mean_g_x_hat)
    matrices, kind = (rows_of(grad_y), rows_of(x)), _kind(activation, approximate)
    run(x, *_backward_launches(*matrices, columns, eps, means, grad_x, None, None, kind))
    return grad_x


@replayed
def column_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, var = _floats(x, x.shape[-1]), _floats(x, x.shape[-1])
    run(x, *_statistics_launches(rows_of(x), mean, var))
    return mean, var


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, kind, width in itertools.product(dtypes, KINDS, (4096, 131073)):
        if kind != "gelu" and (dtype == torch.float32 or width != 4096):
            continue  # the functions do not depend on dtype and width
        x = torch.empty(4096, width, dtype=dtype, device="meta")
        own = x.new_empty(width, dtype=torch.float32)
        columns = (own, own, x[0], x[0])
        name = f"{kind} {str(dtype).removeprefix('torch.')} {width}"
        yield name, _normalize_act_launch(x, columns, 1e-5, x, kind)
        for step in _backward_launches(x, x, columns, 1e-5, (None, None), x, x[0], x[0], kind):
            yield name, step
        yield name, next(_backward_launches(x, x, columns, 1e-5, (own, own), x, None, None, kind))
        if kind == "gelu":
            for step in _statistics_launches(x, own, own):
                yield name, step
