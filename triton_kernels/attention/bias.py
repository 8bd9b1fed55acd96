"""The gradient of attention's bias; block_sparse_attention.py explains the other kernels.

A program adds to sums that no other program touches, in one order, so that no atomics are needed.
If the bias has a number per pair, a program takes one tile of a row of blocks in all heads and
sequences that share the bias. If the bias has a number per distance, a program takes a part of a
head's tiles; the parts' sums, [parts, heads, distances], are added up afterwards. The program
writes a tile's gradients to scratch memory of its own, and reads each query's row back shifted, so
that a column holds the pairs of one distance.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .block_lists import add_up, rank_of, row_walks
from .dq import differentiate
from .parts import UNSPECIALIZED, head_rows, place, slope_of


@triton.jit
def _add_pairs(sums_ptr, grad, query, key, inside, queries, keys):
    at = sums_ptr + query.to(tl.int64)[:, None] * keys + key[None, :]
    mask = (query < queries)[:, None] & inside[None, :]
    tl.debug_barrier()  # other threads may have added to these elements before
    tl.store(at, tl.load(at, mask=mask, other=0) + grad, mask=mask)


@triton.jit
def _add_distances(sums_ptr, scratch_ptr, grad, query, key, row, queries, keys, distances):
    """Add up the pairs of each distance. The tile's keys are adjacent."""
    ROWS: tl.constexpr = grad.shape[0]
    COLUMNS: tl.constexpr = grad.shape[1]
    SPAN: tl.constexpr = 2 * ROWS
    line, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.debug_barrier()
    tl.store(scratch_ptr + line[:, None] * COLUMNS + column[None, :], grad)
    tl.debug_barrier()
    first_query, first_key = tl.min(query), tl.min(key)
    shift = keys - queries
    if row is None:
        zero = queries - 1
        low = first_key - (first_query + ROWS - 1) + zero
        high = first_key + COLUMNS - first_query + zero
        own = query - zero
    else:
        zero = place(keys - 1, row)
        low = place(first_key, row) - place(first_query + ROWS - 1 + shift, row) + zero
        high = place(first_key + COLUMNS, row) - place(first_query + shift, row) + zero
        own = place(query + shift, row) - zero
    for start in tl.range(low, high, SPAN, num_stages=1):
        number = start + tl.arange(0, SPAN)
        at = number[None, :] + own[:, None]
        present = (at >= 0) & (query < queries)[:, None]
        if row is not None:
            right = at % (2 * row - 1)
            present = present & (right < row)
            at = at // (2 * row - 1) * row + right
        present = present & (at < keys) & (at >= first_key) & (at < first_key + COLUMNS)
        values = tl.load(
            scratch_ptr + line[:, None] * COLUMNS + (at - first_key), mask=present, other=0
        )
        inside = (number >= 0) & (number < distances)
        before = tl.load(sums_ptr + number, mask=inside, other=0)
        tl.store(sums_ptr + number, before + tl.sum(values, 0), mask=inside)
        tl.debug_barrier()


