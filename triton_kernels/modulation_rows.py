"""The kernels of adaptive norms and gated residuals; modulation.py has their launches, and why."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import _add_up, chunk_range, store_partial
from .norm_rows import _statistics
from .tensors import load, store


@triton.jit
def _modulation(ptr, row, column, stride, inside):
    """Rows of a modulation in float32, or zeros if there is none."""
    if ptr is None:
        return tl.zeros(inside.shape, tl.float32)
    else:
        at = ptr + row * stride + column
        return tl.load(at, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _stream(x_ptr, branch_ptr, gate_ptr, row, column, of, sizes, inside):
    """z of a tile; `of` are the rows of its modulations."""
    x_stride, branch_stride, gate_stride = sizes
    z = load(x_ptr, row, column, x_stride, inside)
    if branch_ptr is not None:
        gate = _modulation(gate_ptr, of, column, gate_stride, inside)
        z += gate * load(branch_ptr, row, column, branch_stride, inside)
    return z


@triton.jit
def _modulate(x_hat, scale_ptr, shift_ptr, of, column, sizes, inside):
    scale_stride, shift_stride = sizes
    scale = _modulation(scale_ptr, of, column, scale_stride, inside)
    shift = _modulation(shift_ptr, of, column, shift_stride, inside)
    return x_hat * (1 + scale) + shift


@triton.jit(do_not_specialize=["rows", "period"])
def _forward(
    x_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    z_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    period,
    width,
    x_stride,
    branch_stride,
    gate_stride,
    scale_stride,
    shift_stride,
    eps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, column, of = at[:, None], tl.arange(0, BLOCK)[None, :], (at // period)[:, None]
    inside = (row < rows) & (column < width)
    sizes = (x_stride, branch_stride, gate_stride)
    z = _stream(x_ptr, branch_ptr, gate_ptr, row, column, of, sizes, inside)
    mean, rstd, centered = _statistics(z, inside, width, eps, CENTERED)
    x_hat = centered * rstd[:, None]
    strides = (scale_stride, shift_stride)
    y = _modulate(x_hat, scale_ptr, shift_ptr, of, column, strides, inside)
    store(y_ptr, row, column, width, y, inside)
    if z_ptr is not None:
        store(z_ptr, row, column, width, z, inside)
        if z_ptr.dtype.element_ty != tl.float32:
            saved = z.to(z_ptr.dtype.element_ty).to(tl.float32)
            mean, rstd, _ = _statistics(saved, inside, width, eps, CENTERED)
    if CENTERED:
        tl.store(mean_ptr + at, mean, mask=at < rows)
    tl.store(rstd_ptr + at, rstd, mask=at < rows)


@triton.jit(do_not_specialize=["period"])
def _forward_wide(
    x_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    z_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    period,
    width,
    x_stride,
    branch_stride,
    gate_stride,
    scale_stride,
    shift_stride,
    eps,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of, lane = row // period, tl.arange(0, BLOCK)
    sizes = (x_stride, branch_stride, gate_stride)
    tensors = (x_ptr, branch_ptr, gate_ptr, row)
    SAVED: tl.constexpr = x_ptr.dtype.element_ty if z_ptr is None else z_ptr.dtype.element_ty
    mean, saved_mean = 0.0, 0.0
    if CENTERED:
        sums = tl.zeros([BLOCK], tl.float32)
        saved_sums = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, width, BLOCK):
            z = _stream(*tensors, start + lane, of, sizes, start + lane < width)
            sums += z
            saved_sums += z.to(SAVED).to(tl.float32)
        mean, saved_mean = tl.sum(sums, 0) / width, tl.sum(saved_sums, 0) / width
    squares = tl.zeros([BLOCK], tl.float32)
    saved_squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        inside = start + lane < width
        z = _stream(*tensors, start + lane, of, sizes, inside)
        centered = tl.where(inside, z - mean, 0)
        squares += centered * centered
        centered = tl.where(inside, z.to(SAVED).to(tl.float32) - saved_mean, 0)
        saved_squares += centered * centered
    eps = tl.cast(eps, tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    if CENTERED:
        tl.store(mean_ptr + row, saved_mean)
    tl.store(rstd_ptr + row, tl.rsqrt(tl.sum(saved_squares, 0) / width + eps))
    for start in tl.range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        z = _stream(*tensors, column, of, sizes, inside)
        strides = (scale_stride, shift_stride)
        y = _modulate((z - mean) * rstd, scale_ptr, shift_ptr, of, column, strides, inside)
        store(y_ptr, row, column, width, y, inside)
        if z_ptr is not None:
            store(z_ptr, row, column, width, z, inside)


@triton.jit(do_not_specialize=["rows", "period"])
def _add(
    x_ptr,
    branch_ptr,
    gate_ptr,
    z_ptr,
    rows,
    period,
    width,
    x_stride,
    branch_stride,
    gate_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    at = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    row, inside = at[:, None], (at < rows)[:, None] & (column < width)
    sizes = (x_stride, branch_stride, gate_stride)
    of = (at // period)[:, None]
    z = _stream(x_ptr, branch_ptr, gate_ptr, row, column, of, sizes, inside)
    store(z_ptr, row, column, width, z, inside)


@triton.jit
def _load_normed(
    grad_y_ptr, z_ptr, mean_ptr, rstd_ptr, row, column, strides, inside, CENTERED: tl.constexpr
):
    """grad_y, z_hat and rstd; zeros outside of the tensor, where mean times rstd may overflow."""
    grad_y = load(grad_y_ptr, row[:, None], column[None, :], strides[0], inside)
    z_hat = load(z_ptr, row[:, None], column[None, :], strides[1], inside)
    if CENTERED:
        z_hat -= tl.load(mean_ptr + row)[:, None]
    rstd = tl.load(rstd_ptr + row)
    return grad_y, tl.where(inside, z_hat * rstd[:, None], 0), rstd


@triton.jit(do_not_specialize=["period"])
def _sum_rows(
    grad_y_ptr,
    z_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    period,
    width,
    grad_y_stride,
    z_stride,
    scale_stride,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each wide row the sums of g and of g * z_hat."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    sum_g = tl.zeros([1, BLOCK], tl.float32)
    sum_g_z_hat = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < width)[None, :]
        grad_y, z_hat, _ = _load_normed(
            *(grad_y_ptr, z_ptr, mean_ptr, rstd_ptr, row, column),
            *((grad_y_stride, z_stride), inside, CENTERED),
        )
        of = (row // period)[:, None]
        g = grad_y * (1 + _modulation(scale_ptr, of, column[None, :], scale_stride, inside))
        sum_g += g
        sum_g_z_hat += g * z_hat
    tl.store(sums_ptr + 2 * row, tl.sum(sum_g, 1))
    tl.store(sums_ptr + 2 * row + 1, tl.sum(sum_g_z_hat, 1))


@triton.jit(do_not_specialize=["period", "chunks"])
def _backward(
    grad_z_ptr,
    grad_y_ptr,
    z_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    grad_x_ptr,
    grad_branch_ptr,
    gate_sums_ptr,
    scale_sums_ptr,
    shift_sums_ptr,
    period,
    chunks,
    width,
    grad_z_stride,
    grad_y_stride,
    z_stride,
    branch_stride,
    gate_stride,
    scale_stride,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Walk a chunk of the rows of one modulation.

    Without grad_y there is no norm. `sums_ptr` has the sums of whole rows, if they are in several
    tiles.
    """
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    of, there = (chunk // chunks).to(tl.int64), column < width
    gate = _modulation(gate_ptr, of, column, gate_stride, there)[None, :]
    weight = 1 + _modulation(scale_ptr, of, column, scale_stride, there)[None, :]
    gate_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    scale_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    shift_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    first, last = chunk_range(chunk % chunks, period, chunks, ROWS)
    for tile in tl.range(first, last, num_stages=STAGES, disable_licm=True):
        inner = tile * ROWS + tl.arange(0, ROWS)
        # The last tile may end after the modulation's rows. Loads of a number a row stay inside.
        row = of * period + tl.minimum(inner, period - 1)
        inside = (inner < period)[:, None] & there[None, :]
        at = (row[:, None], column[None, :])
        grad = tl.zeros([ROWS, BLOCK], tl.float32)
        if grad_y_ptr is not None:
            grad_y, z_hat, rstd = _load_normed(
                *(grad_y_ptr, z_ptr, mean_ptr, rstd_ptr, row, column),
                *((grad_y_stride, z_stride), inside, CENTERED),
            )
            scale_sum += grad_y * z_hat
            shift_sum += grad_y
            g = grad_y * weight
            if sums_ptr is None:
                sum_g_z_hat = tl.sum(g * z_hat, 1)
            else:
                sum_g_z_hat = tl.load(sums_ptr + 2 * row + 1)
            grad = g - z_hat * (sum_g_z_hat / width)[:, None]
            if CENTERED:
                sum_g = tl.sum(g, 1) if sums_ptr is None else tl.load(sums_ptr + 2 * row)
                grad -= (sum_g / width)[:, None]
            grad *= rstd[:, None]
        if grad_z_ptr is not None:
            grad += load(grad_z_ptr, *at, grad_z_stride, inside)
        if grad_x_ptr is not None:
            store(grad_x_ptr, *at, width, grad, inside)
        if gate_sums_ptr is not None:
            branch = load(branch_ptr, *at, branch_stride, inside)
            gate_sum += tl.where(inside, grad, 0) * branch
        if grad_branch_ptr is not None:
            store(grad_branch_ptr, *at, width, grad * gate, inside)
    store_partial(gate_sums_ptr, chunk, column, width, there, gate_sum)
    store_partial(scale_sums_ptr, chunk, column, width, there, scale_sum)
    store_partial(shift_sums_ptr, chunk, column, width, there, shift_sum)


@triton.jit(do_not_specialize=["chunks"])
def _add_chunks(
    grad_gate_ptr,
    grad_scale_ptr,
    grad_shift_ptr,
    gate_sums_ptr,
    scale_sums_ptr,
    shift_sums_ptr,
    chunks,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the chunks of each modulation."""
    column_tiles = tl.cdiv(width, BLOCK)
    of = (tl.program_id(0) // column_tiles).to(tl.int64) * width
    column = tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK)
    here = of * chunks
    if grad_gate_ptr is not None:
        sums_ptr = gate_sums_ptr + here
        _add_up(grad_gate_ptr + of, sums_ptr, chunks, column, width, CHUNKS, BLOCK)
    if grad_scale_ptr is not None:
        sums_ptr = scale_sums_ptr + here
        _add_up(grad_scale_ptr + of, sums_ptr, chunks, column, width, CHUNKS, BLOCK)
    if grad_shift_ptr is not None:
        sums_ptr = shift_sums_ptr + here
        _add_up(grad_shift_ptr + of, sums_ptr, chunks, column, width, CHUNKS, BLOCK)
