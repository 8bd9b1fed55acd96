"""Block patterns as block numbers, row * columns + column, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse.lists import (
    Blocks,
    count_of,
    in_order,
    joined,
    no_masks,
    packed,
    ranges,
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
        """The grid whose rows are aligned with columns: it has up to a block more queries."""
        return self._replace(queries=self.keys - self.before * self.block)

    def diagonal(self) -> torch.Tensor:
        """For every row of an aligned grid, the column beside it; -1 means before all keys."""
        return (self.row() + self.before).clamp(-1)


# --- Patterns of blocks ---------------------------------------------------------------------------
# Their grids are aligned, so that the rows of fewer queries are the last ones of more queries.


def spans(
    grid: Grid, first: torch.Tensor, end: torch.Tensor, step: int = 1, base: torch.Tensor | int = 0
) -> torch.Tensor:
    """In every row, the columns base + step * i for first <= i < end."""
    lengths = (end - first).clamp(min=0)
    row = grid.row().repeat_interleave(lengths)
    start = base if isinstance(base, int) else base[row]
    column = start + step * ranges(first, lengths)
    there = (column >= 0) & (column < grid.columns)
    return (row * grid.columns + column)[there]


def window(grid: Grid, blocks: int) -> torch.Tensor:
    """The blocks around the diagonal, half of them on each side."""
    middle = grid.diagonal()
    return spans(grid, middle - blocks // 2, middle + blocks // 2 + 1)


def dilated(grid: Grid, blocks: int, dilation: int) -> torch.Tensor:
    """Every `dilation`-th block around the diagonal."""
    side = torch.full_like(grid.row(), blocks // 2)
    return spans(grid, -side, side + 1, dilation, grid.diagonal())


def strides(grid: Grid, stride: int) -> torch.Tensor:
    """All blocks that are a multiple of `stride` from the diagonal."""
    middle = grid.diagonal()
    after = (grid.columns - 1 - middle).div(stride, rounding_mode="floor")
    return spans(grid, -(middle.clamp(min=0) // stride), after + 1, stride, middle)


def windows(grid: Grid, sizes: Sequence[int]) -> torch.Tensor:
    """Windows of these numbers of blocks along the diagonal. The last size repeats."""
    middle = grid.diagonal()
    listed = torch.tensor(sizes, device=grid.device)
    ends = listed.cumsum(0)
    beyond = middle - ends[-1]
    which = torch.searchsorted(ends, middle, right=True).clamp(max=len(sizes) - 1)
    again = beyond.clamp(min=0) // sizes[-1] * sizes[-1]
    begin = torch.where(beyond >= 0, ends[-1] + again, ends[which] - listed[which])
    size = torch.where(beyond >= 0, sizes[-1], listed[which])
    return spans(grid, begin, begin + size)


def chosen_columns(grid: Grid, columns: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """These columns, each in the rows from `first` on."""
    lengths = (grid.rows - first).clamp(min=0)
    return ranges(first, lengths) * grid.columns + columns.repeat_interleave(lengths)


def chosen_rows(grid: Grid, rows: torch.Tensor) -> torch.Tensor:
    """All of these rows."""
    return (rows[:, None] * grid.columns + grid.column()).flatten()


def seen_by_all(
    grid: Grid, chosen: Sequence[int], backward_only: bool, horizontal: bool
) -> list[torch.Tensor]:
    """Blocks that all rows see, or only rows from their own on; horizontal ones also see all."""
    column = torch.tensor(chosen, dtype=torch.int64, device=grid.device)
    column = column[column < grid.columns]
    row = column - grid.before
    first = row.clamp(min=0) if backward_only else torch.zeros_like(row)
    found = [chosen_columns(grid, column, first)]
    if horizontal:
        found.append(chosen_rows(grid, row[row >= 0]))
    return found


def random(grid: Grid, blocks: int, heads: int, seed: int, backward_only: bool) -> torch.Tensor:
    """In every row of each head, `blocks` distinct columns, or all that the row may see.

    Rows before the first query are drawn too, so that a row has the same blocks at any number of
    queries. Memory is proportional to the number of blocks drawn.
    """
    if grid.before > 0:
        number = random(grid._replace(queries=grid.keys), blocks, heads, seed, backward_only)
        line, column = number // grid.columns, number % grid.columns
        head, row = line // grid.columns, line % grid.columns - grid.before
        return ((head * grid.rows + row) * grid.columns + column)[row >= 0]
    generator = torch.Generator(device=grid.device).manual_seed(seed)
    seen = grid.diagonal() + 1 if backward_only else torch.full_like(grid.row(), grid.columns)
    seen = seen.repeat(heads)
    near = min(2 * blocks, grid.columns)
    # Few columns to choose from: take those with the largest random numbers.
    few = (seen <= near).nonzero()
    order = torch.rand(len(few), near, generator=generator, device=grid.device)
    order = order.masked_fill(grid.column()[:near] >= seen[few], -1)
    best = order.topk(min(blocks, near))
    short = (few * grid.columns + best.indices)[best.values >= 0]
    # Many columns: draw independently, and redraw duplicates.
    kind = torch.int32 if len(seen) * grid.columns < 2**31 else torch.int64

    def draw(line: torch.Tensor, count: int) -> torch.Tensor:
        found = torch.empty(len(line), count, dtype=kind, device=grid.device)
        found.random_(0, 2**31 - 1, generator=generator).remainder_(seen[line].to(kind))
        return in_order(found.add_((line * grid.columns).to(kind)).flatten())

    drawn = draw((seen > near).nonzero(), blocks)
    again = _repeats(drawn)
    line, found = drawn[again] // grid.columns, [drawn[:0]]
    while len(line):
        other = draw(line[:, None], 1)
        known = _repeats(other)
        for part in (drawn, *(p for p in found if len(p))):
            known |= part[torch.searchsorted(part, other).clamp(max=len(part) - 1)] == other
        found.append(other[~known])
        line = other[known] // grid.columns
    drawn[again] = torch.cat(found)
    return torch.cat([short.to(kind), drawn])


def _repeats(number: torch.Tensor) -> torch.Tensor:
    """Which sorted numbers equal their predecessor."""
    again = torch.zeros_like(number, dtype=torch.bool)
    again[1:] = number[1:] == number[:-1]
    return again


def without_first(grid: Grid, blocks: Blocks) -> Blocks:
    """The blocks of this grid's queries, from those of the grid that is aligned."""
    aligned = grid.aligned()
    skipped, words = aligned.queries - grid.queries, words_of(grid.block)
    if not skipped:
        return blocks
    # A row has the last queries of one row of the aligned grid, and the first ones of the next.
    whole = packed(torch.ones(1, grid.block, grid.block, dtype=torch.bool, device=grid.device))
    masks = torch.cat([whole, blocks.masks]).view(-1, grid.block, words)
    nothing = torch.zeros_like(masks)
    last = torch.cat([masks[:, skipped:], nothing[:, :skipped]], 1).flatten(1)
    first = torch.cat([nothing[:, skipped:], masks[:, :skipped]], 1).flatten(1)
    mask = torch.zeros_like(blocks.number) if blocks.mask is None else blocks.mask + 1
    line, column = blocks.number // grid.columns, blocks.number % grid.columns
    head, row = line // aligned.rows, line % aligned.rows

    def part(row: torch.Tensor, masks: torch.Tensor) -> Blocks:
        there = (row >= 0) & (row < grid.rows)
        return Blocks(((head * grid.rows + row) * grid.columns + column)[there], mask[there], masks)

    return joined(part(row, last), part(row - 1, first), grid.block, union=True)


