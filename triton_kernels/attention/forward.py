"""The forward pass of attention over a layout's blocks; block_sparse_attention.py explains it."""

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
)


@triton.jit
def _attend(
    walk, start, partner, state, q, query, sources, masking, scoring, late, dropout,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
    DEEP: tl.constexpr, DEEP_FITS: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the next keys and values."""
    sums, total, highest = state
    k_ptr, k_stride, v_ptr, v_stride, width, deep = sources
    masks_ptr, padding_ptr, keys, shift = masking
    key, inside, seen = next_keys(
        walk, start, partner, masks_ptr, padding_ptr, query, keys, shift, CAUSAL, COLUMNS, BLOCK,
        CHECKED,
    )  # fmt: skip
    k = head_rows(k_ptr, key, k_stride, inside, width, WIDTH, FITS)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    z, _ = logits(product, query[:, None], key[None, :], shift, seen, scoring, SOFTCAP)
    above = tl.maximum(highest, tl.max(z, 1))
    base = finite(above)
    shrunk = tl.exp2((highest - base) * late)
    e = tl.exp2((z - base[:, None]) * late)
    total = total * shrunk + tl.sum(e, 1)
    if dropout[0] is not None:
        e *= kept_factors(walk, start, partner, dropout, COLUMNS, BLOCK, CHECKED)
    v = head_rows(v_ptr, key, v_stride, inside, deep, DEEP, DEEP_FITS)
    sums = tl.dot(e.to(v.dtype), v, sums * shrunk[:, None], input_precision=PRECISION)
    return sums, total, above


@triton.jit
def _split_scale(q, inner, outer, of_slopes, of_biases, SOFTCAP: tl.constexpr):
    """The queries and the scores' factors, the last of which comes after a maximum is subtracted.

    Were it multiplied first, the compiler would fuse both into an operation that rounds once. The
    maximum is rounded, so the largest of scores beyond 1e9 would be its rounding away from 0. Where
    slopes or biases are added, that sum is what a maximum is subtracted from.
    """
    late = 1.0
    if of_slopes is None and of_biases is None:
        if SOFTCAP:
            late, outer = outer, 1.0
        else:
            late = tl.maximum(tl.abs(inner), 1e-30)
            q = (q * (inner / late)).to(q.dtype)  # by 1 or -1; a scale of 0 makes zeros
            inner = 1.0
    return q, inner, outer, late


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    y_ptr,
    lse_ptr,
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
    q_ptr += batch * q_batch_stride + head.to(tl.int64) * q_head_stride
    q_ptr += tl.cast(first, tl.int64) * q_stride
    q = own_rows(q_ptr, queries - first, q_stride, width, ROWS, WIDTH, FITS)
    k_ptr += batch * k_batch_stride + key_head * k_head_stride
    v_ptr += batch * v_batch_stride + key_head * v_head_stride
    if padding_ptr is not None:
        padding_ptr += batch * keys
    slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
    if bias_ptr is not None:
        bias_ptr += batch * bias_batch_stride + head.to(tl.int64) * bias_head_stride
    bias = (bias_ptr, bias_stride, bias_row, queries)
    q, inner, outer, late = _split_scale(q, inner, outer, slopes_ptr, bias_ptr, SOFTCAP)
    scoring = (inner, outer, slopes_ptr, slope, apart, bias)
    number = (
        first_number + batch * number_batch_stride + head.to(tl.int64) * number_head_stride + query
    )
    sources = (k_ptr, k_stride, v_ptr, v_stride, width, deep)
    masking = (masks_ptr, padding_ptr, keys, keys - queries)
    dropout = (seed_ptr, number, threshold, kept_scale, first_group)

    sums = tl.zeros([ROWS, DEEP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    if sinks_ptr is not None:  # a key without a value
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E / late
        highest = tl.zeros([ROWS], tl.float32) + sink
        total = tl.where(highest == -float("inf"), 0.0, 1.0)
    state = (sums, total, highest)
    given = (q, query, sources, masking, scoring, late, dropout)
    state = add_up(
        _attend, (entries_ptr, unchecked), 0, state, given,
        (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, False,
    )  # fmt: skip
    state = add_up(
        _attend, (entries_ptr, checked), 0, state, given,
        (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, True,
    )  # fmt: skip
    sums, total, highest = state
    nothing = total == 0
    total = tl.where(nothing, 1, total)
    lse = tl.where(nothing, -float("inf"), (finite(highest) * late + tl.log2(total)) / LOG2_E)
    at = plane.to(tl.int64) * queries
    y = sums / total[:, None]
    store_own_rows(y_ptr + (at + first) * deep, y, queries - first, deep, deep, DEEP)
    tl.store(lse_ptr + at + query, lse, mask=query < queries)
