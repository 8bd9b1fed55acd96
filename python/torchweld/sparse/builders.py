"""What BlockLayout's builders share, and the elementary patterns."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns
from torchweld.sparse.lists import Blocks, Lists
from torchweld.sparse.patterns import Grid

BLOCKS = (16, 32, 64, 128)
ATTENTION = ("bidirectional", "unidirectional")


class Draft(NamedTuple):
    """The parts from which a BlockLayout is made."""

    grid: Grid
    lists: Lists | None  # None: all blocks
    key: Hashable = None  # drafts with the same key and grid are equal; None: equal only to itself
    batch: int = 1
    heads: int = 1


def make_draft(
    grid: Grid, blocks: Blocks, key: Hashable = None, batch: int = 1, heads: int = 1
) -> Draft:
    """Draft a layout of these blocks."""
    sizes = (batch, heads, grid.rows, grid.columns)
    made = lists.make_lists(blocks.number, blocks.mask, blocks.masks, sizes)
    return Draft(grid, made, key, batch, heads)


def draft_union(
    grid: Grid,
    numbers: Sequence[torch.Tensor],
    key: tuple[Any, ...],
    attention: str = "bidirectional",
    heads: int = 1,
) -> Draft:
    """Draft the union of patterns, given by block numbers of the aligned grid over all heads."""
    number = lists.sort_values(torch.cat(list(numbers)))
    if len(numbers) > 1:
        number = number.unique_consecutive()
    blocks = Blocks(number, None, lists.no_masks(grid.block, grid.device))
    if is_unidirectional(attention):
        blocks = patterns.cut_band(grid.aligned(), blocks, None, grid.before * grid.block)
    blocks = patterns.drop_first_queries(grid, blocks)
    return make_draft(grid, blocks, (*key, attention), 1, heads)


def draft_with_random(
    grid: Grid,
    shared: list[torch.Tensor],
    blocks: int,
    heads: int,
    seed: int,
    key: tuple[Any, ...],
    attention: str,
) -> Draft:
    """Draft the union of patterns that all heads share and of random blocks for each head."""
    whole = grid.aligned()
    each = whole.rows * whole.columns
    numbers = [number + head * each for head in range(heads) for number in shared]
    numbers.append(patterns.draw_blocks(whole, blocks, heads, seed, is_unidirectional(attention)))
    return draft_union(grid, numbers, (*key, blocks, heads, seed), attention, heads)


# --- Checks of arguments --------------------------------------------------------------------------


def make_grid(
    seq_len: int | tuple[int, int], block: int, device: torch.device | str | None
) -> Grid:
    """Make the grid of these lengths. Raises an error that names the wrong argument."""
    pair = seq_len if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) and n >= 0 for n in pair):
        raise ArgumentError("BlockLayout", "seq_len", repr(seq_len), "tokens, or a pair of them")
    queries, keys = map(int, pair)
    if block not in BLOCKS:
        raise ArgumentError("BlockLayout", "block", repr(block), " or ".join(map(str, BLOCKS)))
    return Grid(queries, keys, block, torch.empty(0, device=device or "cpu").device)


def check_at_least(least: int, **values: Any) -> None:
    """Raise an error for the first value that is not an integer or is too small."""
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError("BlockLayout", name, repr(value), f"an int >= {least}")


def is_unidirectional(attention: str) -> bool:
    """Whether queries see no later keys."""
    if attention not in ATTENTION:
        raise ArgumentError("BlockLayout", "attention", repr(attention), " or ".join(ATTENTION))
    return attention == "unidirectional"


# --- Elementary patterns --------------------------------------------------------------------------


def build_sliding_window(grid: Grid, num_sliding_window_blocks: int, attention: str) -> Draft:
    """Build a window of blocks."""
    check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
    number = patterns.list_window(grid.aligned(), num_sliding_window_blocks)
    key = ("sliding_window", num_sliding_window_blocks)
    return draft_union(grid, [number], key, attention)


def build_token_window(grid: Grid, window_size: tuple[int, int], attention: str) -> Draft:
    """Build a window that is exact in tokens."""
    block = grid.block
    before, after = window_size
    if is_unidirectional(attention):
        after = 0
    offset = grid.keys - grid.queries
    low = None if before < 0 else offset - before
    high = None if after < 0 else offset + after
    row = grid.row()
    first = torch.zeros_like(row) if low is None else (row * block + low) // block
    end = torch.full_like(row, grid.columns)
    if high is not None:
        end = ((row + 1) * block - 1 + high).div(block, rounding_mode="floor") + 1
    first, end = first.clamp(0, grid.columns), end.clamp(0, grid.columns)
    number = patterns.list_spans(grid, first, end)
    blocks = Blocks(number, None, lists.no_masks(block, grid.device))
    key = ("sliding_window", before, after)
    return make_draft(grid, patterns.cut_band(grid, blocks, low, high), key)


def build_block_local(grid: Grid, num_local_blocks: int, attention: str) -> Draft:
    """Build separate windows along the diagonal."""
    check_at_least(1, num_local_blocks=num_local_blocks)
    number = patterns.list_windows(grid.aligned(), [num_local_blocks])
    return draft_union(grid, [number], ("block_local", num_local_blocks), attention)


def build_strided(grid: Grid, stride: int, attention: str) -> Draft:
    """Build Sparse Transformer's strided pattern."""
    check_at_least(1, stride=stride)
    near = patterns.list_window(grid.aligned(), 2 * stride - 1)
    numbers = [near, patterns.list_strides(grid.aligned(), stride)]
    return draft_union(grid, numbers, ("strided", stride), attention)


def build_dilated(
    grid: Grid, num_sliding_window_blocks: int, dilation: int, attention: str
) -> Draft:
    """Build a sliding window with gaps."""
    check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks, dilation=dilation)
    number = patterns.list_dilated_window(grid.aligned(), num_sliding_window_blocks, dilation)
    key = ("dilated", num_sliding_window_blocks, dilation)
    return draft_union(grid, [number], key, attention)


def build_random(
    grid: Grid, num_random_blocks: int, heads: int, seed: int, attention: str
) -> Draft:
    """Build random blocks, different ones for each head."""
    check_at_least(1, num_random_blocks=num_random_blocks)
    return draft_with_random(grid, [], num_random_blocks, heads, seed, ("random",), attention)


def build_global_tokens(grid: Grid, tokens: int | Sequence[int]) -> Draft:
    """Build the rows and columns of global tokens."""
    positions = list(range(tokens)) if isinstance(tokens, int) else sorted(set(tokens))
    if positions and not 0 <= positions[0] <= positions[-1] < grid.keys:
        actual = f"{positions[0]} to {positions[-1]}"
        raise ArgumentError("BlockLayout", "tokens", actual, f"positions below {grid.keys}")
    chosen = torch.tensor(positions, dtype=torch.int64, device=grid.device)
    key = ("global_tokens", tuple(positions))
    return make_draft(grid, patterns.make_global_tokens(grid, chosen), key)