# --- Patterns of tokens ---------------------------------------------------------------------------


def global_tokens(grid: Grid, tokens: torch.Tensor) -> Blocks:
    """Tokens that see all tokens and are seen by all, given by their positions among the keys.

    A block's bits follow from which of its queries and which of its keys are such tokens.
    """

    def kinds(length: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The blocks with such tokens, the kind of every block, and each kind's bits."""
        size = count_of(length, grid.block) * grid.block
        is_global = torch.zeros(size, dtype=torch.bool, device=grid.device)
        is_global[chosen[(chosen >= 0) & (chosen < length)]] = True
        is_global[length:] = is_global[length - 1 : length]  # to be a full block at the end
        bits = is_global.view(-1, grid.block)
        some = bits.any(1).nonzero().squeeze(1)
        # Bits of a block without such tokens sort first.
        own = torch.cat([torch.zeros_like(bits[:1]), bits[some]])
        own, which = own.unique(dim=0, return_inverse=True)
        kind = torch.zeros(len(bits), dtype=torch.int64, device=grid.device)
        kind[some] = which[1:]
        return some, kind, own

    if not grid.rows or not grid.columns:
        return Blocks(tokens.new_empty(0), None, no_masks(grid.block, grid.device))
    rows, row_kind, queries = kinds(grid.queries, tokens + grid.queries - grid.keys)
    columns, column_kind, keys = kinds(grid.keys, tokens)
    numbers = [chosen_columns(grid, columns, torch.zeros_like(columns)), chosen_rows(grid, rows)]
    number = in_order(torch.cat(numbers)).unique_consecutive()
    pair = row_kind[number // grid.columns] * len(keys) + column_kind[number % grid.columns]
    pair, mask = pair.unique(return_inverse=True)
    bits = queries[pair // len(keys)][:, :, None] | keys[pair % len(keys)][:, None, :]
    return tidy(Blocks(number, mask, packed(bits)), grid.block)


def band(grid: Grid, blocks: Blocks, low: int | None, high: int | None) -> Blocks:
    """Restrict blocks to keys that are `low` to `high` tokens after their query; None means no
    bound.

    Whether a block is full, partial or empty depends only on its distance from the diagonal.
    """
    block, columns = grid.block, grid.columns
    number = blocks.number.long()
    row, column = number // columns % grid.rows, number % columns
    away = (column - row) * block
    least = -(2**62) if low is None else low
    most = 2**62 if high is None else high
    there = (away + block - 1 >= least) & (away - block + 1 <= most)
    number, away = number[there], away[there]
    cut = (away - block + 1 < least) | (away + block - 1 > most)
    distances, which = away[cut].unique(return_inverse=True)
    at = torch.arange(block, device=grid.device)
    between = distances[:, None, None] + (at - at[:, None])
    masks = packed((between >= least) & (between <= most))
    before, own = len(blocks.masks), None if blocks.mask is None else blocks.mask[there]
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


class Piece(NamedTuple):
    """Blocks, and the indices of their tokens, which broadcast to all pairs in these blocks."""

    number: torch.Tensor  # [rows, columns] of blocks
    batch: torch.Tensor
    head: torch.Tensor
    query: torch.Tensor  # [rows * block, 1], or [rows, block, 1] with one column
    key: torch.Tensor  # [1, columns * block], or [rows, 1, block]


def pairs_at_once(device: torch.device) -> int:
    """The most pairs of tokens to evaluate at once. On a CPU they should stay in the cache."""
    return 2**18 if device.type == "cpu" else 2**24


def everywhere(grid: Grid, batch: int, heads: int) -> Iterator[Piece]:
    """All blocks, in wide pieces: loops along a whole row of keys are fastest."""
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
                yield Piece(first + rows + columns, of_batch, of_head, queries, keys)


def listed_pieces(grid: Grid, number: torch.Tensor, heads: int = 1) -> Iterator[Piece]:
    """The blocks with these numbers, in order."""
    at = torch.arange(grid.block, device=grid.device)
    for some in number.split(pairs_at_once(grid.device) // grid.block**2):
        column, line = some % grid.columns, some // grid.columns
        query = ((line % grid.rows)[:, None] * grid.block + at).clamp(max=grid.queries - 1)
        key = (column[:, None] * grid.block + at).clamp(max=grid.keys - 1)
        head = (line // grid.rows)[:, None, None]
        yield Piece(some[:, None], head // heads, head % heads, query[:, :, None], key[:, None, :])


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


def evaluated(grid: Grid, pieces: Iterable[Piece], function: MaskFunction) -> Blocks:
    """The blocks in which the function includes some key.

    Stores bits only for partial blocks.
    """
    block, device = grid.block, grid.device
    kept, bits = _Growing(device), []
    count = 0
    for number, batch, head, query, key in pieces:
        found = function(batch, head, query, key)
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bool:
            came = f"one that returns a {getattr(found, 'dtype', type(found).__name__)}"
            raise ArgumentError("BlockLayout", "mask_mod", came, "one that returns booleans")
        found = found.expand(torch.broadcast_shapes(query.shape, key.shape)).contiguous()
        found = found.view(number.shape[0], block, number.shape[1], block)
        # View four booleans as one word: a block is empty if its largest word is 0.
        words = found.view(torch.int32)
        there = words.amax(1).amax(-1) > 0
        if not there.any():
            continue
        cut = there & (words.amin(1).amin(-1) < 0x01010101)
        mask = torch.full_like(number, -1)
        if cut.any():
            own, which = packed(found.transpose(1, 2)[cut]).unique(dim=0, return_inverse=True)
            mask[cut] = count + which
            bits.append(own)
            count += len(own)
        kept.add(torch.stack([number, mask], -1)[there])
    number, mask = kept.columns()
    if not bits:
        return Blocks(number.contiguous(), None, no_masks(block, device))
    return tidy(Blocks(number, mask, torch.cat(bits)), block)


def documents(grid: Grid, ends: torch.Tensor, key_ends: torch.Tensor, causal: bool) -> Blocks:
    """Packed sequences that end at these tokens. Blocks within one sequence are not evaluated."""
    block, columns = grid.block, grid.columns
    if grid.rows == 0 or columns == 0:
        return Blocks(ends.new_empty(0), None, no_masks(block, grid.device))
    own = torch.searchsorted(ends, torch.arange(grid.queries, device=grid.device), right=True)
    key_own = torch.searchsorted(key_ends, torch.arange(grid.keys, device=grid.device), right=True)
    after = key_ends - ends  # distance from a sequence's last query to its last key

    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        which = own[query]
        same = which == key_own[key]
        return same & (key - query <= after[which]) if causal else same

    begins = torch.cat([key_ends.new_zeros(1), key_ends[:-1]])
    row, column = grid.row(), grid.column()
    first, last = own[row * block], own[((row + 1) * block - 1).clamp(max=grid.queries - 1)]
    key_first = key_own[column * block]
    key_last = key_own[((column + 1) * block - 1).clamp(max=grid.keys - 1)]
    end = (key_ends[last] + block - 1).div(block, rounding_mode="floor")
    number = spans(grid, begins[first].div(block, rounding_mode="floor"), end)
    row, column = number // columns, number % columns
    whole = (first[row] == last[row]) & (key_first[column] == key_last[column])
    whole &= first[row] == key_first[column]
    if causal:
        away = (column - row) * block - after[first[row]]
        number, whole, away = (t[~whole | (away - block + 1 <= 0)] for t in (number, whole, away))
        whole &= away + block - 1 <= 0
    looked = evaluated(grid, listed_pieces(grid, number[~whole]), visible)
    full = Blocks(number[whole], None, no_masks(block, grid.device))
    return joined(full, looked, block, union=True)
