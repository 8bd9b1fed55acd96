"""Gradients of attention's keys and values; block_sparse_attention.py explains the other kernels.

A program has a tile of keys. Of the four products for a tile of queries, two give weights and their
gradients, and two add to the sums of keys and of values. Both sums fit the registers up to heads of
64, and nearly at 128 on sm_90. For wider heads one launch has the sums of keys and another one the
sums of values: five products instead of four.

What else decides, on an H200 with heads of 128 and blocks of 128, in ms: scores are computed once
for both sums, and calls without conditions have no loop for them, whose registers the other loop
lacks (2.71 -> 1.43); rows are masked only if blocks do not divide the queries, and bases and deltas
are loaded as columns, since otherwise each thread loads all 32 that it needs (1.43 -> 1.21).

Long lines. A program walks a line of blocks for all query heads that share its keys. One global
column at 16k tokens is as long as the rest of a window of 128 tokens, and 32 heads that share one
key head have 64 programs for 132 processors. Lines are therefore divided into pieces, over heads
and blocks. All pieces together are at most `extras` more than there are lines: half of the lines,
which divides lines above twice the mean, or as many as it takes to give every processor two
programs. Each piece of a divided line writes float32 sums, and `attention_dkv_sums` adds up the
pieces of a line in their order.

The cost of a piece: with heads of d its sums take 16 d bytes a key to write and to read. At 3.3
TB/s, those take as long as 3200 d operations at 660 TFLOP/s, the products with 320 queries. A piece
has at least 2048 queries, so that sums take at most 16% more time; a line of 16384 queries then
takes an eighth of its time, and lines below 2048 are not divided. A program without a piece reads
the table of its plane: 1 us.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from ..dropout import factors_of_groups
from .block_lists import (
    add_up,
    bits,
    column_walks,
    masks_of,
    part_of,
    piece_of,
    pieces_of,
    rank_of,
    tokens,
)
from .parts import (
    UNSPECIALIZED,
    head_rows,
    logits,
    own_rows,
    shown_keys,
    slope_of,
    store_own_rows,
    weights_of,
)


@triton.jit
def _add_dkv(
    walk, start, partner, state, k, v, first, shown, sources, masking, scoring, dropout,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr,
    DEEP: tl.constexpr, DEEP_FITS: tl.constexpr, RAGGED: tl.constexpr, OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Add what the next queries contribute. Tiles are transposed: [keys, queries]."""
    grad_k, grad_v = state
    q_ptr, q_stride, grad_y_ptr, grad_stride, base_ptr, delta_ptr, width, deep = sources
    masks_ptr, queries, shift = masking
    COLUMNS: tl.constexpr = k.shape[0]
    key = first + tl.arange(0, COLUMNS)
    query, listed = tokens(walk, start, partner, 1, ROWS, BLOCK, True)
    inside = tl.full([ROWS], 1, tl.int1)
    if RAGGED or ROWS > BLOCK:
        inside = listed & (query < queries)
    # A weight of a query that is not there is exp2(-inf). Triton takes a load of few numbers for
    # cheap, and lets every thread that needs one repeat it; not so behind a sum.
    base = tl.sum(tl.load(base_ptr + query[:, None], mask=inside[:, None], other=float("inf")), 1)
    delta = tl.sum(tl.load(delta_ptr + query[:, None], mask=inside[:, None], other=0), 1)
    q = head_rows(q_ptr, query, q_stride, inside, width, WIDTH, FITS)
    grad_y = head_rows(grad_y_ptr, query, grad_stride, inside, deep, DEEP, DEEP_FITS)
    seen = tl.broadcast_to(shown[:, None], [COLUMNS, ROWS])
    if CHECKED and CAUSAL:
        seen = seen & (query[None, :] + shift >= key[:, None])
    if CHECKED and masks_ptr is not None:
        GROUP: tl.constexpr = 32 if COLUMNS > 32 else COLUMNS
        mask = masks_of(walk, start, 1, ROWS, BLOCK)
        if ROWS > BLOCK:
            mask = mask[:, None]
        first_key = first + tl.arange(0, COLUMNS // GROUP) * GROUP
        seen = seen & tl.trans(bits(masks_ptr, mask, query, first_key, BLOCK, COLUMNS))
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    z, capped = logits(product, query[None, :], key[:, None], shift, seen, scoring, SOFTCAP)
    weight = weights_of(z - base[None, :])
    kept = 1.0
    if dropout[0] is not None:
        seed_ptr, number, threshold, kept_scale, first_group = dropout
        groups = first_group + first // 8 + tl.arange(0, COLUMNS // 8)
        kept = tl.trans(factors_of_groups(seed_ptr, number + query, groups, threshold, kept_scale))
    if OF_VALUES:
        dropped = (weight * kept).to(q.dtype)
        grad_v = tl.dot(dropped, grad_y, grad_v, input_precision=PRECISION)
    if OF_KEYS:
        grad = tl.dot(v, tl.trans(grad_y), input_precision=PRECISION) * kept
        grad = weight * (grad - delta[None, :])
        if SOFTCAP:
            grad *= 1 - capped * capped
        grad_k = tl.dot(grad.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "extras", "least"])
