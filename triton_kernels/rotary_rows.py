"""Rows of rotary embeddings: their parts, their angles and the scale of their norm.

`layout` is (pairs, distance, width): the pairs that are rotated, and the columns between both of a
pair. INTERLEAVED pairs are neighbours, and a FULL table has an angle for each column.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import chunk_range

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Rounds two to bfloat16 at a time: a GPU converts single ones at a quarter of the rate.
ROUND_PAIR = tl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;"
    " shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }"
)


@triton.jit
def load_row(
    ptr, start, inside, layout, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    """The firsts and the seconds of pairs and the other columns, in float32, of rows at `start`."""
    pairs, distance, width = layout[0], layout[1], layout[2]
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(ptr + start + column, mask=inside & (column < 2 * pairs), other=0)
        first, second = tl.split(both.to(tl.float32).reshape(both.shape[0], PAIRS, 2))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        there = inside & (column < pairs)
        first = tl.load(ptr + start + column, mask=there, other=0).to(tl.float32)
        second = tl.load(ptr + start + distance + column, mask=there, other=0).to(tl.float32)
    if REST == 0:
        rest = tl.zeros([start.shape[0], 1], tl.float32)
    else:
        at = tl.arange(0, REST)[None, :]
        column = at + tl.where(at < distance - pairs, pairs, 2 * pairs)
        rest = tl.load(ptr + start + column, mask=inside & (column < width), other=0)
        rest = rest.to(tl.float32)
    return first, second, rest


@triton.jit
def store_row(
    ptr,
    start,
    inside,
    layout,
    first,
    second,
    rest,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    pairs, distance, width = layout[0], layout[1], layout[2]
    kind = ptr.dtype.element_ty
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.join(first, second).reshape(first.shape[0], 2 * PAIRS)
        tl.store(ptr + start + column, both.to(kind), mask=inside & (column < 2 * pairs))
    else:
        column = tl.arange(0, PAIRS)[None, :]
        there = inside & (column < pairs)
        tl.store(ptr + start + column, first.to(kind), mask=there)
        tl.store(ptr + start + distance + column, second.to(kind), mask=there)
    if REST > 0:
        at = tl.arange(0, REST)[None, :]
        column = at + tl.where(at < distance - pairs, pairs, 2 * pairs)
        tl.store(ptr + start + column, rest.to(kind), mask=inside & (column < width))


@triton.jit
def load_weight(
    weight_ptr, layout, PLUS_ONE: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST
):
    """The factors of a norm, as one row."""
    if weight_ptr is None:
        one = tl.full([1, 1], 1, tl.float32)
        return one, one, one
    else:
        start = tl.zeros([1, 1], tl.int64)
        first, second, rest = load_row(
            weight_ptr, start, start == 0, layout, INTERLEAVED, PAIRS, REST
        )
        if PLUS_ONE:
            return first + 1, second + 1, rest + 1
        else:
            return first, second, rest


@triton.jit
def load_angle(
    ptr,
    start,
    stride,
    bad,
    inside,
    layout,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """An angle for the first and one for the second of each pair; NaN in rows that are bad."""
    pairs = layout[0]
    pair = tl.arange(0, PAIRS)[None, :]
    there = inside & (pair < pairs)
    if FULL:
        first_at = 2 * pair if INTERLEAVED else pair
        second_at = 2 * pair + 1 if INTERLEAVED else pair + pairs
        first = tl.load(ptr + start + first_at * stride, mask=there, other=0).to(tl.float32)
        second = tl.load(ptr + start + second_at * stride, mask=there, other=0).to(tl.float32)
        return tl.where(bad, float("nan"), first), tl.where(bad, float("nan"), second)
    else:
        angle = tl.load(ptr + start + pair * stride, mask=there, other=0).to(tl.float32)
        angle = tl.where(bad, float("nan"), angle)
        return angle, angle


@triton.jit
def load_angles(
    angles,
    batch,
    token,
    inside,
    layout,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """cos and sin of the rows, for the first and for the second of each pair."""
    cos_ptr, sin_ptr, positions_ptr, table_rows = angles[0], angles[1], angles[2], angles[3]
    if positions_ptr is None:
        bad = ~inside & inside
        cos_start = batch * angles[4] + token * angles[5]
        sin_start = batch * angles[7] + token * angles[8]
    else:
        at = batch * angles[10] + token * angles[11]
        position = tl.load(positions_ptr + at, mask=inside, other=0).to(tl.int64)
        bad = (position < 0) | (position >= table_rows)
        inside = inside & (position >= 0) & (position < table_rows)
        cos_start, sin_start = position * angles[5], position * angles[8]
    cos = load_angle(cos_ptr, cos_start, angles[6], bad, inside, layout, INTERLEAVED, FULL, PAIRS)
    sin = load_angle(sin_ptr, sin_start, angles[9], bad, inside, layout, INTERLEAVED, FULL, PAIRS)
    return cos[0], cos[1], sin[0], sin[1]


@triton.jit
def turn(first, second, cos1, cos2, sin1, sin2, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        return first * cos1 - second * sin1, second * cos2 + first * sin2


@triton.jit
def place(tile, tokens, heads, places, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Batch, token and head of the rows of a tile, as columns, and which of them exist.

    A tile has HEADS heads of each of its tokens; if it has one token, that is a single number, so
    that its angles are loaded once. `places` counts the tokens of all batches. Its type, int32 if
    it fits, is that of the division: one of 64 bits takes a hundred instructions.
    """
    row = tl.arange(0, ROWS)[:, None]
    head_tiles = heads // HEADS
    own = tl.zeros([1, 1], tl.int32) if ROWS == HEADS else row // HEADS
    at = tile // head_tiles * (ROWS // HEADS) + own + 0 * places
    head = tile % head_tiles * HEADS + row % HEADS
    batch = at // tokens
    token = (at - batch * tokens).to(tl.int64)
    return batch.to(tl.int64), token, head.to(tl.int64), at < places


