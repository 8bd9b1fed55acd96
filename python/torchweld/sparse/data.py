"""Builders that make a layout from data: blocks, scores, a function, or documents' lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns
from torchweld.sparse.builders import Builders, at_least, grid_of
from torchweld.sparse.lists import Blocks
from torchweld.sparse.mask_functions import understood
from torchweld.sparse.patterns import Grid, MaskFunction

if TYPE_CHECKING:
    from typing_extensions import Self


def _sized_grid(
    name: str,
    value: torch.Tensor,
    rows: int,
    columns: int,
    seq_len: int | tuple[int, int] | None,
    block: int,
) -> Grid:
    """The grid for a tensor of blocks. Without lengths all blocks are whole."""
    grid = grid_of(
        (rows * block, columns * block) if seq_len is None else seq_len, block, value.device
    )
    if (grid.rows, grid.columns) != (rows, columns):
        accepted = f"one of {grid.rows} x {grid.columns} blocks of {block} tokens"
        raise ArgumentError("BlockLayout", name, f"of shape {list(value.shape)}", accepted)
    return grid


_INTEGERS = (torch.int64, torch.int32, torch.uint8)


class FromData(Builders):
    """Class methods that build a layout from data."""

    @classmethod
    def from_blocks(
        cls,
        blocks: torch.Tensor,
        *,
        block: int = 64,
        seq_len: int | tuple[int, int] | None = None,
    ) -> Self:
        """Take blocks from booleans [rows, columns], [heads, ...] or [batch, heads, ...].

        Integers count as booleans, as in DeepSpeed's layouts. Without `seq_len` all blocks are
        whole.
        """
        if blocks.dtype in _INTEGERS:
            blocks = blocks != 0
        if blocks.dtype != torch.bool or not 2 <= blocks.ndim <= 4:
            came = f"a {blocks.dtype} tensor of shape {list(blocks.shape)}"
            accepted = "booleans [rows, columns], [heads, ...] or [batch, heads, ...]"
            raise ArgumentError("BlockLayout", "blocks", came, accepted)
        batch, heads, rows, columns = (1,) * (4 - blocks.ndim) + tuple(blocks.shape)
        grid = _sized_grid("blocks", blocks, rows, columns, seq_len, block)
        number = blocks.flatten().nonzero().squeeze(1)
        found = Blocks(number, None, lists.no_masks(block, grid.device))
        return cls._make(grid, found, None, batch, heads)

    @classmethod
    def from_mask_fn(
        cls,
        mask_mod: MaskFunction,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_heads: int | None = None,
        batch_size: int | None = None,
        within: Builders | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Take tokens from a function: whether (batch, head, query, key) takes part.

        The function is FlexAttention's `mask_mod`. It gets int64 indices that broadcast, [n, 1] and
        [1, m], for a few blocks at a time, or single ones by vmap if it differs for tensors. Blocks
        without any key are left out. With `within`, only blocks of that layout are evaluated.
        `num_heads` and `batch_size` are needed if the function uses the head or the batch.
        """
        grid = grid_of(seq_len, block, device)
        function = understood(mask_mod, grid, batch_size, num_heads)
        heads = 1 if num_heads is None else num_heads
        batch = 1 if batch_size is None else batch_size
        at_least(1, num_heads=heads, batch_size=batch)
        if within is None:
            pieces = patterns.everywhere(grid, batch, heads)
            return cls._make(grid, patterns.evaluated(grid, pieces, function), None, batch, heads)
        each = grid.rows * grid.columns
        own = (within.blocks().number % each).unique()
        number = torch.cat([own + head * each for head in range(batch * heads)])
        pieces = patterns.listed_pieces(grid, number, heads)
        found = patterns.evaluated(grid, pieces, function)
        return cls._make(grid, found, None, batch, heads) & within  # type: ignore[operator]

    @classmethod
    def documents(
        cls,
        cu_seqlens: torch.Tensor,
        cu_seqlens_keys: torch.Tensor | None = None,
        *,
        block: int = 64,
        causal: bool = False,
    ) -> Self:
        """Packed sequences, each of which sees only itself.

        `cu_seqlens` has FlashAttention's meaning: cumulative lengths that start with 0. `causal`
        aligns the last query of each sequence with its last key.
        """
        cu_keys = cu_seqlens if cu_seqlens_keys is None else cu_seqlens_keys
        for name, value in (("cu_seqlens", cu_seqlens), ("cu_seqlens_keys", cu_keys)):
            if value.ndim != 1 or value.is_floating_point() or len(value) != len(cu_seqlens):
                came = f"a {value.dtype} tensor of shape {list(value.shape)}"
                raise ArgumentError("BlockLayout", name, came, "[sequences + 1] integers")
            if len(value) and (value[0] != 0 or (value.diff() < 0).any()):
                came = "offsets that begin elsewhere than at 0, or fall"
                raise ArgumentError("BlockLayout", name, came, "cumulative lengths, from 0 on")
        ends, key_ends = cu_seqlens[1:].long(), cu_keys[1:].long()
        seq_len = (int(ends[-1]), int(key_ends[-1])) if len(ends) else (0, 0)
        grid = grid_of(seq_len, block, cu_seqlens.device)
        found = patterns.documents(grid, ends, key_ends, causal)
        return cls._make(grid, found)

    @classmethod
    def from_scores(
        cls,
        scores: torch.Tensor,
        top_k: int,
        *,
        block: int = 64,
        seq_len: int | tuple[int, int] | None = None,
    ) -> Self:
        """In every row the `top_k` blocks with the highest scores.

        Scores are [rows, columns], [heads, ...] or [batch, heads, ...]; -inf and NaN exclude a
        block. Everything runs on the scores' device, without synchronisation: lists have room for
        `top_k` blocks per row, even if a row has fewer.
        """
        if not scores.is_floating_point() or not 2 <= scores.ndim <= 4:
            came = f"a {scores.dtype} tensor of shape {list(scores.shape)}"
            accepted = "numbers [rows, columns], [heads, ...] or [batch, heads, ...]"
            raise ArgumentError("BlockLayout", "scores", came, accepted)
        at_least(1, top_k=top_k)
        batch, heads, rows, columns = (1,) * (4 - scores.ndim) + tuple(scores.shape)
        grid = _sized_grid("scores", scores, rows, columns, seq_len, block)
        scores = scores.detach().reshape(-1, rows, columns)
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # topk takes NaN for the largest
        best = scores.topk(min(top_k, columns), sorted=False)
        line = torch.arange(batch * heads * rows, device=grid.device).view(-1, rows, 1)
        number = line * columns + best.indices
        none = batch * heads * rows * columns
        number = torch.where(best.values > -torch.inf, number, none).flatten()
        masks = lists.no_masks(block, grid.device)
        found = lists.listed(number, None, masks, (batch, heads, rows, columns))
        return cls._of(grid, found, None, batch, heads)
