"""BlockLayout: an immutable set of the blocks that attention computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import documents, lists, patterns
from torchweld.sparse.block_set import BlockSet
from torchweld.sparse.lists import Blocks
from torchweld.sparse.mask_functions import adapt_mask_function
from torchweld.sparse.patterns import (
    Grid,
    MaskFunction,
    check_at_least,
    is_unidirectional,
    make_grid,
)

_INTEGERS = (torch.int64, torch.int32, torch.uint8)


class BlockLayout(BlockSet):
    """The blocks of keys that each block of queries attends to, for all heads or for each head.

    Build one with a class method, such as `BlockLayout.bigbird(4096, block=64)`; combine layouts
    with `|` and `&`, and restrict one with `causal()`. Layouts are immutable. Layouts from the same
    builder and arguments are equal. A layout built from data equals only itself.

    `seq_len` is a length in tokens, or a pair of lengths for queries and keys. The last query is
    aligned with the last key: with fewer queries than keys, a pattern is the last rows of the
    pattern of as many queries as keys. With `attention="unidirectional"` no query sees a later key,
    token by token.

    Attributes:
        queries, keys: lengths in tokens, which need not be multiples of the block.
        block: 16, 32, 64 or 128 tokens.
        batch, heads: 1 if the layout is shared.
        lists: the lists that kernels read, or None for a layout of all blocks.
    """

    # --- What builders of patterns share ----------------------------------------------------------

    @classmethod
    def _unite(
        cls,
        grid: Grid,
        numbers: Sequence[torch.Tensor],
        key: tuple[Any, ...],
        attention: str = "bidirectional",
        heads: int = 1,
    ) -> BlockLayout:
        """Make the union of patterns, given by block numbers of the aligned grid over all heads."""
        number = lists.sort_values(torch.cat(list(numbers)))
        if len(numbers) > 1:
            number = number.unique_consecutive()
        blocks = Blocks(number, None, lists.no_masks(grid.block, grid.device))
        if is_unidirectional(attention):
            blocks = patterns.cut_band(grid.aligned(), blocks, None, grid.before * grid.block)
        blocks = patterns.drop_first_queries(grid, blocks)
        return cls._of_blocks(grid, blocks, (*key, attention), 1, heads)

    @classmethod
    def _unite_with_random(
        cls,
        grid: Grid,
        shared: list[torch.Tensor],
        blocks: int,
        heads: int,
        seed: int,
        key: tuple[Any, ...],
        attention: str,
    ) -> BlockLayout:
        """Make the union of patterns that heads share and of random blocks for each head."""
        whole = grid.aligned()
        each = whole.rows * whole.columns
        numbers = [number + head * each for head in range(heads) for number in shared]
        backward_only = is_unidirectional(attention)
        numbers.append(patterns.draw_blocks(whole, blocks, heads, seed, backward_only))
        return cls._unite(grid, numbers, (*key, blocks, heads, seed), attention, heads)

    # --- Elementary patterns ----------------------------------------------------------------------

    @classmethod
    def dense(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Every block. A dense layout keeps no lists."""
        return cls._of_lists(make_grid(seq_len, block, device), None, ("dense",))

    @classmethod
    def sliding_window(
        cls,
        seq_len: int | tuple[int, int],
        num_sliding_window_blocks: int | None = None,
        *,
        window_size: tuple[int, int] | None = None,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Blocks around the diagonal, or with `window_size` tokens before and after each query.

        `window_size` has FlashAttention's meaning: with (127, 0) a query sees its own key and the
        127 before it. -1 means no bound. Pass only one of the two; the default is three blocks.
        """
        grid = make_grid(seq_len, block, device)
        if window_size is None:
            blocks = 3 if num_sliding_window_blocks is None else num_sliding_window_blocks
            check_at_least(1, num_sliding_window_blocks=blocks)
            number = patterns.list_window(grid.aligned(), blocks)
            return cls._unite(grid, [number], ("sliding_window", blocks), attention)
        if num_sliding_window_blocks is not None:
            actual = f"given with num_sliding_window_blocks={num_sliding_window_blocks}"
            raise ArgumentError("BlockLayout", "window_size", actual, "one of the two")
        before, after = window_size[0], 0 if is_unidirectional(attention) else window_size[1]
        window = patterns.make_token_window(grid, before, after)
        return cls._of_blocks(grid, window, ("sliding_window", before, after))

    @classmethod
    def block_local(
        cls,
        seq_len: int | tuple[int, int],
        num_local_blocks: int = 4,
        *,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Windows of blocks along the diagonal. Each sees only itself."""
        grid = make_grid(seq_len, block, device)
        check_at_least(1, num_local_blocks=num_local_blocks)
        number = patterns.list_windows(grid.aligned(), [num_local_blocks])
        return cls._unite(grid, [number], ("block_local", num_local_blocks), attention)

    @classmethod
    def strided(
        cls,
        seq_len: int | tuple[int, int],
        stride: int = 4,
        *,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Sparse Transformer's strided pattern: near blocks, and every `stride`-th block."""
        grid = make_grid(seq_len, block, device)
        check_at_least(1, stride=stride)
        near = patterns.list_window(grid.aligned(), 2 * stride - 1)
        numbers = [near, patterns.list_strides(grid.aligned(), stride)]
        return cls._unite(grid, numbers, ("strided", stride), attention)

    @classmethod
    def dilated(
        cls,
        seq_len: int | tuple[int, int],
        num_sliding_window_blocks: int = 3,
        dilation: int = 2,
        *,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """A sliding window with gaps: every `dilation`-th block."""
        grid = make_grid(seq_len, block, device)
        blocks = num_sliding_window_blocks
        check_at_least(1, num_sliding_window_blocks=blocks, dilation=dilation)
        number = patterns.list_dilated_window(grid.aligned(), blocks, dilation)
        return cls._unite(grid, [number], ("dilated", blocks, dilation), attention)

    @classmethod
    def random(
        cls,
        seq_len: int | tuple[int, int],
        num_random_blocks: int = 3,
        *,
        block: int = 64,
        num_heads: int = 1,
        different_layout_per_head: bool = False,
        attention: str = "bidirectional",
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Distinct random blocks in every row, or all that the row may see if there are fewer."""
        grid = make_grid(seq_len, block, device)
        check_at_least(1, num_random_blocks=num_random_blocks)
        heads = num_heads if different_layout_per_head else 1
        own = (num_random_blocks, heads, seed)
        return cls._unite_with_random(grid, [], *own, ("random",), attention)

    @classmethod
    def global_tokens(
        cls,
        seq_len: int | tuple[int, int],
        tokens: int | Sequence[int],
        *,
        block: int = 64,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Tokens that see all tokens and are seen by all: the first `tokens`, or a list of tokens.

        `tokens` are positions among the keys.
        """
        grid = make_grid(seq_len, block, device)
        positions = list(range(tokens)) if isinstance(tokens, int) else sorted(set(tokens))
        if positions and not 0 <= positions[0] <= positions[-1] < grid.keys:
            actual = f"{positions[0]} to {positions[-1]}"
            raise ArgumentError("BlockLayout", "tokens", actual, f"positions below {grid.keys}")
        chosen = torch.tensor(positions, dtype=torch.int64, device=grid.device)
        blocks = patterns.make_global_tokens(grid, chosen)
        return cls._of_blocks(grid, blocks, ("global_tokens", tuple(positions)))

    # --- Compound patterns, named like DeepSpeed's configurations ---------------------------------

    @classmethod
    def fixed(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_heads: int = 1,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Sparse Transformer's fixed pattern: local windows, whose last blocks all rows see.

        With `num_different_global_patterns` the `num_heads` heads differ: within a window, head h's
        global blocks precede head h - 1's.
        """
        grid = make_grid(seq_len, block, device)
        whole = grid.aligned()
        check_at_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        check_at_least(1, num_heads=num_heads, different_patterns=num_different_global_patterns)
        if num_local_blocks < num_global_blocks * num_different_global_patterns:
            actual = f"{num_different_global_patterns}, with {num_global_blocks} global blocks each"
            accepted = (
                f"at most {num_local_blocks // num_global_blocks}, for {num_local_blocks} blocks"
            )
            raise ArgumentError("BlockLayout", "num_different_global_patterns", actual, accepted)
        backward_only = is_unidirectional(attention)
        heads = num_heads if num_different_global_patterns > 1 else 1
        last = grid.columns - grid.columns % num_local_blocks
        local = patterns.list_windows(whole, [num_local_blocks])
        numbers = []
        for head in range(heads):
            place = 1 + head % num_different_global_patterns
            first = num_local_blocks - place * num_global_blocks
            begins = list(range(first, last, num_local_blocks))
            if last < grid.columns:  # the last window is shorter
                begins.append(max(min(last + first, grid.columns - num_global_blocks), 0))
            chosen = patterns.list_indices(
                begins, [b + num_global_blocks for b in begins], grid.columns
            )
            shared = patterns.list_global_blocks(
                whole, chosen, backward_only, horizontal_global_attention
            )
            numbers += [number + head * whole.rows * whole.columns for number in (local, *shared)]
        key = (
            *("fixed", heads, num_local_blocks, num_global_blocks),
            *(horizontal_global_attention, num_different_global_patterns),
        )
        return cls._unite(grid, numbers, key, attention, heads)

    @classmethod
    def variable(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_heads: int = 1,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Local windows of given sizes (the last one repeats), global blocks and random blocks."""
        grid = make_grid(seq_len, block, device)
        heads = num_heads if different_layout_per_head else 1
        whole = grid.aligned()
        check_at_least(0, num_random_blocks=num_random_blocks)
        sizes = list(local_window_blocks)
        if not sizes or min(sizes) < 1:
            raise ArgumentError("BlockLayout", "local_window_blocks", repr(sizes), "sizes >= 1")
        backward_only = is_unidirectional(attention)
        chosen = patterns.list_indices(global_block_indices, global_block_end_indices, grid.columns)
        shared = [
            patterns.list_windows(whole, sizes),
            *patterns.list_global_blocks(whole, chosen, backward_only, horizontal_global_attention),
        ]
        key = ("variable", tuple(sizes), tuple(chosen), horizontal_global_attention)
        return cls._unite_with_random(grid, shared, num_random_blocks, heads, seed, key, attention)

    @classmethod
    def bigbird(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_heads: int = 1,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """BigBird's pattern: a sliding window, global first blocks, and random blocks.

        Unidirectional rows draw from the blocks that they may see, so the first rows have fewer.
        """
        grid = make_grid(seq_len, block, device)
        heads = num_heads if different_layout_per_head else 1
        whole = grid.aligned()
        check_at_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
        check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        chosen = list(range(min(num_global_blocks, grid.columns)))
        shared = [
            patterns.list_window(whole, num_sliding_window_blocks),
            *patterns.list_global_blocks(whole, chosen, False, True),
        ]
        key = ("bigbird", num_sliding_window_blocks, num_global_blocks)
        return cls._unite_with_random(grid, shared, num_random_blocks, heads, seed, key, attention)

    @classmethod
    def longformer(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Longformer's pattern: a sliding window, and blocks that see all and are seen by all."""
        grid = make_grid(seq_len, block, device)
        whole = grid.aligned()
        check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        chosen = patterns.list_indices(global_block_indices, global_block_end_indices, grid.columns)
        numbers = [
            patterns.list_window(whole, num_sliding_window_blocks),
            *patterns.list_global_blocks(whole, chosen, False, True),
        ]
        key = ("longformer", num_sliding_window_blocks, tuple(chosen))
        return cls._unite(grid, numbers, key, attention)

    # --- Layouts from data ------------------------------------------------------------------------

    @classmethod
    def from_blocks(
        cls,
        blocks: torch.Tensor,
        *,
        block: int = 64,
        seq_len: int | tuple[int, int] | None = None,
    ) -> BlockLayout:
        """Take blocks from booleans [rows, columns], [heads, ...] or [batch, heads, ...].

        Integers count as booleans, as in DeepSpeed's layouts. Without `seq_len` all blocks are
        whole.
        """
        if blocks.dtype in _INTEGERS:
            blocks = blocks != 0
        if blocks.dtype != torch.bool or not 2 <= blocks.ndim <= 4:
            actual = f"a {blocks.dtype} tensor of shape {list(blocks.shape)}"
            accepted = "booleans [rows, columns], [heads, ...] or [batch, heads, ...]"
            raise ArgumentError("BlockLayout", "blocks", actual, accepted)
        batch, heads, rows, columns = (1,) * (4 - blocks.ndim) + tuple(blocks.shape)
        grid = patterns.match_grid("blocks", blocks, rows, columns, seq_len, block)
        number = blocks.flatten().nonzero().squeeze(1)
        chosen = Blocks(number, None, lists.no_masks(block, grid.device))
        return cls._of_blocks(grid, chosen, None, batch, heads)

    @classmethod
    def from_mask_fn(
        cls,
        mask_mod: MaskFunction,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        num_heads: int | None = None,
        batch_size: int | None = None,
        within: BlockLayout | None = None,
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """Take tokens from a function: whether (batch, head, query, key) takes part.

        The function is FlexAttention's `mask_mod`. It gets int64 indices that broadcast, [n, 1] and
        [1, m], for a few blocks at a time. If it computes something else for tensors than for
        single indices, `torch.vmap` calls it. Blocks without any key are left out. With `within`,
        only blocks of that layout are evaluated. `num_heads` and `batch_size` are needed if the
        function uses the head or the batch.
        """
        grid = make_grid(seq_len, block, device)
        function = adapt_mask_function(mask_mod, grid, batch_size, num_heads)
        heads = 1 if num_heads is None else num_heads
        batch = 1 if batch_size is None else batch_size
        check_at_least(1, num_heads=heads, batch_size=batch)
        if within is None:
            patches = patterns.cut_grid(grid, batch, heads)
        else:  # of any head or sequence, for all of them
            each = grid.rows * grid.columns
            own = (within.blocks().number % each).unique()
            number = torch.cat([own + head * each for head in range(batch * heads)])
            patches = patterns.cut_blocks(grid, number, heads)
        found = patterns.evaluate(grid, patches, function)
        made = cls._of_blocks(grid, found, None, batch, heads)
        return made if within is None else made & within

    @classmethod
    def documents(
        cls,
        cu_seqlens: torch.Tensor,
        cu_seqlens_keys: torch.Tensor | None = None,
        *,
        block: int = 64,
        causal: bool | str = False,
        window_size: tuple[int, int] | None = None,
        seq_len: int | tuple[int, int] | None = None,
    ) -> BlockLayout:
        """Packed sequences; each one attends only to itself.

        `cu_seqlens` has FlashAttention's meaning: cumulative lengths that start with 0. With shape
        [batch, sequences + 1] each row of the batch is packed separately; a row with fewer
        sequences repeats its last number. `causal=True` aligns the last query of each sequence with
        its last key; "top_left" aligns the first ones. `window_size` is the number of tokens that a
        query sees before and after its aligned key, -1 for no bound. Tokens after the last
        sequence, up to `seq_len`, see nothing and are not seen.
        """
        grid, blocks, batch = documents.make_documents(
            cu_seqlens, cu_seqlens_keys, block, causal, window_size, seq_len
        )
        return cls._of_blocks(grid, blocks, None, batch)

    @classmethod
    def from_block_mask(
        cls,
        block_mask: Any,
        *,
        block: int | None = None,
        num_heads: int | None = None,
        batch_size: int | None = None,
    ) -> BlockLayout:
        """Take FlexAttention's block mask, with its full and its partial blocks.

        The mask's blocks are split into blocks of `block` tokens, by default the largest size that
        divides them. `num_heads` and `batch_size` are needed if the mask is shared but its function
        is not.
        """
        from torchweld.sparse import flex  # torch's FlexAttention takes a while to import

        return flex.take_block_mask(cls, block_mask, block, batch_size, num_heads)

    def to_block_mask(self) -> Any:
        """FlexAttention's block mask of this layout, with the same blocks."""
        from torchweld.sparse import flex

        return flex.make_block_mask(self)

    @classmethod
    def from_scores(
        cls,
        scores: torch.Tensor,
        top_k: int,
        *,
        block: int = 64,
        seq_len: int | tuple[int, int] | None = None,
    ) -> BlockLayout:
        """In every row the `top_k` blocks with the highest scores.

        Scores are [rows, columns], [heads, ...] or [batch, heads, ...]; -inf and NaN exclude a
        block. Everything runs on the scores' device, without synchronisation: lists have room for
        `top_k` blocks per row, even if a row has fewer.
        """
        if not scores.is_floating_point() or not 2 <= scores.ndim <= 4:
            actual = f"a {scores.dtype} tensor of shape {list(scores.shape)}"
            accepted = "numbers [rows, columns], [heads, ...] or [batch, heads, ...]"
            raise ArgumentError("BlockLayout", "scores", actual, accepted)
        check_at_least(1, top_k=top_k)
        batch, heads, rows, columns = (1,) * (4 - scores.ndim) + tuple(scores.shape)
        grid = patterns.match_grid("scores", scores, rows, columns, seq_len, block)
        scores = scores.detach().reshape(-1, rows, columns)
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # topk takes NaN for the largest
        best = scores.topk(min(top_k, columns), sorted=False)
        line = torch.arange(batch * heads * rows, device=grid.device).view(-1, rows, 1)
        number = line * columns + best.indices
        none = batch * heads * rows * columns
        number = torch.where(best.values > -torch.inf, number, none).flatten()
        masks = lists.no_masks(block, grid.device)
        chosen = lists.make_lists(number, None, masks, (batch, heads, rows, columns))
        return cls._of_lists(grid, chosen, None, batch, heads)
