"""Which tiles a program of attention takes whose warps have roles, and the walks over lists."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from .gluon_names import gl, gluon

# A new length, batch or layout changes these.
INTEGERS = [
    *("lines", "lines_batch_stride", "lines_head_stride", "count", "planes", "together", "heads"),
    *("group", "first_head", "queries", "keys", "shift"),
]

NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def weights_of(exponents):
    """Attention's weights, at most 1, as `attention_parts.weights_of` says."""
    return gl.exp2(gl.minimum(exponents, 0.0, propagate_nan=NAN_STAYS))


@gluon.jit
def place_of(tile, planes, together, lines):
    """The plane of a tile and the rank of its line.

    Planes come in groups of `together`, whose keys and values fit the L2 cache. The longest lines
    of a group come first.
    """
    before = tile // (together * lines) * together
    here = gl.minimum(together, planes - before)
    inside = tile - before * lines
    return before + inside % here, inside // here


@gluon.jit
def row_walk(lines_ptr, entries_ptr, rank, keys, shift, BLOCK: gl.constexpr,
             CAUSAL: gl.constexpr):  # fmt: skip
    """The first query of a line, the place of its first entry, how many of its entries are seen by
    all of its queries, and how many are seen at all. Entries are sorted."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = lines_ptr + 4 * rank
    first, begin, end = gl.load(at) * BLOCK, gl.load(at + 1), gl.load(at + 3)
    clear, visible = keys // BLOCK, 2147483647
    if CAUSAL:
        clear = gl.minimum(clear, gl.maximum(first + shift + 1, 0) // BLOCK)
        visible = (gl.maximum(first + BLOCK + shift, 0) + BLOCK - 1) // BLOCK
    whole, total = 0, 0
    for start in range(begin, end, 128):
        number = start + gl.arange(0, 128, layout)
        partner = gl.load(entries_ptr + 2 * number, mask=number < end, other=2147483647)
        whole += gl.sum(gl.where(partner < clear, 1, 0), 0)
        total += gl.sum(gl.where(partner < visible, 1, 0), 0)
    return first, begin, whole, total


@gluon.jit
def column_walk(lines_ptr, entries_ptr, rank, keys, shift, BLOCK: gl.constexpr,
                CAUSAL: gl.constexpr):  # fmt: skip
    """The first key of a line, the place of the first entry that sees it, how many of these see
    only some of its keys, and how many entries there are from it on. Entries are sorted."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = lines_ptr + 4 * rank
    first, begin, end = gl.load(at) * BLOCK, gl.load(at + 1), gl.load(at + 3)
    hidden, crossing = 0, 0
    if CAUSAL:
        blind = gl.maximum(first - shift, 0) // BLOCK
        last = gl.minimum(first + BLOCK, keys) - 1
        clear = (gl.maximum(last - shift, 0) + BLOCK - 1) // BLOCK
        for start in range(begin, end, 128):
            number = start + gl.arange(0, 128, layout)
            partner = gl.load(entries_ptr + 2 * number, mask=number < end, other=2147483647)
            hidden += gl.sum(gl.where(partner < blind, 1, 0), 0)
            crossing += gl.sum(gl.where(partner < clear, 1, 0), 0)
    return first, begin + hidden, crossing - hidden, end - begin - hidden


@gluon.jit
def keys_of(entries_ptr, begin, n, entries, N: gl.constexpr, BLOCK: gl.constexpr):
    """The first key of the n-th tile of N keys of a line, and of its second block.

    A tile has a part of a block, or two blocks; the second one of an odd number is past all keys.
    """
    if N > BLOCK:
        last = entries - 1
        at = begin + gl.minimum(2 * n, gl.maximum(last, 0))
        first = gl.load(entries_ptr + 2 * at, mask=entries > 0, other=0) * BLOCK
        has_second = 2 * n < last
        second = gl.load(entries_ptr + 2 * at + 2, mask=has_second, other=0) * BLOCK
        return first, gl.where(has_second, second, 1073741824)
    else:
        SPLIT: gl.constexpr = BLOCK // N
        at = begin + gl.minimum(n // SPLIT, gl.maximum(entries - 1, 0))
        first = gl.load(entries_ptr + 2 * at, mask=entries > 0, other=0) * BLOCK + n % SPLIT * N
        return first, first + N // 2


@gluon.jit
def hide(s, first_keys, first_query, shift, limit, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """Scores, -inf where a key is past the limit or after its query. See `keys_of`."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    column = gl.arange(0, N, gl.SliceLayout(0, layout))
    first, second = first_keys
    key = gl.where(column < N // 2, first, second - N // 2) + column
    if CAUSAL:
        query = first_query + shift + gl.arange(0, M, gl.SliceLayout(1, layout))
        last = gl.minimum(query, limit - 1)
        return gl.where(key[None, :] <= last[:, None], s, -float("inf"))
    else:
        return gl.where((key < limit)[None, :], s, -float("inf"))


@gluon.jit
def heads_of(key_head, heads, group, first_head):
    """The first of the query heads that are here and share a head of keys, and their end."""
    begin = gl.maximum(key_head * group - first_head, 0)
    return begin, gl.minimum(key_head * group + group - first_head, heads)


@gluon.jit
def tell(memory, number, first, begin, checked, total):
    """The producer tells consumers five numbers."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    at = gl.arange(0, 8, layout)
    told = gl.where(at == 0, number, gl.where(at == 1, first, begin))
    told = gl.where(at > 2, gl.where(at == 3, checked, total), told)
    memory.store(told)


@gluon.jit
def hear(memory):
    """The numbers that the producer told."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    told = memory.load(layout)
    at = gl.arange(0, 8, layout)
    return (
        gl.sum(gl.where(at == 0, told, 0), 0),
        gl.sum(gl.where(at == 1, told, 0), 0),
        gl.sum(gl.where(at == 2, told, 0), 0),
        gl.sum(gl.where(at == 3, told, 0), 0),
        gl.sum(gl.where(at == 4, told, 0), 0),
    )
