"""The lists that kernels read: the columns of every row of blocks, the rows of every column."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Lists(NamedTuple):
    """A layout as kernels read it, all of int32.

    A line is a row of blocks, or a column in the transpose. It has four numbers: its index, the
    begin of its entries, the begin of the entries of partial blocks, and the end. The lines of a
    head are sorted longest first, to balance work that is distributed in that order. An entry has
    two numbers: the column (or row) of the block, and the mask if the block is partial.
    """

    rows: torch.Tensor  # [batch or 1, heads or 1, rows of blocks, 4]
    row_entries: torch.Tensor  # [at least as many as there are blocks, 2]
    columns: torch.Tensor  # [batch or 1, heads or 1, columns of blocks, 4]
    column_entries: torch.Tensor
    # [masks, block * words], words = words_of(block): bit `key % 32` of word
    # `query * words + key // 32` says whether the key takes part. Positions are within the block.
    masks: torch.Tensor


class Blocks(NamedTuple):
    """A layout as builders make it: the sorted blocks of all heads, without duplicates.

    A block's number is (head * rows + row) * columns + column. Heads are counted over the batch.
    """

    number: torch.Tensor  # int64, or int32 if that holds every number
    mask: torch.Tensor | None  # index of each block's mask; -1: the block is full
    masks: torch.Tensor  # as in Lists


def words_of(block: int) -> int:
    """The number of words that hold a query's bits in a partial block."""
    return max(block // 32, 1)


def count_of(length: int, block: int) -> int:
    """The number of blocks in a sequence."""
    return -(-length // block)


def no_masks(block: int, device: torch.device) -> torch.Tensor:
    """The masks of a layout without partial blocks."""
    return torch.empty(0, block * words_of(block), dtype=torch.int32, device=device)


def sort_values(values: torch.Tensor) -> torch.Tensor:
    """Sort the values; on the CPU, in place."""
    if values.device.type == "cpu":  # numpy's vectorised sort is many times as fast
        values.numpy().sort()
        return values
    return values.sort().values


def make_lists(
    number: torch.Tensor,
    mask: torch.Tensor | None,
    masks: torch.Tensor,
    sizes: tuple[int, int, int, int],
) -> Lists:
    """Make the lists of these blocks, given by number (see Blocks) in any order.

    `sizes` are batch, heads, rows and columns. Numbers past the last possible block are ignored: a
    builder on a GPU allocates the most that it may need, and never reads back the actual count.
    """
    batch, heads, rows, columns = sizes
    kinds = len(masks) + 1
    if 2 * (batch * heads * rows * columns + columns + rows) * kinds < 2**31:
        number = number.to(torch.int32)
        mask = None if mask is None else mask.to(torch.int32)
    # (head * columns + column) * rows + row, where number is line * columns + column and line is
    # head * rows + row. A number past the last block stays past the last block.
    line = number // columns
    transposed = (number - line * columns).mul_(rows).add_(line)
    transposed.add_((line // rows).mul_(rows * (columns - 1)))
    return Lists(
        *_lines(number, mask, kinds, (batch, heads, rows, columns)),
        *_lines(transposed, mask, kinds, (batch, heads, columns, rows)),
        masks,
    )


def _lines(
    number: torch.Tensor, mask: torch.Tensor | None, kinds: int, sizes: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, lines, partners = sizes
    line = torch.arange(batch * heads * lines + 1, device=number.device, dtype=number.dtype)
    if mask is None:
        number = sort_values(number)
        partner, which = number % partners, torch.zeros_like(number)
        begins = torch.searchsorted(number, line * partners).to(torch.int32)
        begin, partial, end = begins[:-1], begins[1:], begins[1:]
    else:
        # Full blocks come before partial ones, so the sort key includes the mask.
        half = number // partners * 2 + (mask >= 0)
        code = sort_values((half * partners + number % partners) * kinds + (mask + 1))
        which = (code % kinds - 1).clamp_(min=0)
        code = code // kinds
        partner = code % partners
        begins = torch.searchsorted(code, 2 * partners * line).to(torch.int32)
        begin, end = begins[:-1], begins[1:]
        partial = torch.searchsorted(code, (2 * line[:-1] + 1) * partners).to(torch.int32)
    entries = torch.stack([partner, which], -1).to(torch.int32)
    order = (begin - end).view(batch * heads, lines).argsort(dim=-1, stable=True)
    table = torch.stack([begin, partial, end], -1).view(batch * heads, lines, 3)
    table = table.gather(1, order.unsqueeze(-1).expand(-1, -1, 3))
    table = torch.cat([order.to(torch.int32).unsqueeze(-1), table], -1)
    return table.view(batch, heads, lines, 4), entries


def blocks_of(lists: Lists) -> Blocks:
    """The blocks of these lists. Synchronises with the device."""
    rows = lists.rows.flatten(0, 2).long()
    lines, columns = lists.rows.shape[2], lists.columns.shape[2]
    lengths = rows[:, 3] - rows[:, 1]
    position = list_ranges(rows[:, 1], lengths)
    entries = lists.row_entries[position].long()
    line = torch.arange(len(rows), device=rows.device) // lines * lines + rows[:, 0]
    number = line.repeat_interleave(lengths) * columns + entries[:, 0]
    number, order = number.sort()
    if len(lists.masks) == 0:
        return Blocks(number, None, lists.masks)
    partial = position >= rows[:, 2].repeat_interleave(lengths)
    return Blocks(number, torch.where(partial, entries[:, 1], -1)[order], lists.masks)


def list_ranges(begin: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers begin[i], begin[i] + 1, ... of each range, one range after another."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=begin.device) + (begin - before).repeat_interleave(lengths)


def kinds_of(rows: torch.Tensor, row_entries: torch.Tensor, columns: int) -> torch.Tensor:
    """The kind of each block, [batch, heads, rows, columns]: 0 none, 1 full, 2 + mask partial.

    Does not synchronise with the device.
    """
    begin, partial, end = rows[..., 1:2], rows[..., 2:3], rows[..., 3:4]
    position = begin + torch.arange(columns, device=rows.device, dtype=torch.int32)
    exists = position < end
    entries = torch.nn.functional.pad(row_entries, (0, 0, 0, 1))
    entries = entries[torch.where(exists, position, len(row_entries)).long()]
    kind = torch.where(position < partial, 1, entries[..., 1] + 2) * exists
    column = torch.where(exists, entries[..., 0], columns).long()
    kinds = kind.new_zeros([*rows.shape[:3], columns + 1]).scatter(-1, column, kind)[..., :columns]
    which = rows[..., :1].long().expand(kinds.shape)
    return torch.zeros_like(kinds).scatter(2, which, kinds)


def token_mask(
    rows: torch.Tensor,
    row_entries: torch.Tensor,
    masks: torch.Tensor,
    block: int,
    queries: int,
    keys: int,
) -> torch.Tensor:
    """Booleans [batch or 1, heads or 1, queries, keys], True if the layout includes the key."""
    kinds = kinds_of(rows, row_entries, count_of(keys, block))
    whole = torch.ones(1, block, block, dtype=torch.bool, device=rows.device)
    every = torch.cat([~whole, whole, unpack(masks, block)])
    tokens = every[kinds.long()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return tokens[:, :, :queries, :keys]


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Pack booleans [n, block, block] into the bits of Lists."""
    n, block = mask.shape[:2]
    mask = torch.nn.functional.pad(mask, (0, 32 * words_of(block) - block))
    weight = 2 ** torch.arange(8, device=mask.device, dtype=torch.uint8)
    octets = (mask.unflatten(-1, (-1, 8)) * weight).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32).reshape(n, block * words_of(block))


def unpack(masks: torch.Tensor, block: int) -> torch.Tensor:
    """Unpack bits to booleans [n, block, block]."""
    bit = torch.arange(32, device=masks.device, dtype=torch.int32)
    bits = (masks.view(-1, block, words_of(block), 1) >> bit) & 1
    return bits.flatten(2).bool()[..., :block]


def join(a: Blocks, b: Blocks, block: int, union: bool) -> Blocks:
    """Join the blocks of two layouts: their union or their intersection."""
    number = torch.cat([a.number, b.number])
    number, order = number.sort(stable=True)
    twice = torch.zeros_like(number, dtype=torch.bool)
    twice[:-1] = number[1:] == number[:-1]
    first = torch.zeros_like(twice)  # the second of a pair
    first[1:] = twice[:-1]
    keep = ~first if union else twice
    if a.mask is None and b.mask is None:
        return Blocks(number[keep], None, a.masks)
    m = len(a.masks)
    masks = torch.cat([a.masks, b.masks])
    mask = torch.cat([_mask(a), torch.where(_mask(b) >= 0, _mask(b) + m, -1)])[order]
    one, other = mask, torch.cat([mask[1:], mask[:1]])
    if union:
        merged = torch.where((one < 0) | (other < 0), -1, -2)
    else:
        merged = torch.where(one < 0, other, torch.where(other < 0, one, -2))
    merged = torch.where(twice, merged, one)
    mixed = (merged == -2) & keep
    pairs, which = torch.stack([one[mixed], other[mixed]], -1).unique(dim=0, return_inverse=True)
    left, right = masks[pairs[:, 0]], masks[pairs[:, 1]]
    merged[mixed] = len(masks) + which
    masks = torch.cat([masks, left | right if union else left & right])
    return tidy(Blocks(number[keep], merged[keep], masks), block)


def _mask(blocks: Blocks) -> torch.Tensor:
    return torch.full_like(blocks.number, -1) if blocks.mask is None else blocks.mask


def tidy(blocks: Blocks, block: int) -> Blocks:
    """Keep each mask once, and remove full masks and empty blocks."""
    assert blocks.mask is not None
    whole = pack(torch.ones(1, block, block, dtype=torch.bool, device=blocks.number.device))
    every = torch.cat([whole, torch.zeros_like(whole), blocks.masks])
    masks, name = every.unique(dim=0, return_inverse=True)
    mask = torch.where(blocks.mask < 0, name[0], name[blocks.mask + 2])
    nonempty = mask != name[1]
    number, mask = blocks.number[nonempty], mask[nonempty]
    partial = mask != name[0]
    if not partial.any():
        return Blocks(number, None, masks[:0])
    used, which = mask[partial].unique(return_inverse=True)
    mask = torch.full_like(mask, -1).masked_scatter_(partial, which)
    return Blocks(number, mask, masks[used])


def repeat_for_query_heads(lists: Lists, group: int) -> Lists:
    """Repeat the lines of each key head for its `group` query heads. Entries are shared."""
    if group == 1 or lists.rows.shape[1] == 1:
        return lists
    rows, columns = (x.repeat_interleave(group, 1) for x in (lists.rows, lists.columns))
    return lists._replace(rows=rows, columns=columns)


def repeat_heads(blocks: Blocks, own: torch.Tensor, each: int) -> Blocks:
    """Repeat the blocks of heads own[0], own[1], ... in order; a head has `each` block numbers."""
    bounds = torch.searchsorted(blocks.number, torch.stack([own, own + 1]) * each)
    lengths = bounds[1] - bounds[0]
    position = list_ranges(bounds[0], lengths)
    place = torch.arange(len(own), device=own.device)
    number = blocks.number[position] + ((place - own) * each).repeat_interleave(lengths)
    return Blocks(number, None if blocks.mask is None else blocks.mask[position], blocks.masks)
