"""Layouts of packed sequences, for one row of tokens or for each row of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse.lists import Blocks, join, no_masks, tidy
from torchweld.sparse.patterns import Grid, cut_blocks, evaluate, list_spans, make_grid


class _Band(NamedTuple):
    """The keys that a query sees, by distance from its aligned key; None: no bound."""

    low: int | None
    high: int | None
    top_left: bool  # aligns the first query of a sequence with its first key, not the last ones


def make_documents(
    cu_seqlens: torch.Tensor,
    cu_seqlens_keys: torch.Tensor | None,
    block: int,
    causal: bool | str,
    window_size: tuple[int, int] | None,
    seq_len: int | tuple[int, int] | None,
) -> tuple[Grid, Blocks, int]:
    """Make the grid, the blocks within packed sequences, and the number of rows of a batch."""
    cu_keys = cu_seqlens if cu_seqlens_keys is None else cu_seqlens_keys
    for name, value in (("cu_seqlens", cu_seqlens), ("cu_seqlens_keys", cu_keys)):
        _check_lengths(name, value, cu_seqlens.shape)
    if causal not in (False, True, "bottom_right", "top_left"):
        accepted = 'False, True, "bottom_right" or "top_left"'
        raise ArgumentError("BlockLayout", "causal", repr(causal), accepted)
    before, after = (-1, -1) if window_size is None else window_size
    if min(before, after) < -1:
        accepted = "two numbers of tokens, -1 for no bound"
        raise ArgumentError("BlockLayout", "window_size", repr(window_size), accepted)
    high = after if after >= 0 else None
    high = 0 if causal else high
    band = _Band(-before if before >= 0 else None, high, causal == "top_left")
    ends, key_ends = (x.view(-1, x.shape[-1])[:, 1:].long() for x in (cu_seqlens, cu_keys))
    longest = [int(x.max()) if x.numel() else 0 for x in (ends, key_ends)]
    grid = make_grid((longest[0], longest[1]) if seq_len is None else seq_len, block, ends.device)
    if longest[0] > grid.queries or longest[1] > grid.keys:
        actual, accepted = f"{grid.queries} x {grid.keys}", f"at least {longest[0]} x {longest[1]}"
        raise ArgumentError("BlockLayout", "seq_len", actual, accepted)
    rows = [_find_blocks(grid, *pair, band) for pair in zip(ends, key_ends, strict=True)]
    each = grid.rows * grid.columns
    return grid, _stack(rows, each, block, grid.device), max(len(rows), 1)


def _check_lengths(name: str, value: torch.Tensor, shape: torch.Size) -> None:
    if value.ndim not in (1, 2) or value.is_floating_point() or value.shape != shape:
        actual = f"a {value.dtype} tensor of shape {list(value.shape)}"
        accepted = "[sequences + 1] or [batch, sequences + 1] integers"
        raise ArgumentError("BlockLayout", name, actual, accepted)
    if value.numel() and ((value[..., 0] != 0).any() or (value.diff() < 0).any()):
        actual = "offsets that do not start at 0, or decrease"
        raise ArgumentError("BlockLayout", name, actual, "cumulative lengths that start at 0")


def _stack(rows: list[Blocks], each: int, block: int, device: torch.device) -> Blocks:
    """Join the blocks of a batch's rows. A row has `each` possible blocks."""
    if len(rows) == 1:
        return rows[0]
    number = [blocks.number + i * each for i, blocks in enumerate(rows)]
    first, masks = 0, []
    for blocks in rows:
        own = blocks.mask
        own = torch.full_like(blocks.number, -1) if own is None else own
        masks.append(torch.where(own < 0, own, own + first))
        first += len(blocks.masks)
    bits = torch.cat([no_masks(block, device), *[blocks.masks for blocks in rows]])
    if not rows:
        return Blocks(torch.empty(0, dtype=torch.int64, device=device), None, bits)
    stacked = Blocks(torch.cat(number), torch.cat(masks), bits)
    return tidy(stacked, block) if len(bits) else Blocks(stacked.number, None, bits)


def _find_blocks(grid: Grid, ends: torch.Tensor, key_ends: torch.Tensor, band: _Band) -> Blocks:
    """Find the blocks of packed sequences that end at these tokens.

    Blocks within one sequence are not evaluated.
    """
    block, columns, count = grid.block, grid.columns, len(ends)
    if grid.rows == 0 or columns == 0 or not count:
        return Blocks(ends.new_empty(0), None, no_masks(block, grid.device))
    queries, keys = (torch.arange(n, device=grid.device) for n in (grid.queries, grid.keys))
    own = torch.searchsorted(ends, queries, right=True)
    key_own = torch.searchsorted(key_ends, keys, right=True)
    key_own += (key_own == count).to(key_own.dtype)  # no query is in the keys' padding
    begins, key_begins = (torch.cat([x.new_zeros(1), x]) for x in (ends, key_ends))
    # The distance from a query to its aligned key. The number for padding does not matter.
    beside = key_begins - begins if band.top_left else torch.cat([key_ends - ends, ends[:1] * 0])

    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        which = own[query]
        seen = which == key_own[key]
        distance = key - query - beside[which]
        seen = seen if band.high is None else seen & (distance <= band.high)
        return seen if band.low is None else seen & (distance >= band.low)

    row, column = grid.row(), grid.column()
    first, last = own[row * block], own[((row + 1) * block - 1).clamp(max=grid.queries - 1)]
    key_first = key_own[column * block]
    key_last = key_own[((column + 1) * block - 1).clamp(max=grid.keys - 1)]
    end = key_begins[(last + 1).clamp(max=count)]
    end = (end + block - 1).div(block, rounding_mode="floor")
    number = list_spans(grid, key_begins[first].div(block, rounding_mode="floor"), end)
    row, column = number // columns, number % columns
    whole = (first[row] == last[row]) & (key_first[column] == key_last[column])
    whole &= first[row] == key_first[column]
    away = (column - row) * block - beside[first[row]]
    outside = torch.zeros_like(whole)
    if band.high is not None:
        outside |= whole & (away - block + 1 > band.high)
        whole &= away + block - 1 <= band.high
    if band.low is not None:
        outside |= whole & (away + block - 1 < band.low)
        whole &= away - block + 1 >= band.low
    number, whole = number[~outside], whole[~outside]
    partial = evaluate(grid, cut_blocks(grid, number[~whole]), visible)
    full = Blocks(number[whole], None, no_masks(block, grid.device))
    return join(full, partial, block, union=True)
