"""Block patterns as block numbers, row * columns + column, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse.lists import (
    Blocks,
    count_of,
    join,
    list_ranges,
    no_masks,
    pack,
    sort_values,
    tidy,
    words_of,
)


class Grid(NamedTuple):
    """Lengths in tokens, the block size, and the device for tensors."""

    queries: int
    keys: int
    block: int
    device: torch.device

    @property
    def rows(self) -> int:
        return count_of(self.queries, self.block)

    @property
    def columns(self) -> int:
        return count_of(self.keys, self.block)

    def row(self) -> torch.Tensor:
        """Every row."""
        return torch.arange(self.rows, device=self.device)

    def column(self) -> torch.Tensor:
        """Every column."""
        return torch.arange(self.columns, device=self.device)

    @property
    def before(self) -> int:
        """The whole blocks of keys before the first query; negative if queries come before keys.

        The last query is aligned with the last key, as for `causal`.
        """
        return (self.keys - self.queries) // self.block

    def aligned(self) -> Grid:
        """The grid whose rows are aligned with columns. It has up to a block more queries."""
        return self._replace(queries=self.keys - self.before * self.block)

    def diagonal(self) -> torch.Tensor:
        """For every row of an aligned grid, the column on the diagonal; -1: before all keys."""
        return (self.row() + self.before).clamp(-1)


# --- Checks of arguments --------------------------------------------------------------------------

_BLOCKS = (16, 32, 64, 128)
_ATTENTION = ("bidirectional", "unidirectional")


def make_grid(
    seq_len: int | tuple[int, int], block: int, device: torch.device | str | None
) -> Grid:
    """Make the grid of these lengths. Raises an error that names the wrong argument."""
    pair = seq_len if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(pair) != 2 or not all(isinstance(n, Integral) and n >= 0 for n in pair):
        raise ArgumentError("BlockLayout", "seq_len", repr(seq_len), "tokens, or a pair of them")
    queries, keys = map(int, pair)
    if block not in _BLOCKS:
        raise ArgumentError("BlockLayout", "block", repr(block), " or ".join(map(str, _BLOCKS)))
    return Grid(queries, keys, block, torch.empty(0, device=device or "cpu").device)


def check_at_least(least: int, **values: Any) -> None:
    """Raise an error for the first value that is not an integer or is too small."""
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError("BlockLayout", name, repr(value), f"an int >= {least}")


def is_unidirectional(attention: str) -> bool:
    """Whether queries see no later keys."""
    if attention not in _ATTENTION:
        raise ArgumentError("BlockLayout", "attention", repr(attention), " or ".join(_ATTENTION))
    return attention == "unidirectional"


def match_grid(
    name: str,
    value: torch.Tensor,
    rows: int,
    columns: int,
    seq_len: int | tuple[int, int] | None,
    block: int,
) -> Grid:
    """Make the grid for a tensor of blocks. Without lengths all blocks are whole."""
    lengths = (rows * block, columns * block) if seq_len is None else seq_len
    grid = make_grid(lengths, block, value.device)
    if (grid.rows, grid.columns) != (rows, columns):
        accepted = f"one of {grid.rows} x {grid.columns} blocks of {block} tokens"
        raise ArgumentError("BlockLayout", name, f"of shape {list(value.shape)}", accepted)
    return grid


# --- Patterns of blocks ---------------------------------------------------------------------------
# Grids are aligned here, so that a pattern of few queries is the last rows of a longer pattern.


def list_spans(
    grid: Grid, first: torch.Tensor, end: torch.Tensor, step: int = 1, base: torch.Tensor | int = 0
) -> torch.Tensor:
    """List in every row the columns base + step * i for first <= i < end."""
    lengths = (end - first).clamp(min=0)
    row = grid.row().repeat_interleave(lengths)
    start = base if isinstance(base, int) else base[row]
    column = start + step * list_ranges(first, lengths)
    inside = (column >= 0) & (column < grid.columns)
    return (row * grid.columns + column)[inside]


def list_window(grid: Grid, blocks: int) -> torch.Tensor:
    """List the blocks around the diagonal, half of them on each side."""
    middle = grid.diagonal()
    return list_spans(grid, middle - blocks // 2, middle + blocks // 2 + 1)


def list_dilated_window(grid: Grid, blocks: int, dilation: int) -> torch.Tensor:
    """List every `dilation`-th block around the diagonal."""
    side = torch.full_like(grid.row(), blocks // 2)
    return list_spans(grid, -side, side + 1, dilation, grid.diagonal())


def list_strides(grid: Grid, stride: int) -> torch.Tensor:
    """List all blocks that are a multiple of `stride` from the diagonal."""
    middle = grid.diagonal()
    after = (grid.columns - 1 - middle).div(stride, rounding_mode="floor")
    return list_spans(grid, -(middle.clamp(min=0) // stride), after + 1, stride, middle)


def list_windows(grid: Grid, sizes: Sequence[int]) -> torch.Tensor:
    """List windows of these numbers of blocks along the diagonal. The last size repeats."""
    middle = grid.diagonal()
    lengths = torch.tensor(sizes, device=grid.device)
    ends = lengths.cumsum(0)
    beyond = middle - ends[-1]
    which = torch.searchsorted(ends, middle, right=True).clamp(max=len(sizes) - 1)
    again = beyond.clamp(min=0) // sizes[-1] * sizes[-1]
    begin = torch.where(beyond >= 0, ends[-1] + again, ends[which] - lengths[which])
    size = torch.where(beyond >= 0, sizes[-1], lengths[which])
    return list_spans(grid, begin, begin + size)


def list_columns(grid: Grid, columns: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """List the blocks of these columns, each in the rows from `first` on."""
    lengths = (grid.rows - first).clamp(min=0)
    return list_ranges(first, lengths) * grid.columns + columns.repeat_interleave(lengths)


def list_rows(grid: Grid, rows: torch.Tensor) -> torch.Tensor:
    """List all blocks of these rows."""
    return (rows[:, None] * grid.columns + grid.column()).flatten()


def list_indices(begins: Sequence[int], ends: Sequence[int] | None, limit: int) -> list[int]:
    """List the blocks of these ranges below the limit. Without `ends`, each range is one block."""
    begins = list(begins)
    ends = [begin + 1 for begin in begins] if ends is None else list(ends)
    if len(ends) != len(begins) or any(b < 0 or b >= e for b, e in zip(begins, ends, strict=True)):
        accepted = "as many ends as beginnings, each after its beginning"
        raise ArgumentError("BlockLayout", "global_block_indices", f"{begins} to {ends}", accepted)
    return sorted({i for b, e in zip(begins, ends, strict=True) for i in range(b, min(e, limit))})


def list_global_blocks(
    grid: Grid, chosen: Sequence[int], backward_only: bool, horizontal: bool
) -> list[torch.Tensor]:
    """List blocks that all rows see, or only rows from their own on.

    If they are horizontal, their rows also see all blocks.
    """
    column = torch.tensor(chosen, dtype=torch.int64, device=grid.device)
    column = column[column < grid.columns]
    row = column - grid.before
    first = row.clamp(min=0) if backward_only else torch.zeros_like(row)
    numbers = [list_columns(grid, column, first)]
    if horizontal:
        numbers.append(list_rows(grid, row[row >= 0]))
    return numbers


def draw_blocks(
    grid: Grid, blocks: int, heads: int, seed: int, backward_only: bool
) -> torch.Tensor:
    """Draw in every row of each head `blocks` distinct columns, or all that the row may see.

    Rows before the first query are drawn too, so that a row has the same blocks at any number of
    queries. Memory is proportional to the number of blocks drawn.
    """
    if grid.before > 0:
        number = draw_blocks(grid._replace(queries=grid.keys), blocks, heads, seed, backward_only)
        line, column = number // grid.columns, number % grid.columns
        head, row = line // grid.columns, line % grid.columns - grid.before
        return ((head * grid.rows + row) * grid.columns + column)[row >= 0]
    generator = torch.Generator(device=grid.device).manual_seed(seed)
    seen = grid.diagonal() + 1 if backward_only else torch.full_like(grid.row(), grid.columns)
    seen = seen.repeat(heads)
    near = min(2 * blocks, grid.columns)
    # With few columns to choose from, take the columns with the largest random numbers.
    few = (seen <= near).nonzero()
    order = torch.rand(len(few), near, generator=generator, device=grid.device)
    order = order.masked_fill(grid.column()[:near] >= seen[few], -1)
    best = order.topk(min(blocks, near))
    short = (few * grid.columns + best.indices)[best.values >= 0]
    # With many columns, draw independently, and redraw duplicates.
    kind = torch.int32 if len(seen) * grid.columns < 2**31 else torch.int64

    def draw(line: torch.Tensor, count: int) -> torch.Tensor:
        number = torch.empty(len(line), count, dtype=kind, device=grid.device)
        number.random_(0, 2**31 - 1, generator=generator).remainder_(seen[line].to(kind))
        return sort_values(number.add_((line * grid.columns).to(kind)).flatten())

    long = draw((seen > near).nonzero(), blocks)
    again = _mark_repeats(long)
    line, replacements = long[again] // grid.columns, [long[:0]]
    while len(line):
        other = draw(line[:, None], 1)
        known = _mark_repeats(other)
        for numbers in (long, *(r for r in replacements if len(r))):
            at = torch.searchsorted(numbers, other).clamp(max=len(numbers) - 1)
            known |= numbers[at] == other
        replacements.append(other[~known])
        line = other[known] // grid.columns
    long[again] = torch.cat(replacements)
    return torch.cat([short.to(kind), long])


def _mark_repeats(number: torch.Tensor) -> torch.Tensor:
    """Mark the sorted numbers that equal their predecessor."""
    again = torch.zeros_like(number, dtype=torch.bool)
    again[1:] = number[1:] == number[:-1]
    return again


def drop_first_queries(grid: Grid, blocks: Blocks) -> Blocks:
    """Drop the queries that the aligned grid has before the first query of this grid."""
    aligned = grid.aligned()
    skipped, words = aligned.queries - grid.queries, words_of(grid.block)
    if not skipped:
        return blocks
    # A row has the last queries of one row of the aligned grid, and the first queries of the next.
    whole = pack(torch.ones(1, grid.block, grid.block, dtype=torch.bool, device=grid.device))
    masks = torch.cat([whole, blocks.masks]).view(-1, grid.block, words)
    nothing = torch.zeros_like(masks)
    last = torch.cat([masks[:, skipped:], nothing[:, :skipped]], 1).flatten(1)
    first = torch.cat([nothing[:, skipped:], masks[:, :skipped]], 1).flatten(1)
    mask = torch.zeros_like(blocks.number) if blocks.mask is None else blocks.mask + 1
    line, column = blocks.number // grid.columns, blocks.number % grid.columns
    head, row = line // aligned.rows, line % aligned.rows

    def take(row: torch.Tensor, masks: torch.Tensor) -> Blocks:
        inside = (row >= 0) & (row < grid.rows)
        number = (head * grid.rows + row) * grid.columns + column
        return Blocks(number[inside], mask[inside], masks)

    return join(take(row, last), take(row - 1, first), grid.block, union=True)


# --- Patterns of tokens ---------------------------------------------------------------------------


def make_token_window(grid: Grid, before: int, after: int) -> Blocks:
    """Make a window that is exact in tokens. A negative number is no bound."""
    block, offset = grid.block, grid.keys - grid.queries
    low = None if before < 0 else offset - before
    high = None if after < 0 else offset + after
    row = grid.row()
    first = torch.zeros_like(row) if low is None else (row * block + low) // block
    end = torch.full_like(row, grid.columns)
    if high is not None:
        end = ((row + 1) * block - 1 + high).div(block, rounding_mode="floor") + 1
    first, end = first.clamp(0, grid.columns), end.clamp(0, grid.columns)
    number = list_spans(grid, first, end)
    return cut_band(grid, Blocks(number, None, no_masks(block, grid.device)), low, high)


def make_global_tokens(grid: Grid, tokens: torch.Tensor) -> Blocks:
    """Make the blocks of global tokens, given by their positions among the keys.

    Global tokens see all tokens and are seen by all. A block's bits follow from which of its
    queries and which of its keys are global.
    """

    def sort_blocks(
        length: int, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the blocks with global tokens, the kind of every block, and each kind's bits."""
        size = count_of(length, grid.block) * grid.block
        is_global = torch.zeros(size, dtype=torch.bool, device=grid.device)
        is_global[chosen[(chosen >= 0) & (chosen < length)]] = True
        is_global[length:] = is_global[length - 1 : length]  # so that the last block is full
        bits = is_global.view(-1, grid.block)
        some = bits.any(1).nonzero().squeeze(1)
        # The bits of a block without global tokens sort first.
        own = torch.cat([torch.zeros_like(bits[:1]), bits[some]])
        own, which = own.unique(dim=0, return_inverse=True)
        kind = torch.zeros(len(bits), dtype=torch.int64, device=grid.device)
        kind[some] = which[1:]
        return some, kind, own

    if not grid.rows or not grid.columns:
        return Blocks(tokens.new_empty(0), None, no_masks(grid.block, grid.device))
    rows, row_kind, queries = sort_blocks(grid.queries, tokens + grid.queries - grid.keys)
    columns, column_kind, keys = sort_blocks(grid.keys, tokens)
    numbers = [list_columns(grid, columns, torch.zeros_like(columns)), list_rows(grid, rows)]
    number = sort_values(torch.cat(numbers)).unique_consecutive()
    pair = row_kind[number // grid.columns] * len(keys) + column_kind[number % grid.columns]
    pair, mask = pair.unique(return_inverse=True)
    bits = queries[pair // len(keys)][:, :, None] | keys[pair % len(keys)][:, None, :]
    return tidy(Blocks(number, mask, pack(bits)), grid.block)


def cut_band(grid: Grid, blocks: Blocks, low: int | None, high: int | None) -> Blocks:
    """Restrict blocks to keys that are `low` to `high` tokens after their query.

    None means no bound. Whether a block is full, partial or empty depends only on its distance
    from the diagonal.
    """
    block, columns = grid.block, grid.columns
    number = blocks.number.long()
    row, column = number // columns % grid.rows, number % columns
    away = (column - row) * block
    least = -(2**62) if low is None else low
    most = 2**62 if high is None else high
    touches = (away + block - 1 >= least) & (away - block + 1 <= most)
    number, away = number[touches], away[touches]
    cut = (away - block + 1 < least) | (away + block - 1 > most)
    distances, which = away[cut].unique(return_inverse=True)
    at = torch.arange(block, device=grid.device)
    between = distances[:, None, None] + (at - at[:, None])
    masks = pack((between >= least) & (between <= most))
    before, own = len(blocks.masks), None if blocks.mask is None else blocks.mask[touches]
    if own is None:
        mask = torch.full_like(number, -1).masked_scatter_(cut, which)
        return tidy(Blocks(number, mask, masks), block)
    masks = torch.cat([blocks.masks, masks])
    pairs, both = torch.stack([own[cut], before + which], -1).unique(dim=0, return_inverse=True)
    left = torch.where(pairs[:, :1] < 0, -1, masks[pairs[:, 0]])
    mask = own.masked_scatter(cut, len(masks) + both)
    return tidy(Blocks(number, mask, torch.cat([masks, left & masks[pairs[:, 1]]])), block)


# (batch, head, queries, keys) -> whether a key takes part; FlexAttention's mask_mod.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Patch(NamedTuple):
    """Blocks, and the indices of their tokens, which broadcast to all pairs in these blocks."""

    number: torch.Tensor  # [rows, columns] of blocks
    batch: torch.Tensor
    head: torch.Tensor
    query: torch.Tensor  # [rows * block, 1], or [rows, block, 1] with one column
    key: torch.Tensor  # [1, columns * block], or [rows, 1, block]


def pairs_at_once(device: torch.device) -> int:
    """The most pairs of tokens to evaluate at once. On a CPU the pairs should stay in the cache."""
    return 2**18 if device.type == "cpu" else 2**24


def cut_grid(grid: Grid, batch: int, heads: int) -> Iterator[Patch]:
    """Cut all blocks into wide patches: loops along a whole row of keys are fastest."""
    blocks = pairs_at_once(grid.device) // grid.block**2
    across = max(min(blocks, grid.columns), 1)
    down = max(blocks // across, 1)
    query = torch.arange(grid.rows * grid.block, device=grid.device).clamp_(max=grid.queries - 1)
    key = torch.arange(grid.columns * grid.block, device=grid.device).clamp_(max=grid.keys - 1)
    row, column = grid.row()[:, None] * grid.columns, grid.column()
    for line in range(batch * heads):
        of_batch, of_head = torch.tensor(divmod(line, heads), device=grid.device)
        first = line * grid.rows * grid.columns
        for rows, queries in zip(
            row.split(down), query[:, None].split(down * grid.block), strict=True
        ):
            for columns, keys in zip(
                column.split(across), key[None].split(across * grid.block, 1), strict=True
            ):
                yield Patch(first + rows + columns, of_batch, of_head, queries, keys)


def cut_blocks(grid: Grid, number: torch.Tensor, heads: int = 1) -> Iterator[Patch]:
    """Cut the blocks with these numbers into patches, in order."""
    at = torch.arange(grid.block, device=grid.device)
    for some in number.split(pairs_at_once(grid.device) // grid.block**2):
        column, line = some % grid.columns, some // grid.columns
        query = ((line % grid.rows)[:, None] * grid.block + at).clamp(max=grid.queries - 1)
        key = (column[:, None] * grid.block + at).clamp(max=grid.keys - 1)
        head = (line // grid.rows)[:, None, None]
        yield Patch(some[:, None], head // heads, head % heads, query[:, :, None], key[:, None, :])


class _Growing:
    """Integers [n, 2] in one growing tensor.

    Many small tensors between large ones would fragment memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(2**10, 2, dtype=torch.int64, device=device)
        self._count = 0

    def add(self, pairs: torch.Tensor) -> None:
        end = self._count + len(pairs)
        if end > len(self._room):
            more = self._room.new_empty(end, 2)
            self._room = torch.cat([self._room[: self._count], more])
        self._room[self._count : end] = pairs
        self._count = end

    def columns(self) -> tuple[torch.Tensor, ...]:
        """The first and second numbers of all pairs."""
        return self._room[: self._count].unbind(1)


def evaluate(grid: Grid, patches: Iterable[Patch], function: MaskFunction) -> Blocks:
    """Find the blocks in which the function includes at least one key.

    Bits are stored only for partial blocks.
    """
    block, device = grid.block, grid.device
    pairs, bits = _Growing(device), []
    count = 0
    for number, batch, head, query, key in patches:
        visible = function(batch, head, query, key)
        if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
            actual = f"one that returns a {getattr(visible, 'dtype', type(visible).__name__)}"
            raise ArgumentError("BlockLayout", "mask_mod", actual, "one that returns booleans")
        visible = visible.expand(torch.broadcast_shapes(query.shape, key.shape)).contiguous()
        visible = visible.view(number.shape[0], block, number.shape[1], block)
        # View four booleans as one word: a block is empty if its largest word is 0.
        words = visible.view(torch.int32)
        nonempty = words.amax(1).amax(-1) > 0
        if not nonempty.any():
            continue
        cut = nonempty & (words.amin(1).amin(-1) < 0x01010101)
        mask = torch.full_like(number, -1)
        if cut.any():
            own, which = pack(visible.transpose(1, 2)[cut]).unique(dim=0, return_inverse=True)
            mask[cut] = count + which
            bits.append(own)
            count += len(own)
        pairs.add(torch.stack([number, mask], -1)[nonempty])
    number, mask = pairs.columns()
    if not bits:
        return Blocks(number.contiguous(), None, no_masks(block, device))
    return tidy(Blocks(number, mask, torch.cat(bits)), block)
