"""The backward pass of attention over a layout's blocks; block_sparse_attention.py explains it."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .block_lists import add_up, row_walks
from .parts import (
    LOG2_E,
    UNSPECIALIZED,
    finite,
    head_rows,
    kept_factors,
    logits,
    next_keys,
    own_rows,
    slope_of,
    store_own_rows,
    weights_of,
)


@triton.jit(do_not_specialize=["queries", "heads", "rows"])
def attention_deltas(
    delta_ptr,
    base_ptr,
    y_ptr,
    grad_y_ptr,
    lse_ptr,
    grad_lse_ptr,
    rows,
    heads,
    queries,
    width,
    grad_batch_stride,
    grad_head_stride,
    grad_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The inner products of grad_y and y, less grad_lse, of rows of all heads.

    Also the base of their exponentials: the log-sum-exp in units of log 2, or 0 of a row that sees
    nothing. Programs would otherwise compute it for every pair of a row and a tile of keys.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    plane, query = row // queries, row % queries
    inside = row < rows
    column = tl.arange(0, WIDTH)
    present = inside[:, None] & (column < width)[None, :]
    at = plane // heads * grad_batch_stride + plane % heads * grad_head_stride + query * grad_stride
    y = tl.load(y_ptr + row[:, None] * width + column[None, :], mask=present, other=0)
    grad = tl.load(grad_y_ptr + at[:, None] + column[None, :], mask=present, other=0)
    delta = tl.sum(y.to(tl.float32) * grad.to(tl.float32), 1)
    if grad_lse_ptr is not None:
        delta -= tl.load(grad_lse_ptr + row, mask=inside, other=0)
    tl.store(delta_ptr + row, delta, mask=inside)
    base = finite(tl.load(lse_ptr + row, mask=inside, other=0)) * LOG2_E
    tl.store(base_ptr + row, base, mask=inside)


@triton.jit
def differentiate(
    walk, start, partner, q, grad_y, base, delta, query, sources, masking, scoring, dropout,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
    DEEP: tl.constexpr, DEEP_FITS: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores of the next keys, before and after the softcap, and the keys."""
    k_ptr, k_stride, v_ptr, v_stride, width, deep = sources
    masks_ptr, padding_ptr, keys, shift = masking
    key, inside, seen = next_keys(
        walk, start, partner, masks_ptr, padding_ptr, query, keys, shift, CAUSAL, COLUMNS, BLOCK,
        CHECKED,
    )  # fmt: skip
    k = head_rows(k_ptr, key, k_stride, inside, width, WIDTH, FITS)
    v = head_rows(v_ptr, key, v_stride, inside, deep, DEEP, DEEP_FITS)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_weight = tl.dot(grad_y, tl.trans(v), input_precision=PRECISION)
    z, capped = logits(product, query[:, None], key[None, :], shift, seen, scoring, SOFTCAP)
    kept = 1.0
    if dropout[0] is not None:
        kept = kept_factors(walk, start, partner, dropout, COLUMNS, BLOCK, CHECKED)
    after = weights_of(z - base[:, None]) * (grad_weight * kept - delta[:, None])
    before = after
    if SOFTCAP:
        before *= 1 - capped * capped
    return before, after, k, key, inside


@triton.jit
def _add_dq(
    walk, start, partner, sums, q, grad_y, base, delta, query, sources, masking, scoring, dropout,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
    DEEP: tl.constexpr, DEEP_FITS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the next keys."""
    grad, _, k, _, _ = differentiate(
        walk, start, partner, q, grad_y, base, delta, query, sources, masking, scoring, dropout,
        COLUMNS, BLOCK, CHECKED, SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS,
    )  # fmt: skip
    return tl.dot(grad.to(k.dtype), k, sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_dq(
    grad_q_ptr,
    grad_y_ptr,
    base_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scale,
    lines_ptr,
    entries_ptr,
    masks_ptr,
    padding_ptr,
    slopes_ptr,
    bias_ptr,
    seed_ptr,
    planes,
    heads,
    group,
    first_head,
    queries,
    keys,
    width,
    deep,
    q_batch_stride,
    q_head_stride,
    q_stride,
    k_batch_stride,
    k_head_stride,
    k_stride,
    v_batch_stride,
    v_head_stride,
    v_stride,
    grad_batch_stride,
    grad_head_stride,
    grad_stride,
    lines,
    lines_batch_stride,
    lines_head_stride,
    slopes_batch_stride,
    slopes_head_stride,
    apart,
    bias_batch_stride,
    bias_head_stride,
    bias_stride,
    bias_row,
    inner,
    outer,
    threshold,
    kept_scale,
    first_group,
    first_number,
    number_batch_stride,
    number_head_stride,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    FITS: tl.constexpr,
    DEEP: tl.constexpr,
    DEEP_FITS: tl.constexpr,
):
    SPLIT: tl.constexpr = BLOCK // ROWS
    plane, tile = tl.program_id(0) % planes, tl.program_id(0) // planes
    batch, head = (plane // heads).to(tl.int64), plane % heads
    key_head = ((head + first_head) // group).to(tl.int64)
    if lines_ptr is not None:
        lines_ptr += 4 * (batch * lines_batch_stride + head * lines_head_stride)
    lists = (lines_ptr, entries_ptr, lines)
    first, unchecked, checked = row_walks(
        lists, tile // SPLIT, tile % SPLIT * ROWS, queries, keys, ROWS, COLUMNS, BLOCK, CAUSAL
    )
    query = first + tl.arange(0, ROWS)
    present = query < queries
    wide_head, first_row, here = head.to(tl.int64), tl.cast(first, tl.int64), queries - first
    q_ptr += batch * q_batch_stride + wide_head * q_head_stride + first_row * q_stride
    q = own_rows(q_ptr, here, q_stride, width, ROWS, WIDTH, FITS)
    grad_y_ptr += batch * grad_batch_stride + wide_head * grad_head_stride
    grad_y_ptr += first_row * grad_stride
    grad_y = own_rows(grad_y_ptr, here, grad_stride, deep, ROWS, DEEP, DEEP_FITS)
    at = plane.to(tl.int64) * queries
    base = tl.load(base_ptr + at + query, mask=present, other=0)
    delta = tl.load(delta_ptr + at + query, mask=present, other=0)
    k_ptr += batch * k_batch_stride + key_head * k_head_stride
    v_ptr += batch * v_batch_stride + key_head * v_head_stride
    if padding_ptr is not None:
        padding_ptr += batch * keys
    slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
    if bias_ptr is not None:
        bias_ptr += batch * bias_batch_stride + head.to(tl.int64) * bias_head_stride
    bias = (bias_ptr, bias_stride, bias_row, queries)
    scoring = (inner, outer, slopes_ptr, slope, apart, bias)
    number = (
        first_number + batch * number_batch_stride + head.to(tl.int64) * number_head_stride + query
    )
    sources = (k_ptr, k_stride, v_ptr, v_stride, width, deep)
    masking = (masks_ptr, padding_ptr, keys, keys - queries)
    dropout = (seed_ptr, number, threshold, kept_scale, first_group)

    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    given = (q, grad_y, base, delta, query, sources, masking, scoring, dropout)
    sums = add_up(
        _add_dq, (entries_ptr, unchecked), 0, sums, given,
        (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, False,
    )  # fmt: skip
    sums = add_up(
        _add_dq, (entries_ptr, checked), 0, sums, given,
        (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, True,
    )  # fmt: skip
    grad_q_ptr += (at + first) * width
    store_own_rows(grad_q_ptr, sums * scale, here, width, width, WIDTH)
