"""Which tiles a program with specialised warps takes, and its walks over lists."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from ..gluon_names import gl, gluon

# A new length, batch or layout changes these.
INTEGERS = [
    *("lines", "lines_batch_stride", "lines_head_stride", "count", "planes", "together", "heads"),
    *("group", "first_head", "queries", "keys", "shift"),
]

LOG2_E = gl.constexpr(1.4426950408889634)
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
    """The first query of a row of blocks, and the walk over its entries that any query sees.

    Entries of full blocks come first, those of partial blocks after them; both are sorted. A walk
    is (begin, turned, whole, full, gap, total): `total` entries, see `entry_of`, of which `full`
    are of full blocks and `whole` need no check.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = lines_ptr + 4 * rank
    first, begin, partial, end = (
        gl.load(at) * BLOCK, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    )  # fmt: skip
    clear, visible = keys // BLOCK, 2147483647
    if CAUSAL:
        clear = gl.minimum(clear, gl.maximum(first + shift + 1, 0) // BLOCK)
        visible = (gl.maximum(first + BLOCK + shift, 0) + BLOCK - 1) // BLOCK
    whole, full, total = 0, 0, 0
    for start in range(begin, end, 128):
        number = start + gl.arange(0, 128, layout)
        partner = gl.load(entries_ptr + 2 * number, mask=number < end, other=2147483647)
        is_full = number < partial
        whole += gl.sum(gl.where(is_full & (partner < clear), 1, 0), 0)
        full += gl.sum(gl.where(is_full & (partner < visible), 1, 0), 0)
        total += gl.sum(gl.where(partner < visible, 1, 0), 0)
    return first, (begin, 0, whole, full, partial - begin - full, total)


@gluon.jit
def column_walk(lines_ptr, entries_ptr, rank, keys, shift, BLOCK: gl.constexpr,
                CAUSAL: gl.constexpr):  # fmt: skip
    """The first key of a column of blocks, and the walk over its entries that see any key.

    See `row_walk`. Those that see only some keys come first in the list and last in the walk.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = lines_ptr + 4 * rank
    first, begin, partial, end = (
        gl.load(at) * BLOCK, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    )  # fmt: skip
    hidden, hidden_partials, crossing = 0, 0, 0
    if CAUSAL:
        blind = gl.maximum(first - shift, 0) // BLOCK
        last = gl.minimum(first + BLOCK, keys) - 1
        clear = (gl.maximum(last - shift, 0) + BLOCK - 1) // BLOCK
        for start in range(begin, end, 128):
            number = start + gl.arange(0, 128, layout)
            partner = gl.load(entries_ptr + 2 * number, mask=number < end, other=2147483647)
            is_full = number < partial
            hidden += gl.sum(gl.where(is_full & (partner < blind), 1, 0), 0)
            hidden_partials += gl.sum(gl.where(partner < blind, 1, 0), 0)
            crossing += gl.sum(gl.where(is_full & (partner < clear), 1, 0), 0)
        hidden_partials -= hidden
        crossing -= hidden
    full = partial - begin - hidden
    total = full + end - partial - hidden_partials
    return first, (begin + hidden, crossing, full - crossing, full, hidden_partials, total)


@gluon.jit
def entry_of(entries_ptr, walk, n):
    """The partner and the mask of a walk's n-th entry: -1 where the block is full.

    Past the last entry, a block that is past all tokens.
    """
    begin, turned, _whole, full, gap, total = walk
    among_full = n + turned
    among_full -= gl.where(among_full >= full, full, 0)
    at = begin + gl.where(n < full, among_full, n + gap)
    partner = gl.load(entries_ptr + 2 * at, mask=n < total, other=8388608)
    is_partial = (n >= full) & (n < total)
    return partner, gl.load(entries_ptr + 2 * at + 1, mask=is_partial, other=-1)


@gluon.jit
def keys_of(entries_ptr, walk, n, N: gl.constexpr, BLOCK: gl.constexpr):
    """Where both halves of a walk's n-th tile of N keys begin, and their masks.

    A tile has a part of a block, or two blocks.
    """
    if N > BLOCK:
        first, mask = entry_of(entries_ptr, walk, 2 * n)
        second, other_mask = entry_of(entries_ptr, walk, 2 * n + 1)
        return first * BLOCK, second * BLOCK, mask, other_mask
    else:
        SPLIT: gl.constexpr = BLOCK // N
        partner, mask = entry_of(entries_ptr, walk, n // SPLIT)
        first = partner * BLOCK + n % SPLIT * N
        return first, first + N // 2, mask, mask


# --- Which query sees which key -------------------------------------------------------------------
#
# The producer lays it into shared memory, 32 keys a word, for tiles that need a check.


@gluon.jit
def seen_keys(masks_ptr, mask, query, key, keys, shift, BLOCK: gl.constexpr,
              CAUSAL: gl.constexpr):  # fmt: skip
    """Words for queries: bit i says whether one sees the i-th key from `key` on."""
    end = keys + 0 * query
    if CAUSAL:
        end = gl.minimum(end, query + shift + 1)
    count = gl.minimum(gl.maximum(end - key, 0), 32)
    word = gl.where(count == 32, -1, (1 << count) - 1)
    if masks_ptr is not None:
        WORDS: gl.constexpr = BLOCK // 32
        at = mask * (BLOCK * WORDS) + query % BLOCK * WORDS + key % BLOCK // 32
        word = word & gl.load(masks_ptr + at, mask=at >= 0, other=-1)
    return word


@gluon.jit
def seen_of_rows(masks_ptr, tile, first_query, keys, shift, BLOCK: gl.constexpr, N: gl.constexpr,
                 CAUSAL: gl.constexpr):  # fmt: skip
    """[BLOCK, N / 32] words for the queries of a row of blocks and a tile of `keys_of`."""
    layout: gl.constexpr = gl.BlockedLayout([1, N // 32], [32, 1], [1, 1], [1, 0])
    first, second, mask, other_mask = tile
    query = (first_query + gl.arange(0, BLOCK, gl.SliceLayout(1, layout)))[:, None]
    word = gl.arange(0, N // 32, gl.SliceLayout(0, layout))[None, :]
    is_first = word < N // 64
    key = gl.where(is_first, first, second - N // 2) + 32 * word
    mask = gl.where(is_first, mask, other_mask)
    return seen_keys(masks_ptr, mask, query, key, keys, shift, BLOCK, CAUSAL)


@gluon.jit
def seen_of_columns(masks_ptr, mask, first_query, first_key, keys, shift, BLOCK: gl.constexpr,
                    M: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """[BLOCK / 32, M] words for M queries and the keys of a column of blocks."""
    layout: gl.constexpr = gl.BlockedLayout([1, M // 32], [1, 32], [1, 1], [1, 0])
    query = (first_query + gl.arange(0, M, gl.SliceLayout(0, layout)))[None, :]
    key = (first_key + 32 * gl.arange(0, BLOCK // 32, gl.SliceLayout(1, layout)))[:, None]
    return seen_keys(masks_ptr, mask, query, key, keys, shift, BLOCK, CAUSAL)


@gluon.jit
def sees_keys(words, N: gl.constexpr, layout: gl.constexpr):
    """[64, N] booleans of words that are loaded in `words_of_rows(N)`."""
    parts: gl.constexpr = _parts_of_rows(N)
    bit = 1 << gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, parts)))
    seen = (words[:, :, None] & bit[None, None, :]) != 0
    return gl.convert_layout(seen.reshape([64, N]), layout, assert_trivial=True)


@gluon.jit
def seen_by_queries(words, M: gl.constexpr, layout: gl.constexpr):
    """[64, M] booleans, of keys by queries, of words that are loaded in `words_of_columns(M)`."""
    parts: gl.constexpr = _parts_of_columns(M)
    bit = 1 << gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, parts)))
    seen = (words[:, None, :] & bit[None, :, None]) != 0
    return gl.convert_layout(seen.reshape([64, M]), layout, assert_trivial=True)


@gluon.constexpr_function
def _parts_of_rows(N):
    """The layout of a product [64, N] as [64, N / 32, 32]: a thread's words are its own rows'."""
    wider = [[0, 1, 0], [0, 2, 0]][: N // 64]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], *wider],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, N // 32, 32],
    )  # fmt: skip


@gluon.constexpr_function
def _parts_of_columns(M):
    """The layout of a product [64, M] as [2, 32, M]."""
    wider = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64]][: M // 32 + 1]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], *wider],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [1, 0, 0]], [], [2, 32, M],
    )  # fmt: skip


@gluon.constexpr_function
def words_of_rows(N):
    return gl.SliceLayout(2, _parts_of_rows(N))


@gluon.constexpr_function
def words_of_columns(M):
    return gl.SliceLayout(1, _parts_of_columns(M))


@gluon.jit
def heads_of(key_head, heads, group, first_head):
    """The first of the query heads that are here and share a head of keys, and their end."""
    begin = gl.maximum(key_head * group - first_head, 0)
    return begin, gl.minimum(key_head * group + group - first_head, heads)


@gluon.jit
def tell(memory, plane, first, whole, total):
    """The producer tells consumers four numbers."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = gl.arange(0, 4, layout)
    told = gl.where(at < 2, gl.where(at == 0, plane, first), gl.where(at == 2, whole, total))
    memory.store(told)


@gluon.jit
def hear(memory):
    """The numbers that the producer told."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    told = memory.load(layout)
    at = gl.arange(0, 4, layout)
    return (
        gl.sum(gl.where(at == 0, told, 0), 0),
        gl.sum(gl.where(at == 1, told, 0), 0),
        gl.sum(gl.where(at == 2, told, 0), 0),
        gl.sum(gl.where(at == 3, told, 0), 0),
    )
