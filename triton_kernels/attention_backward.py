"""Attention over the blocks of a layout, backward; block_sparse_attention.py explains it."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .attention_parts import (
    LOG2_E,
    UNSPECIALIZED,
    finite,
    head_rows,
    kept_factors,
    logits,
    next_keys,
    shown_keys,
    slope_of,
    store_head_rows,
)
from .block_lists import bits, column_walks, masks_of, rank_of, row_walks, tokens
from .dropout import factors_of_groups


@triton.jit(do_not_specialize=["queries", "heads", "rows"])
def attention_deltas(
    delta_ptr,
    y_ptr,
    grad_y_ptr,
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
    """The inner products of grad_y and y, less grad_lse, of rows of all heads."""
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


@triton.jit
def _gradients(z, capped, lse, grad_weight, kept, delta, SOFTCAP: tl.constexpr):
    """Weights after dropout, and the gradients of products, up to their scale.

    `lse` and `delta` broadcast to the tile, `lse` in units of log 2.
    """
    weight = tl.exp2(z - lse)
    dropped = weight * kept
    grad_weight *= kept
    grad = weight * (grad_weight - delta)
    if SOFTCAP:
        grad *= 1 - capped * capped
    return dropped, grad


@triton.jit
def _add_query_gradient(
    walk, start, sums, q, grad_y, lse, delta, query, sources, masking, scoring, dropout,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Add what the next keys contribute."""
    k_ptr, k_stride, v_ptr, v_stride, width = sources
    masks_ptr, padding_ptr, keys, shift = masking
    key, inside, seen = next_keys(
        walk, start, masks_ptr, padding_ptr, query, keys, shift, CAUSAL, COLUMNS, BLOCK, CHECKED
    )
    k = head_rows(k_ptr, key, k_stride, inside, width, WIDTH, FITS)
    v = head_rows(v_ptr, key, v_stride, inside, width, WIDTH, FITS)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_weight = tl.dot(grad_y, tl.trans(v), input_precision=PRECISION)
    distance = query[:, None] + shift - key[None, :]
    z, capped = logits(product, distance, seen, scoring, SOFTCAP)
    kept = 1.0
    if dropout[0] is not None:
        kept = kept_factors(walk, start, dropout, COLUMNS, BLOCK, CHECKED)
    _, grad = _gradients(z, capped, lse[:, None], grad_weight, kept, delta[:, None], SOFTCAP)
    return tl.dot(grad.to(k.dtype), k, sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_query_gradient(
    grad_q_ptr,
    grad_y_ptr,
    lse_ptr,
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
    seed_ptr,
    planes,
    heads,
    group,
    first_head,
    queries,
    keys,
    width,
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
    q_ptr += batch * q_batch_stride + head.to(tl.int64) * q_head_stride
    q = head_rows(q_ptr, query, q_stride, present, width, WIDTH, FITS)
    grad_y_ptr += batch * grad_batch_stride + head.to(tl.int64) * grad_head_stride
    grad_y = head_rows(grad_y_ptr, query, grad_stride, present, width, WIDTH, FITS)
    at = plane.to(tl.int64) * queries
    lse = finite(tl.load(lse_ptr + at + query, mask=present, other=0)) * LOG2_E
    delta = tl.load(delta_ptr + at + query, mask=present, other=0)
    k_ptr += batch * k_batch_stride + key_head * k_head_stride
    v_ptr += batch * v_batch_stride + key_head * v_head_stride
    if padding_ptr is not None:
        padding_ptr += batch * keys
    slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
    scoring = (inner, outer, slopes_ptr, slope, apart)
    number = first_number + batch * number_batch_stride + head * number_head_stride + query
    sources = (k_ptr, k_stride, v_ptr, v_stride, width)
    masking = (masks_ptr, padding_ptr, keys, keys - queries)
    dropout = (seed_ptr, number, threshold, kept_scale, first_group)

    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, unchecked[3] * BLOCK, COLUMNS):
        sums = _add_query_gradient(
            (entries_ptr, unchecked), start, sums, q, grad_y, lse, delta, query, sources, masking,
            scoring, dropout, SOFTCAP, PRECISION, CAUSAL, COLUMNS, BLOCK, WIDTH, FITS, False,
        )  # fmt: skip
    for start in tl.range(0, checked[3] * BLOCK, COLUMNS):
        sums = _add_query_gradient(
            (entries_ptr, checked), start, sums, q, grad_y, lse, delta, query, sources, masking,
            scoring, dropout, SOFTCAP, PRECISION, CAUSAL, COLUMNS, BLOCK, WIDTH, FITS, True,
        )  # fmt: skip
    store_head_rows(grad_q_ptr + at * width, sums * scale, query, present, width, WIDTH)


@triton.jit
def _add_key_gradients(
    walk, start, state, k, v, first, shown, sources, masking, scoring, dropout,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Add what the next queries contribute. Tiles are transposed: [keys, queries]."""
    grad_k, grad_v = state
    q_ptr, q_stride, grad_y_ptr, grad_stride, lse_ptr, delta_ptr, width = sources
    masks_ptr, queries, shift = masking
    COLUMNS: tl.constexpr = k.shape[0]
    key = first + tl.arange(0, COLUMNS)
    query, listed = tokens(walk, start, 1, ROWS, BLOCK, True)
    inside = listed & (query < queries)
    q = head_rows(q_ptr, query, q_stride, inside, width, WIDTH, FITS)
    grad_y = head_rows(grad_y_ptr, query, grad_stride, inside, width, WIDTH, FITS)
    # A weight of a query that is not there is exp2(-inf).
    lse = finite(tl.load(lse_ptr + query, mask=inside, other=float("inf"))) * LOG2_E
    delta = tl.load(delta_ptr + query, mask=inside, other=0)
    seen = tl.broadcast_to(shown[:, None], [COLUMNS, ROWS])
    if CHECKED and CAUSAL:
        seen = seen & (query[None, :] + shift >= key[:, None])
    if CHECKED and masks_ptr is not None:
        GROUP: tl.constexpr = 32 if BLOCK > 32 else BLOCK
        mask = masks_of(walk, start, 1, ROWS, BLOCK)
        if ROWS > BLOCK:
            mask = mask[:, None]
        first_key = first + tl.arange(0, COLUMNS // GROUP) * GROUP
        seen = seen & tl.trans(bits(masks_ptr, mask, query, first_key, BLOCK, COLUMNS))
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    grad_weight = tl.dot(v, tl.trans(grad_y), input_precision=PRECISION)
    distance = query[None, :] + shift - key[:, None]
    z, capped = logits(product, distance, seen, scoring, SOFTCAP)
    kept = 1.0
    if dropout[0] is not None:
        seed_ptr, number, threshold, kept_scale, first_group = dropout
        groups = first_group + first // 4 + tl.arange(0, COLUMNS // 4)
        kept = factors_of_groups(seed_ptr, number + query, groups, threshold, kept_scale)
        kept = tl.trans(kept)
    weight, grad = _gradients(z, capped, lse[None, :], grad_weight, kept, delta[None, :], SOFTCAP)
    grad_v = tl.dot(weight.to(q.dtype), grad_y, grad_v, input_precision=PRECISION)
    grad_k = tl.dot(grad.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_key_gradients(
    grad_k_ptr,
    grad_v_ptr,
    grad_y_ptr,
    lse_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scale,
    key_heads,
    lines_ptr,
    entries_ptr,
    masks_ptr,
    padding_ptr,
    slopes_ptr,
    seed_ptr,
    planes,
    heads,
    group,
    first_head,
    queries,
    keys,
    width,
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
    PER_HEAD: tl.constexpr,
):
    SPLIT: tl.constexpr = BLOCK // COLUMNS
    plane, tile = tl.program_id(0) % planes, tl.program_id(0) // planes
    batch, key_head = (plane // key_heads).to(tl.int64), plane % key_heads
    # The query heads that are here and share these keys.
    begin = tl.maximum(key_head * group - first_head, 0)
    end = tl.minimum(key_head * group + group - first_head, heads)
    if lines_ptr is not None:
        lines_ptr += 4 * (
            batch * lines_batch_stride + tl.minimum(begin, heads - 1) * lines_head_stride
        )
    rank, part = tile // SPLIT, tile % SPLIT * COLUMNS
    which = rank
    if lines_ptr is not None:
        which = tl.load(lines_ptr + 4 * rank)
    first = which * BLOCK + part
    key = first + tl.arange(0, COLUMNS)
    present = key < keys
    k_ptr += batch * k_batch_stride + key_head.to(tl.int64) * k_head_stride
    v_ptr += batch * v_batch_stride + key_head.to(tl.int64) * v_head_stride
    k = head_rows(k_ptr, key, k_stride, present, width, WIDTH, FITS)
    v = head_rows(v_ptr, key, v_stride, present, width, WIDTH, FITS)
    if padding_ptr is not None:
        padding_ptr += batch * keys
    shown = shown_keys(padding_ptr, key, present)
    masking = (masks_ptr, queries, keys - queries)
    state = (tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS, WIDTH], tl.float32))
    for head in range(begin, end):
        if PER_HEAD and head > begin:
            lines_ptr += 4 * lines_head_stride
            rank = rank_of(lines_ptr, lines, which)
        lists = (lines_ptr, entries_ptr, lines)
        _, unchecked, checked = column_walks(
            lists, rank, part, queries, keys, COLUMNS, BLOCK, CAUSAL
        )
        query_plane = batch * heads + head
        wide_head = tl.zeros([], tl.int64) + head
        sources = (
            q_ptr + batch * q_batch_stride + wide_head * q_head_stride,
            q_stride,
            grad_y_ptr + batch * grad_batch_stride + wide_head * grad_head_stride,
            grad_stride,
            lse_ptr + query_plane * queries,
            delta_ptr + query_plane * queries,
            width,
        )
        slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
        scoring = (inner, outer, slopes_ptr, slope, apart)
        number = first_number + batch * number_batch_stride + head * number_head_stride
        dropout = (seed_ptr, number, threshold, kept_scale, first_group)
        for start in tl.range(0, unchecked[3] * BLOCK, ROWS):
            state = _add_key_gradients(
                (entries_ptr, unchecked), start, state, k, v, first, shown, sources, masking,
                scoring, dropout, SOFTCAP, PRECISION, CAUSAL, ROWS, BLOCK, WIDTH, FITS, False,
            )  # fmt: skip
        # Without loads ahead: two sums, conditions and those would not fit the registers.
        for start in tl.range(0, checked[3] * BLOCK, ROWS, num_stages=1):
            state = _add_key_gradients(
                (entries_ptr, checked), start, state, k, v, first, shown, sources, masking,
                scoring, dropout, SOFTCAP, PRECISION, CAUSAL, ROWS, BLOCK, WIDTH, FITS, True,
            )  # fmt: skip
    at = plane.to(tl.int64) * keys * width
    store_head_rows(grad_k_ptr + at, state[0] * scale, key, present, width, WIDTH)
    store_head_rows(grad_v_ptr + at, state[1], key, present, width, WIDTH)
