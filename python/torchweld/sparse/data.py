"""Builders that make a layout from data: blocks, scores, or a function."""

from __future__ import annotations

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns
from torchweld.sparse.builders import Draft, check_at_least, make_draft, make_grid
from torchweld.sparse.lists import Blocks
from torchweld.sparse.mask_functions import adapt_mask_function
from torchweld.sparse.patterns import Grid, MaskFunction

_INTEGERS = (torch.int64, torch.int32, torch.uint8)


def _make_matching_grid(
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


def build_from_blocks(
    blocks: torch.Tensor, block: int, seq_len: int | tuple[int, int] | None
) -> Draft:
    """Build the blocks that are True, or nonzero."""
    if blocks.dtype in _INTEGERS:
        blocks = blocks != 0
    if blocks.dtype != torch.bool or not 2 <= blocks.ndim <= 4:
        actual = f"a {blocks.dtype} tensor of shape {list(blocks.shape)}"
        accepted = "booleans [rows, columns], [heads, ...] or [batch, heads, ...]"
        raise ArgumentError("BlockLayout", "blocks", actual, accepted)
    batch, heads, rows, columns = (1,) * (4 - blocks.ndim) + tuple(blocks.shape)
    grid = _make_matching_grid("blocks", blocks, rows, columns, seq_len, block)
    number = blocks.flatten().nonzero().squeeze(1)
    chosen = Blocks(number, None, lists.no_masks(block, grid.device))
    return make_draft(grid, chosen, None, batch, heads)


def build_from_mask_fn(
    grid: Grid,
    mask_mod: MaskFunction,
    num_heads: int | None,
    batch_size: int | None,
    within: Blocks | None,
) -> Draft:
    """Build the blocks in which the function includes at least one key.

    With `within`, only its blocks are evaluated, for every head and sequence.
    """
    function = adapt_mask_function(mask_mod, grid, batch_size, num_heads)
    heads = 1 if num_heads is None else num_heads
    batch = 1 if batch_size is None else batch_size
    check_at_least(1, num_heads=heads, batch_size=batch)
    if within is None:
        patches = patterns.cut_grid(grid, batch, heads)
    else:
        each = grid.rows * grid.columns
        own = (within.number % each).unique()
        number = torch.cat([own + head * each for head in range(batch * heads)])
        patches = patterns.cut_blocks(grid, number, heads)
    return make_draft(grid, patterns.evaluate(grid, patches, function), None, batch, heads)


def build_from_scores(
    scores: torch.Tensor, top_k: int, block: int, seq_len: int | tuple[int, int] | None
) -> Draft:
    """Build the blocks with the highest scores of each row, without synchronisation."""
    if not scores.is_floating_point() or not 2 <= scores.ndim <= 4:
        actual = f"a {scores.dtype} tensor of shape {list(scores.shape)}"
        accepted = "numbers [rows, columns], [heads, ...] or [batch, heads, ...]"
        raise ArgumentError("BlockLayout", "scores", actual, accepted)
    check_at_least(1, top_k=top_k)
    batch, heads, rows, columns = (1,) * (4 - scores.ndim) + tuple(scores.shape)
    grid = _make_matching_grid("scores", scores, rows, columns, seq_len, block)
    scores = scores.detach().reshape(-1, rows, columns)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)  # topk takes NaN for the largest
    best = scores.topk(min(top_k, columns), sorted=False)
    line = torch.arange(batch * heads * rows, device=grid.device).view(-1, rows, 1)
    number = line * columns + best.indices
    none = batch * heads * rows * columns
    number = torch.where(best.values > -torch.inf, number, none).flatten()
    masks = lists.no_masks(block, grid.device)
    chosen = lists.make_lists(number, None, masks, (batch, heads, rows, columns))
    return Draft(grid, chosen, None, batch, heads)
