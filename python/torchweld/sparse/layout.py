"""BlockLayout: an immutable set of the blocks that attention computes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import builders, compounds, data, documents, lists, patterns, picture
from torchweld.sparse.builders import Draft, make_draft, make_grid
from torchweld.sparse.lists import Blocks, Lists
from torchweld.sparse.patterns import Grid, MaskFunction


class _Itself:
    """The key of a layout that equals only itself. Dynamo cannot trace `object()`."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout:
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

    queries: int
    keys: int
    block: int
    batch: int
    heads: int
    device: torch.device
    key: Hashable
    lists: Lists | None

    @classmethod
    def _from_draft(cls, draft: Draft) -> BlockLayout:
        grid, made, key, batch, heads = draft
        key = _Itself() if key is None else (key, grid)
        # Dynamo cannot trace this query, and a layout made in a graph serves only that graph.
        traced = torch.compiler.is_dynamo_compiling()
        if made is not None and not traced and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training cannot save inference tensors
                made = Lists(*[t.clone() for t in made])
        return cls(grid.queries, grid.keys, grid.block, batch, heads, grid.device, key, made)

    def _with_blocks(self, blocks: Blocks, key: Hashable, batch: int, heads: int) -> BlockLayout:
        return self._from_draft(make_draft(self.grid, blocks, key, batch, heads))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockLayout) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def grid(self) -> Grid:
        """The lengths, the block and the device."""
        return Grid(self.queries, self.keys, self.block, self.device)

    @property
    def count(self) -> int:
        """The number of blocks. Synchronises with the device."""
        total = self.batch * self.heads * self.grid.rows * self.grid.columns
        if self.lists is None:
            return total
        return int((self.lists.rows[..., 3] - self.lists.rows[..., 1]).sum())

    @property
    def density(self) -> float:
        """The share of all possible blocks that the layout has. Synchronises with the device."""
        return self.count / max(self.batch * self.heads * self.grid.rows * self.grid.columns, 1)

    @property
    def nbytes(self) -> int:
        """The bytes that the lists occupy."""
        return sum(t.nbytes for t in self.lists or ())

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on another device."""
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        with torch.inference_mode(False):
            copies = self.lists and Lists(*[t.to(device) for t in self.lists])
        key = (self.key, device)
        own = (self.queries, self.keys, self.block, self.batch, self.heads)
        return BlockLayout(*own, device, key, copies)

    def blocks(self) -> Blocks:
        """The blocks, in order."""
        if self.lists is not None:
            return lists.blocks_of(self.lists)
        number = torch.arange(self.grid.rows * self.grid.columns, device=self.device)
        return Blocks(number, None, lists.no_masks(self.block, self.device))

    def causal(self) -> BlockLayout:
        """Exclude keys that come after their query. The last query sees every key.

        `causal=True` in the call does the same without lists.
        """
        high = self.keys - self.queries
        restricted = patterns.cut_band(self.grid, self.blocks(), None, high)
        return self._with_blocks(restricted, ("causal", self.key), self.batch, self.heads)

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> BlockLayout:
        """The layout of a range of queries and a range of keys. Both start at a block."""
        for name, length, (begin, end) in (
            ("queries", self.queries, queries),
            ("keys", self.keys, keys),
        ):
            if (
                not 0 <= begin <= end <= length
                or begin % self.block
                or (end % self.block and end != length)
            ):
                actual, accepted = f"{begin} to {end}", f"multiples of {self.block} up to {length}"
                raise ArgumentError("BlockLayout.part", name, actual, accepted)
        lengths = (queries[1] - queries[0], keys[1] - keys[0])
        grid = Grid(*lengths, self.block, self.device)
        key = ("part", self.key, queries, keys)
        if self.lists is None:
            return self._from_draft(Draft(grid, None, key))
        number, mask, masks = self.blocks()
        line, column = number // self.grid.columns, number % self.grid.columns
        head, row = line // self.grid.rows, line % self.grid.rows
        row, column = row - queries[0] // self.block, column - keys[0] // self.block
        inside = (row >= 0) & (row < grid.rows) & (column >= 0) & (column < grid.columns)
        number = ((head * grid.rows + row) * grid.columns + column)[inside]
        blocks = Blocks(number, None if mask is None else mask[inside], masks)
        return self._from_draft(make_draft(grid, blocks, key, self.batch, self.heads))

    def of_heads(self, batch: tuple[int, int], heads: tuple[int, int]) -> BlockLayout:
        """The layout of a range of the batch and a range of heads. A shared layout stays shared."""
        ranges, sizes = [], (self.batch, self.heads)
        for name, size, (begin, end) in zip(("batch", "heads"), sizes, (batch, heads), strict=True):
            if not 0 <= begin <= end or (size > 1 and end > size):
                actual, accepted = f"{begin} to {end}", f"a range of {size}"
                raise ArgumentError("BlockLayout.of_heads", name, actual, accepted)
            ranges.append((begin, end) if size > 1 else (0, 1))
        (b, b_end), (h, h_end) = ranges
        counts = (b_end - b, h_end - h)
        if self.lists is None or counts == sizes:
            return self
        own = torch.arange(self.batch * self.heads, device=self.device)
        own = own.view(sizes)[b:b_end, h:h_end].flatten()
        blocks = lists.repeat_heads(self.blocks(), own, self.grid.rows * self.grid.columns)
        return self._with_blocks(blocks, ("heads", self.key, *ranges), *counts)

    def repeat_for_query_heads(self, group: int) -> BlockLayout:
        """The layout of query heads, from one of key heads that `group` adjacent ones share."""
        if self.heads == 1 or group == 1:
            return self
        own = torch.arange(self.batch * self.heads, device=self.device).repeat_interleave(group)
        blocks = lists.repeat_heads(self.blocks(), own, self.grid.rows * self.grid.columns)
        key = ("query heads", self.key, group)
        return self._with_blocks(blocks, key, self.batch, self.heads * group)

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """The blocks of either layout."""
        return self._join(other, union=True)

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """The blocks of both layouts."""
        return self._join(other, union=False)

    def _join(self, other: BlockLayout, union: bool) -> BlockLayout:
        if not isinstance(other, BlockLayout) or self.grid != other.grid:
            accepted = f"a layout of {self.grid}"
            raise ArgumentError("BlockLayout", "other", repr(other), accepted)
        if self.lists is None or other.lists is None:
            dense, rest = (self, other) if self.lists is None else (other, self)
            return dense if union else rest
        batch, heads = self._join_heads(other)
        one, two = self._expand(batch, heads), other._expand(batch, heads)
        blocks = lists.join(one, two, self.block, union)
        key = ("|" if union else "&", self.key, other.key)
        return self._with_blocks(blocks, key, batch, heads)

    def _join_heads(self, other: BlockLayout) -> tuple[int, int]:
        sizes = []
        for name in ("batch", "heads"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and 1 not in (mine, theirs):
                accepted = f"a layout for {mine} {name}, or one that is shared"
                raise ArgumentError("BlockLayout", "other", f"for {theirs} {name}", accepted)
            sizes.append(max(mine, theirs))
        return sizes[0], sizes[1]

    def _expand(self, batch: int, heads: int) -> Blocks:
        """Repeat the blocks for this batch and these heads."""
        blocks = self.blocks()
        if (batch, heads) == (self.batch, self.heads):
            return blocks
        own = torch.arange(self.batch * self.heads, device=self.device)
        own = own.view(self.batch, self.heads).expand(batch, heads).flatten()
        return lists.repeat_heads(blocks, own, self.grid.rows * self.grid.columns)

    def to_mask(self) -> torch.Tensor:
        """Booleans [batch, heads, queries, keys], True if the key takes part."""
        if self.lists is None:
            shape = (1, 1, self.queries, self.keys)
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        rows, row_entries, _, _, masks = self.lists
        return lists.token_mask(rows, row_entries, masks, self.block, self.queries, self.keys)

    def kinds(self) -> torch.Tensor:
        """The kind of each block, [batch, heads, rows, columns]: 0 none, 1 full, 2 partial."""
        grid = self.grid
        if self.lists is None:
            return torch.ones(1, 1, grid.rows, grid.columns, dtype=torch.int32, device=self.device)
        kinds = lists.kinds_of(self.lists.rows, self.lists.row_entries, grid.columns)
        return kinds.clamp(max=2)

    def plot(self, head: int = 0, ax: Any = None) -> Any:
        """Draw one head's blocks with matplotlib; returns the axes."""
        return picture.draw_plot(self.kinds()[0, head], repr(self).splitlines()[0], ax)

    def __repr__(self) -> str:
        shared = "" if self.heads == self.batch == 1 else f", {self.batch} x {self.heads} heads"
        title = (
            f"BlockLayout({self.queries} x {self.keys} tokens, block {self.block}{shared},"
            f" density {self.density:.3g})"
        )
        return f"{title}\n{picture.draw_text(self.kinds()[0, 0])}"

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
        return cls._from_draft(Draft(make_grid(seq_len, block, device), None, ("dense",)))

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
            return cls._from_draft(builders.build_sliding_window(grid, blocks, attention))
        if num_sliding_window_blocks is not None:
            actual = f"given with num_sliding_window_blocks={num_sliding_window_blocks}"
            raise ArgumentError("BlockLayout", "window_size", actual, "one of the two")
        return cls._from_draft(builders.build_token_window(grid, window_size, attention))

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
        return cls._from_draft(builders.build_block_local(grid, num_local_blocks, attention))

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
        return cls._from_draft(builders.build_strided(grid, stride, attention))

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
        return cls._from_draft(
            builders.build_dilated(grid, num_sliding_window_blocks, dilation, attention)
        )

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
        heads = num_heads if different_layout_per_head else 1
        return cls._from_draft(
            builders.build_random(grid, num_random_blocks, heads, seed, attention)
        )

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
        return cls._from_draft(builders.build_global_tokens(grid, tokens))

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
        return cls._from_draft(
            compounds.build_fixed(
                grid,
                num_heads,
                num_local_blocks,
                num_global_blocks,
                attention,
                horizontal_global_attention,
                num_different_global_patterns,
            )
        )

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
        return cls._from_draft(
            compounds.build_variable(
                grid,
                num_heads if different_layout_per_head else 1,
                num_random_blocks,
                local_window_blocks,
                global_block_indices,
                global_block_end_indices,
                attention,
                horizontal_global_attention,
                seed,
            )
        )

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
        return cls._from_draft(
            compounds.build_bigbird(
                grid,
                num_heads if different_layout_per_head else 1,
                num_random_blocks,
                num_sliding_window_blocks,
                num_global_blocks,
                attention,
                seed,
            )
        )

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
        return cls._from_draft(
            compounds.build_longformer(
                grid,
                num_sliding_window_blocks,
                global_block_indices,
                global_block_end_indices,
                attention,
            )
        )

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
        return cls._from_draft(data.build_from_blocks(blocks, block, seq_len))

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
        candidates = None if within is None else within.blocks()
        made = cls._from_draft(
            data.build_from_mask_fn(grid, mask_mod, num_heads, batch_size, candidates)
        )
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
        return cls._from_draft(
            documents.build_documents(
                cu_seqlens, cu_seqlens_keys, block, causal, window_size, seq_len
            )
        )

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
        return cls._from_draft(data.build_from_scores(scores, top_k, block, seq_len))
