"""The lists of a block layout in Triton: the tokens of a program's walk, and which of them it sees.

A program has a tile of a line, which is a row of blocks, or a column of blocks in the transpose. It
walks over the tokens of the line's entries, a tile at a time. A tile may be wider than a block, and
then takes tokens of several entries. So kernels choose their tiles independently of the block.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def line_of(lines_ptr, rank):
    """A line of the table: its index, where its entries and its partial entries begin, the end."""
    at = lines_ptr + 4 * rank
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def rank_of(lines_ptr, lines, which):
    """The place of a line in the table."""
    places = tl.zeros([128], tl.int32)
    for start in range(0, lines, 128):
        at = start + tl.arange(0, 128)
        number = tl.load(lines_ptr + 4 * at, mask=at < lines, other=-1)
        places += tl.where(number == which, at, 0)
    return tl.sum(places)


@triton.jit
def entries_before(entries_ptr, begin, end, limit):
    """The number of entries, which are sorted, whose partner is below the limit."""
    counts = tl.zeros([128], tl.int32)
    for start in range(begin, end, 128):
        at = start + tl.arange(0, 128)
        partner = tl.load(entries_ptr + 2 * at, mask=at < end, other=2147483647)
        counts += (partner < limit).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def _entry(walk, start, STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The places of the entries of COUNT tokens from `start` on, STEP apart, whether they belong to
    the walk, and whether their blocks are partial.

    If all the tokens lie within one entry, there is one result for all, otherwise one for each.

    A walk has two parts, because Triton 3.6 returns no None in a tuple. The first is the entries,
    or None if an entry's place is its partner. The second is (first, split, gap, total): `total`
    entries begin at `first`; from the `split`-th on they are partial and lie `gap` places further.
    """
    first, split, gap, total = walk[1]
    token = start
    if STEP * COUNT > BLOCK:
        token = start + tl.arange(0, COUNT) * STEP
    number = token // BLOCK
    is_partial = number >= split
    return first + number + tl.where(is_partial, gap, 0), number < total, is_partial