def attention_dkv(
    grad_k_ptr,
    grad_v_ptr,
    partials_ptr,
    grad_y_ptr,
    base_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scale,
    key_heads,
    extras,
    least,
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
    PER_HEAD: tl.constexpr,
    RAGGED: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
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
    index, part = tile // SPLIT, tile % SPLIT * COLUMNS
    EVEN: tl.constexpr = PER_HEAD or lines_ptr is None
    rank, piece, pieces = index, 0, 1
    if partials_ptr is not None:
        rank, piece, pieces = piece_of(lines_ptr, index, lines, group, extras, least, EVEN)
    has_line = rank < lines
    rank = tl.minimum(rank, lines - 1)
    which, own_rank = rank, rank
    if lines_ptr is not None:
        which = tl.load(lines_ptr + 4 * rank)
    first = which * BLOCK + part
    here = tl.where(has_line, keys - first, 0)
    first_row = tl.cast(first, tl.int64)
    k_ptr += batch * k_batch_stride + key_head.to(tl.int64) * k_head_stride + first_row * k_stride
    v_ptr += batch * v_batch_stride + key_head.to(tl.int64) * v_head_stride + first_row * v_stride
    k = own_rows(k_ptr, here, k_stride, width, COLUMNS, WIDTH, FITS)
    v = own_rows(v_ptr, here, v_stride, deep, COLUMNS, DEEP, DEEP_FITS)
    if padding_ptr is not None:
        padding_ptr += batch * keys
    key = first + tl.arange(0, COLUMNS)
    shown = shown_keys(padding_ptr, key, tl.arange(0, COLUMNS) < here)
    masking = (masks_ptr, queries, keys - queries)
    grad_k = tl.zeros([COLUMNS, WIDTH] if OF_KEYS else [1], tl.float32)
    grad_v = tl.zeros([COLUMNS, DEEP] if OF_VALUES else [1], tl.float32)
    state = (grad_k, grad_v)
    # The part of all the heads' walks that is this piece's: PER_HEAD, their lines differ in length,
    # and it takes whole heads.
    count = tl.where(has_line, tl.maximum(end - begin, 0), 0)
    from_head, to_head = begin, begin + count
    if PER_HEAD and partials_ptr is not None:
        from_head, to_head = begin + piece * count // pieces, begin + (piece + 1) * count // pieces
    for head in range(from_head, to_head):
        if PER_HEAD:
            own_lines_ptr = lines_ptr + 4 * (head - begin) * lines_head_stride
            if head > begin:
                rank = rank_of(own_lines_ptr, lines, which)
            lists = (own_lines_ptr, entries_ptr, lines)
        else:
            lists = (lines_ptr, entries_ptr, lines)
        _, unchecked, checked = column_walks(
            lists, rank, part, queries, keys, COLUMNS, BLOCK, CAUSAL
        )
        from_whole, from_checked = 0, 0
        if partials_ptr is not None and not PER_HEAD:
            before, walked = head - begin, tl.cast(unchecked[3] + checked[3], tl.int64)
            low = (piece * count * walked // pieces - before * walked).to(tl.int32)
            high = ((piece + 1) * count * walked // pieces - before * walked).to(tl.int32)
            after = unchecked[3]
            from_whole, unchecked = part_of(unchecked, low, high, 0)
            from_checked, checked = part_of(checked, low, high, after)
        query_plane = batch * heads + head
        wide_head = tl.zeros([], tl.int64) + head
        sources = (
            q_ptr + batch * q_batch_stride + wide_head * q_head_stride,
            q_stride,
            grad_y_ptr + batch * grad_batch_stride + wide_head * grad_head_stride,
            grad_stride,
            base_ptr + query_plane * queries,
            delta_ptr + query_plane * queries,
            width,
            deep,
        )
        slope = slope_of(slopes_ptr, batch, head, slopes_batch_stride, slopes_head_stride)
        bias = (bias_ptr, bias_stride, bias_row, queries)
        if bias_ptr is not None:
            at = bias_ptr + batch * bias_batch_stride + wide_head * bias_head_stride
            bias = (at, bias_stride, bias_row, queries)
        scoring = (inner, outer, slopes_ptr, slope, apart, bias)
        number = first_number + batch * number_batch_stride + wide_head * number_head_stride
        dropout = (seed_ptr, number, threshold, kept_scale, first_group)
        given = (k, v, first, shown, sources, masking, scoring, dropout)
        state = add_up(
            _add_dkv, (entries_ptr, unchecked), from_whole, state, given,
            (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS, RAGGED, OF_KEYS, OF_VALUES),
            ROWS, BLOCK, False,
        )  # fmt: skip
        if CAUSAL or masks_ptr is not None:
            # No prefetch: with two sums and conditions it would not fit the registers.
            state = add_up(
                _add_dkv, (entries_ptr, checked), from_checked, state, given,
                (SOFTCAP, PRECISION, CAUSAL, WIDTH, FITS, DEEP, DEEP_FITS, RAGGED, OF_KEYS,
                 OF_VALUES),
                ROWS, BLOCK, True, 1,
            )  # fmt: skip
    grad_k, grad_v = state
    at = plane.to(tl.int64) * keys + first
    whole = here
    if partials_ptr is not None:
        whole = tl.where(pieces > 1, 0, here)
        slots = extras + tl.minimum(lines, extras)
        slot = plane.to(tl.int64) * slots + tl.where(piece > 0, index, extras + own_rank)
        partials_ptr += (slot * BLOCK + part) * (WIDTH + DEEP)
        if pieces > 1:
            if OF_KEYS:
                sums = grad_k * scale
                store_own_rows(partials_ptr, sums, here, WIDTH + DEEP, WIDTH, WIDTH)
            if OF_VALUES:
                store_own_rows(partials_ptr + WIDTH, grad_v, here, WIDTH + DEEP, DEEP, DEEP)
    if whole > 0:
        if OF_KEYS:
            store_own_rows(grad_k_ptr + at * width, grad_k * scale, whole, width, width, WIDTH)
        if OF_VALUES:
            store_own_rows(grad_v_ptr + at * deep, grad_v, whole, deep, deep, DEEP)


@triton.jit
def _sum_of_pieces(ptr, first, rest, pieces, size, here, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                   STRIDE: tl.constexpr):  # fmt: skip
    """[ROWS, WIDTH] of a line's first piece, and of its other ones, `size` elements apart."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = row[:, None] * STRIDE + column[None, :]
    present = tl.broadcast_to((row < here)[:, None], [ROWS, WIDTH])
    sums = tl.load(ptr + first + place, mask=present, other=0)
    for piece in range(0, pieces - 1):
        sums += tl.load(ptr + rest + piece * size + place, mask=present, other=0)
    return sums


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "key_heads", "extras", "least"])
def attention_dkv_sums(
    grad_k_ptr,
    grad_v_ptr,
    partials_ptr,
    lines_ptr,
    planes,
    key_heads,
    heads,
    group,
    first_head,
    keys,
    width,
    deep,
    lines,
    lines_batch_stride,
    lines_head_stride,
    extras,
    least,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEEP: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Add up the pieces of the lines that have several, in their order."""
    SPLIT: tl.constexpr = BLOCK // ROWS
    STRIDE: tl.constexpr = WIDTH + DEEP
    plane, tile = tl.program_id(0) % planes, tl.program_id(0) // planes
    rank, part = tile // SPLIT, tile % SPLIT * ROWS
    EVEN: tl.constexpr = PER_HEAD or lines_ptr is None
    which = rank
    if lines_ptr is not None:
        batch, head = plane // key_heads, plane % key_heads * group - first_head
        head = tl.minimum(tl.maximum(head, 0), heads - 1)
        lines_ptr += 4 * (batch.to(tl.int64) * lines_batch_stride + head * lines_head_stride)
        which = tl.load(lines_ptr + 4 * rank)
    pieces, before = pieces_of(lines_ptr, rank, lines, group, extras, least, EVEN)
    if pieces > 1:
        first = which * BLOCK + part
        here = keys - first
        size = tl.full([], BLOCK * STRIDE, tl.int64)
        base = plane * size * (extras + tl.minimum(lines, extras)) + part * STRIDE
        own, rest = base + (extras + rank) * size, base + before * size
        at = plane.to(tl.int64) * keys + first
        if grad_k_ptr is not None:
            sums = _sum_of_pieces(partials_ptr, own, rest, pieces, size, here, ROWS, WIDTH, STRIDE)
            store_own_rows(grad_k_ptr + at * width, sums, here, width, width, WIDTH)
        if grad_v_ptr is not None:
            ptr = partials_ptr + WIDTH
            sums = _sum_of_pieces(ptr, own, rest, pieces, size, here, ROWS, DEEP, STRIDE)
            store_own_rows(grad_v_ptr + at * deep, sums, here, deep, deep, DEEP)