@triton.jit
def _add_bias_gradient(
    walk, start, partner, sums_ptr, scratch_ptr, row, queries, keys, distances, q, grad_y, base,
    delta, query, sources, masking, scoring, dropout,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
    DEEP: tl.constexpr, DEEP_FITS: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the next keys to sums in memory."""
    _, grad, _, key, inside = differentiate(
        walk, start, partner, q, grad_y, base, delta, query, sources, masking, scoring, dropout,
        COLUMNS, BLOCK, CHECKED, SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS,
    )  # fmt: skip
    if scratch_ptr is None:
        _add_pairs(sums_ptr, grad, query, key, inside, queries, keys)
    else:
        _add_distances(sums_ptr, scratch_ptr, grad, query, key, row, queries, keys, distances)
    return sums_ptr


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "parts", "bias_batches", "bias_heads", "distances"])
def attention_bias_gradient(
    sums_ptr,
    scratch_ptr,
    parts,
    bias_batches,
    bias_heads,
    distances,
    grad_y_ptr,
    base_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
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
    BY_PAIR: tl.constexpr = scratch_ptr is None
    program, batches = tl.program_id(0), planes // heads
    if BY_PAIR:
        # One tile of every sequence and head that shares the bias.
        of_head = program % bias_heads
        of_batch, tile = program // bias_heads % bias_batches, program // bias_heads // bias_batches
        shared_heads = heads // bias_heads
        begin, end, step = 0, batches // bias_batches * shared_heads, 1
        sums_ptr += (of_batch * bias_heads + of_head).to(tl.int64) * queries * keys
        which = tile // SPLIT
        if lines_ptr is not None:
            first_lines = of_batch * lines_batch_stride + of_head * lines_head_stride
            which = tl.load(lines_ptr + 4 * (first_lines.to(tl.int64) + tile // SPLIT))
    else:
        begin, end, step = program // heads, lines * SPLIT * batches, parts
        sums_ptr += program.to(tl.int64) * distances
        scratch_ptr += program.to(tl.int64) * ROWS * COLUMNS
    for number in tl.range(begin, end, step, num_stages=1):
        if BY_PAIR:
            batch = (of_batch + number // shared_heads).to(tl.int64)
            head = of_head + number % shared_heads
        else:
            batch, head, tile = (number % batches).to(tl.int64), program % heads, number // batches
        wide_head = head.to(tl.int64)
        rank = tile // SPLIT
        lists = (lines_ptr, entries_ptr, lines)
        if lines_ptr is not None:
            own = lines_ptr + 4 * (batch * lines_batch_stride + head * lines_head_stride)
            lists = (own, entries_ptr, lines)
            if BY_PAIR:
                rank = rank_of(own, lines, which)
        key_head = ((head + first_head) // group).to(tl.int64)
        first, unchecked, checked = row_walks(
            lists, rank, tile % SPLIT * ROWS, queries, keys, ROWS, COLUMNS, BLOCK, CAUSAL
        )  # fmt: skip
        query = first + tl.arange(0, ROWS)
        present = query < queries
        own_q = q_ptr + batch * q_batch_stride + wide_head * q_head_stride
        q = head_rows(own_q, query, q_stride, present, width, WIDTH, FITS)
        own_grad = grad_y_ptr + batch * grad_batch_stride + wide_head * grad_head_stride
        grad_y = head_rows(own_grad, query, grad_stride, present, deep, DEEP, DEEP_FITS)
        at = (batch * heads + head) * queries
        base = tl.load(base_ptr + at + query, mask=present, other=0)
        delta = tl.load(delta_ptr + at + query, mask=present, other=0)
        sources = (
            k_ptr + batch * k_batch_stride + key_head * k_head_stride,
            k_stride,
            v_ptr + batch * v_batch_stride + key_head * v_head_stride,
            v_stride,
            width,
            deep,
        )
        slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
        own_bias = bias_ptr + batch * bias_batch_stride + wide_head * bias_head_stride
        bias = (own_bias, bias_stride, bias_row, queries)
        scoring = (inner, outer, slopes_ptr, slope, apart, bias)
        row = first_number + batch * number_batch_stride + wide_head * number_head_stride + query
        masking = (masks_ptr, padding_ptr, keys, keys - queries)
        if padding_ptr is not None:
            masking = (masks_ptr, padding_ptr + batch * keys, keys, keys - queries)
        dropout = (seed_ptr, row, threshold, kept_scale, first_group)
        given = (
            scratch_ptr, bias_row, queries, keys, distances, q, grad_y, base, delta, query,
            sources, masking, scoring, dropout,
        )  # fmt: skip
        add_up(
            _add_bias_gradient, (entries_ptr, unchecked), 0, sums_ptr, given,
            (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, False, 1,
        )  # fmt: skip
        add_up(
            _add_bias_gradient, (entries_ptr, checked), 0, sums_ptr, given,
            (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS), COLUMNS, BLOCK, True, 1,
        )  # fmt: skip