@triton.jit
def partner_of(walk, start, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The partner of the entry of COUNT tokens from `start` on, or 0 past the end of the walk.

    Loops look it up an iteration ahead: addresses of tokens depend on it, and no thread does
    anything else while it waits. Tokens of several entries get 0, and `tokens` looks theirs up.
    """
    at, inside, _ = _entry(walk, start, 1, COUNT, BLOCK)
    if COUNT > BLOCK:
        partner = tl.zeros([], tl.int32)
    elif walk[0] is None:
        partner = at
    else:
        partner = tl.load(walk[0] + 2 * at, mask=inside, other=0)
    return partner


@triton.jit
def tokens(
    walk, start, partner, STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Positions of tokens in the sequence, and whether they belong to the walk; see `_entry`.

    `partner` is that of their entry, as `partner_of` returns it.
    """
    at, inside, _ = _entry(walk, start, STEP, COUNT, BLOCK)
    offset = tl.arange(0, COUNT) * STEP
    if STEP * COUNT > BLOCK:
        if walk[0] is None:
            partner = at
        elif CHECKED:
            partner = tl.load(walk[0] + 2 * at, mask=inside, other=0)
        else:
            partner = tl.load(walk[0] + 2 * at)
        return partner * BLOCK + (start + offset) % BLOCK, inside
    else:
        return partner * BLOCK + start % BLOCK + offset, inside


@triton.jit
def masks_of(walk, start, STEP: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The masks of tokens, as in `_entry`; -1 where queries see every key."""
    at, inside, is_partial = _entry(walk, start, STEP, COUNT, BLOCK)
    return tl.load(walk[0] + 2 * at + 1, mask=inside & is_partial, other=-1)


@triton.jit
def bits(masks_ptr, mask, query, first_key, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """[queries, KEYS] booleans of masks, which broadcast to queries and groups of keys.

    A group shares a word of a mask; `first_key` are the groups' first keys.
    """
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    GROUP: tl.constexpr = KEYS // first_key.shape[0]
    place = (query % BLOCK * WORDS)[:, None] + (first_key % BLOCK // 32)[None, :]
    mask = mask + tl.zeros(place.shape, tl.int32)
    at = mask.to(tl.int64) * (BLOCK * WORDS) + place
    word = tl.load(masks_ptr + at, mask=mask >= 0, other=-1)
    shift = tl.arange(0, GROUP)[None, None, :]
    if GROUP < 32 and GROUP < BLOCK:  # a part of a word
        shift += (first_key % 32)[None, :, None]
    return tl.reshape((word[:, :, None] >> shift) & 1, [query.shape[0], KEYS]) != 0


@triton.jit
def row_walks(
    lists, rank, first, queries, keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Walks over the keys that a tile of queries sees: one without checks, and one with checks.

    `first` is the tile's first query within its row of blocks; the result has the query too.
    """
    lines_ptr, entries_ptr, lines = lists
    shift = keys - queries
    if lines_ptr is None:
        # The last rows are the longest under the causal mask.
        which = lines - 1 - rank if CAUSAL else rank
        begin, partial, end = 0, tl.cdiv(keys, BLOCK), tl.cdiv(keys, BLOCK)
    else:
        which, begin, partial, end = line_of(lines_ptr, rank)
    first += which * BLOCK
    clear, visible = keys // BLOCK, tl.cdiv(keys, BLOCK)  # blocks without a check, and in all
    if CAUSAL:
        clear = tl.minimum(clear, tl.maximum(first + shift + 1, 0) // BLOCK)
        visible = tl.minimum(visible, tl.cdiv(tl.maximum(first + ROWS + shift, 0), BLOCK))
    if lines_ptr is None:
        whole, full, partials = clear, visible, 0
    elif CAUSAL:
        whole = entries_before(entries_ptr, begin, partial, clear)
        full = entries_before(entries_ptr, begin, partial, visible)
        partials = entries_before(entries_ptr, partial, end, visible)
    else:
        full, partials = partial - begin, end - partial
        last = tl.load(entries_ptr + 2 * (partial - 1), mask=full > 0, other=0)
        whole = full - ((full > 0) & (last >= clear)).to(tl.int32)
    TAKEN: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    whole = whole // TAKEN * TAKEN
    if first >= queries:
        whole, full, partials = 0, 0, 0
    rest = full - whole
    unchecked = (begin, whole, 0, whole)
    checked = (begin + whole, rest, partial - begin - full, rest + partials)
    return first, unchecked, checked


@triton.jit
def add_up(
    ADD: tl.constexpr, walk, begin, state, given, options, TAKEN: tl.constexpr,
    BLOCK: tl.constexpr, CHECKED: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Take a walk from its entry `begin` on, TAKEN tokens at a time: ADD returns the next state.

    ADD gets what is `given` and the compile-time `options`, too.
    """
    partner = partner_of(walk, begin * BLOCK, TAKEN, BLOCK)
    for start in tl.range(begin * BLOCK, walk[1][3] * BLOCK, TAKEN, num_stages=STAGES):
        coming = partner_of(walk, start + TAKEN, TAKEN, BLOCK)
        state = ADD(walk, start, partner, state, *given, TAKEN, BLOCK, CHECKED, *options)
        partner = coming
    return state


@triton.jit
def column_walks(
    lists, rank, first, queries, keys, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Walks over the queries that see a tile of keys. Rows past the last query add nothing."""
    lines_ptr, entries_ptr, _ = lists
    if lines_ptr is None:
        which, begin, partial, end = rank, 0, tl.cdiv(queries, BLOCK), tl.cdiv(queries, BLOCK)
    else:
        which, begin, partial, end = line_of(lines_ptr, rank)
    first += which * BLOCK
    hidden, clear, hidden_partials = 0, 0, 0  # rows that see nothing, that do not see all
    if CAUSAL:
        shift = keys - queries
        last = tl.minimum(first + COLUMNS, keys) - 1
        hidden = tl.maximum(first - shift, 0) // BLOCK
        clear = tl.cdiv(tl.maximum(last - shift, 0), BLOCK)
        if lines_ptr is None:
            hidden, clear = tl.minimum(hidden, partial), tl.minimum(clear, partial)
        else:
            hidden_partials = entries_before(entries_ptr, partial, end, hidden)
            clear = entries_before(entries_ptr, begin, partial, clear)
            hidden = entries_before(entries_ptr, begin, partial, hidden)
    crossing, whole = clear - hidden, partial - begin - clear
    partials = end - partial - hidden_partials
    if first >= keys:
        crossing, whole, partials = 0, 0, 0
    unchecked = (begin + clear, whole, 0, whole)
    gap = partial + hidden_partials - begin - clear
    checked = (begin + hidden, crossing, gap, crossing + partials)
    return first, unchecked, checked


# --- Pieces of long lines, see dkv.py ---


@triton.jit
def _pieces_beyond_first(lines_ptr, start, lines, heads, most, limit):
    """How many pieces beyond the first 128 lines have, and which lines: from `start` on.

    Only lines among the first `limit` are divided, so that extra places suffice for a table in any
    order.
    """
    at = start + tl.arange(0, 128)
    inside = at < lines
    begin = tl.load(lines_ptr + 4 * at + 1, mask=inside, other=0)
    end = tl.load(lines_ptr + 4 * at + 3, mask=inside, other=0)
    more = tl.maximum(tl.cdiv((end - begin) * heads, most) - 1, 0)
    return at, tl.where(at < limit, more, 0)


@triton.jit
def longest_piece(lines_ptr, lines, heads, extras, least):
    """How many entries, of all heads that share a line, a piece has at most.

    So many that all lines of the table together have no more than `extras` beyond their first.
    """
    total = tl.zeros([], tl.int64)
    for start in range(0, lines, 128):
        at = start + tl.arange(0, 128)
        begin = tl.load(lines_ptr + 4 * at + 1, mask=at < lines, other=0)
        end = tl.load(lines_ptr + 4 * at + 3, mask=at < lines, other=0)
        total += tl.sum((end - begin).to(tl.int64), 0) * heads
    return tl.maximum(tl.cdiv(total, extras), least).to(tl.int32)


@triton.jit
def pieces_of(lines_ptr, rank, lines, heads, extras, least, EVEN: tl.constexpr):
    """How many pieces a line has, and how many extra ones the lines before it have."""
    if EVEN:
        pieces = 1 + extras // lines
        before = rank * (pieces - 1)
    else:
        most = longest_piece(lines_ptr, lines, heads, extras, least)
        limit = tl.minimum(lines, extras)
        pieces, before = 1, 0
        for start in range(0, tl.minimum(rank + 1, limit), 128):
            at, more = _pieces_beyond_first(lines_ptr, start, lines, heads, most, limit)
            before += tl.sum(tl.where(at < rank, more, 0), 0)
            pieces += tl.sum(tl.where(at == rank, more, 0), 0)
    return pieces, before


@triton.jit
def piece_of(lines_ptr, index, lines, heads, extras, least, EVEN: tl.constexpr):
    """The line of a program, which of its pieces, and how many it has.

    The first programs take the extra pieces, the others the first piece of each line. The line of
    an extra piece that no line needs is `lines`.
    """
    if EVEN:
        pieces = 1 + extras // lines
        beyond = tl.maximum(pieces - 1, 1)
        rank = tl.where(index < extras, index // beyond, index - extras)
        piece = tl.where(index < extras, index % beyond + 1, 0)
    else:
        most = longest_piece(lines_ptr, lines, heads, extras, least)
        limit = tl.minimum(lines, extras)
        passed, before, until, own = 0, 0, 0, 0
        for start in range(0, limit, 128):
            at, more = _pieces_beyond_first(lines_ptr, start, lines, heads, most, limit)
            upto = until + tl.cumsum(more, 0)
            behind = (upto <= index) & (at < limit)
            passed += tl.sum(behind.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(behind, upto, 0), 0))
            own += tl.sum(tl.where(at == index - extras, more, 0), 0)
            until += tl.sum(more, 0)
        is_extra = index < extras
        rank = tl.where(is_extra, tl.where(index < until, passed, lines), index - extras)
        piece = tl.where(is_extra, index - before + 1, 0)
        pieces = own + 1
        if is_extra:
            # At least two: this piece and the first.
            pieces = 2
            if rank < lines:
                begin, end = tl.load(lines_ptr + 4 * rank + 1), tl.load(lines_ptr + 4 * rank + 3)
                pieces = tl.cdiv((end - begin) * heads, most)
    return rank, piece, pieces


@triton.jit
def part_of(walk, low, high, before):
    """Clip this walk to entries [low, high) of the concatenated walks; `before` entries precede it.

    Returns the number of the first entry, and the walk up to the last.
    """
    first, split, gap, total = walk
    start = tl.minimum(tl.maximum(low - before, 0), total)
    end = tl.minimum(tl.maximum(high - before, 0), total)
    return start, (first, split, gap, end)