@triton.jit
def round(value, like_ptr, ROUNDED: tl.constexpr, LEAST: tl.constexpr):
    """The value, rounded to the dtype of a tensor if this much of a norm is to be rounded."""
    if ROUNDED < LEAST:
        return value
    elif like_ptr.dtype.element_ty == tl.bfloat16 and not _INTERPRETED:
        kinds: tl.constexpr = "=r,=r,f,f"
        bits = tl.inline_asm_elementwise(ROUND_PAIR, kinds, [value], tl.int32, is_pure=True, pack=2)
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def scale(value, rstd, weight, like_ptr, ROUNDED: tl.constexpr):
    return round(round(value * rstd, like_ptr, ROUNDED, 2) * weight, like_ptr, ROUNDED, 1)


@triton.jit
def rotate_tile(
    stream,
    tile,
    tokens,
    layout,
    angles,
    eps,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    x_ptr, y_ptr, weight_ptr, rstd_ptr = stream[0], stream[1], stream[2], stream[3]
    batch, token, head, inside = place(tile, tokens, stream[4], stream[5], HEADS, ROWS)
    start = batch * stream[6] + token * stream[7] + head * stream[8]
    first, second, rest = load_row(x_ptr, start, inside, layout, INTERLEAVED, PAIRS, REST)
    # Before the norm, which waits for the row: its store would hold these loads back.
    cos1, cos2, sin1, sin2 = load_angles(
        angles, batch, token, inside, layout, INTERLEAVED, FULL, PAIRS
    )
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        rstd = 1 / tl.sqrt_rn(squares[:, None] / layout[2] + tl.cast(eps, tl.float32))
        at = batch * stream[12] + token * stream[13] + head * stream[14]
        tl.store(rstd_ptr + at, rstd, mask=inside)
        weight = load_weight(weight_ptr, layout, PLUS_ONE, INTERLEAVED, PAIRS, REST)
        first = scale(first, rstd, weight[0], x_ptr, ROUNDED)
        second = scale(second, rstd, weight[1], x_ptr, ROUNDED)
        rest = scale(rest, rstd, weight[2], x_ptr, ROUNDED)
    first, second = turn(first, second, cos1, cos2, sin1, sin2, TRANSPOSED)
    start = batch * stream[9] + token * stream[10] + head * stream[11]
    store_row(y_ptr, start, inside, layout, first, second, rest, INTERLEAVED, PAIRS, REST)


@triton.jit
def differentiate_chunk(
    stream,
    chunk,
    chunks,
    tokens,
    layout,
    angles,
    PLUS_ONE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    grad_ptr, x_ptr, result_ptr = stream[0], stream[1], stream[2]
    weight_ptr, rstd_ptr, partials_ptr = stream[3], stream[4], stream[5]
    heads, places, width = stream[6], stream[7], layout[2]
    weight = load_weight(weight_ptr, layout, PLUS_ONE, INTERLEAVED, PAIRS, REST)
    first_sum = tl.zeros([ROWS, PAIRS], tl.float32)
    second_sum = tl.zeros([ROWS, PAIRS], tl.float32)
    rest_sum = tl.zeros([ROWS, REST if REST > 0 else 1], tl.float32)
    tiles = tl.cdiv(places, ROWS // HEADS) * (heads // HEADS)
    begin, end = chunk_range(chunk, tiles, chunks, 1)
    for tile in tl.range(begin, end):
        batch, token, head, inside = place(tile, tokens, heads, places, HEADS, ROWS)
        start = batch * stream[8] + token * stream[9] + head * stream[10]
        u1, u2, u3 = load_row(grad_ptr, start, inside, layout, INTERLEAVED, PAIRS, REST)
        cos1, cos2, sin1, sin2 = load_angles(
            angles, batch, token, inside, layout, INTERLEAVED, FULL, PAIRS
        )
        u1, u2 = turn(u1, u2, cos1, cos2, sin1, sin2, True)
        start = batch * stream[11] + token * stream[12] + head * stream[13]
        x1, x2, x3 = load_row(x_ptr, start, inside, layout, INTERLEAVED, PAIRS, REST)
        at = batch * stream[17] + token * stream[18] + head * stream[19]
        rstd = tl.load(rstd_ptr + at, mask=inside, other=0)
        x1, x2, x3 = x1 * rstd, x2 * rstd, x3 * rstd
        if partials_ptr is not None:
            first_sum += u1 * x1
            second_sum += u2 * x2
            rest_sum += u3 * x3
        u1, u2, u3 = u1 * weight[0], u2 * weight[1], u3 * weight[2]
        products = tl.sum(u1 * x1, 1) + tl.sum(u2 * x2, 1) + tl.sum(u3 * x3, 1)
        mean = products[:, None] / width
        u1, u2, u3 = u1 - x1 * mean, u2 - x2 * mean, u3 - x3 * mean
        start = batch * stream[14] + token * stream[15] + head * stream[16]
        store_row(
            *(
                result_ptr,
                start,
                inside,
                layout,
                u1 * rstd,
                u2 * rstd,
                u3 * rstd,
                INTERLEAVED,
                PAIRS,
                REST,
            )
        )
    if partials_ptr is not None:
        start = (tl.zeros([1, 1], tl.int64) + chunk) * width
        sums = (
            tl.sum(first_sum, 0)[None, :],
            tl.sum(second_sum, 0)[None, :],
            tl.sum(rest_sum, 0)[None, :],
        )
        store_row(
            *(
                partials_ptr,
                start,
                start >= 0,
                layout,
                sums[0],
                sums[1],
                sums[2],
                INTERLEAVED,
                PAIRS,
                REST,
            )
        )
