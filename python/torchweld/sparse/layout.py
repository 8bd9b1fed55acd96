"""BlockLayout: an immutable description of which blocks attention computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns, picture
from torchweld.sparse.compounds import Compounds
from torchweld.sparse.data import FromData
from torchweld.sparse.lists import Blocks, Lists
from torchweld.sparse.patterns import Grid


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(Compounds, FromData):
    """The blocks of keys that each block of queries attends to, for all heads or for each head.

    Build one with a class method, such as `BlockLayout.bigbird(4096, block=64)`; combine layouts
    with `|` and `&`, and restrict one with `causal()`. Layouts are immutable. Layouts from the same
    builder and arguments are equal. A layout built from data equals only itself.

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
    def _of(
        cls, grid: Grid, found: Lists | None, key: Hashable = None, batch: int = 1, heads: int = 1
    ) -> BlockLayout:
        key = object() if key is None else (key, grid)
        if found is not None and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # or training could not save them
                found = Lists(*[t.clone() for t in found])
        return cls(grid.queries, grid.keys, grid.block, batch, heads, grid.device, key, found)

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
        """The number of blocks over the number of possible ones. Synchronises with the device."""
        return self.count / max(self.batch * self.heads * self.grid.rows * self.grid.columns, 1)

    @property
    def nbytes(self) -> int:
        """The bytes that it occupies."""
        return sum(t.nbytes for t in self.lists or ())

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on another device."""
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        with torch.inference_mode(False):
            moved = self.lists and Lists(*[t.to(device) for t in self.lists])
        key = (self.key, device)
        own = (self.queries, self.keys, self.block, self.batch, self.heads)
        return BlockLayout(*own, device, key, moved)

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
        restricted = patterns.band(self.grid, self.blocks(), None, high)
        return self._make(self.grid, restricted, ("causal", self.key), self.batch, self.heads)

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
                came, accepted = f"{begin} to {end}", f"multiples of {self.block} up to {length}"
                raise ArgumentError("BlockLayout.part", name, came, accepted)
        lengths = (queries[1] - queries[0], keys[1] - keys[0])
        grid = Grid(*lengths, self.block, self.device)
        key = ("part", self.key, queries, keys)
        if self.lists is None:
            return self._of(grid, None, key)
        number, mask, masks = self.blocks()
        line, column = number // self.grid.columns, number % self.grid.columns
        head, row = line // self.grid.rows, line % self.grid.rows
        row, column = row - queries[0] // self.block, column - keys[0] // self.block
        inside = (row >= 0) & (row < grid.rows) & (column >= 0) & (column < grid.columns)
        number = ((head * grid.rows + row) * grid.columns + column)[inside]
        found = Blocks(number, None if mask is None else mask[inside], masks)
        return self._make(grid, found, key, self.batch, self.heads)

    def of_heads(self, batch: tuple[int, int], heads: tuple[int, int]) -> BlockLayout:
        """The layout of a range of the batch and of a range of heads, where it has several."""
        ranges, sizes = [], (self.batch, self.heads)
        for name, size, (begin, end) in zip(("batch", "heads"), sizes, (batch, heads), strict=True):
            if not 0 <= begin <= end or (size > 1 and end > size):
                came, accepted = f"{begin} to {end}", f"a range of {size}"
                raise ArgumentError("BlockLayout.of_heads", name, came, accepted)
            ranges.append((begin, end) if size > 1 else (0, 1))
        (b, b_end), (h, h_end) = ranges
        counts = (b_end - b, h_end - h)
        if self.lists is None or counts == sizes:
            return self
        own = torch.arange(self.batch * self.heads, device=self.device)
        own = own.view(sizes)[b:b_end, h:h_end].flatten()
        found = lists.repeated(self.blocks(), own, self.grid.rows * self.grid.columns)
        return self._make(self.grid, found, ("heads", self.key, *ranges), *counts)

    def __or__(self, other: BlockLayout) -> BlockLayout:
        """The blocks of either layout."""
        return self._joined(other, union=True)

    def __and__(self, other: BlockLayout) -> BlockLayout:
        """The blocks of both layouts."""
        return self._joined(other, union=False)

    def _joined(self, other: BlockLayout, union: bool) -> BlockLayout:
        if not isinstance(other, BlockLayout) or self.grid != other.grid:
            accepted = f"a layout of {self.grid}"
            raise ArgumentError("BlockLayout", "other", repr(other), accepted)
        if self.lists is None or other.lists is None:
            dense, rest = (self, other) if self.lists is None else (other, self)
            return dense if union else rest
        batch, heads = self._joined_heads(other)
        one, two = self._expanded(batch, heads), other._expanded(batch, heads)
        blocks = lists.joined(one, two, self.block, union)
        key = ("|" if union else "&", self.key, other.key)
        return self._make(self.grid, blocks, key, batch, heads)

    def _joined_heads(self, other: BlockLayout) -> tuple[int, int]:
        sizes = []
        for name in ("batch", "heads"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and 1 not in (mine, theirs):
                accepted = f"a layout for {mine} {name}, or one that is shared"
                raise ArgumentError("BlockLayout", "other", f"for {theirs} {name}", accepted)
            sizes.append(max(mine, theirs))
        return sizes[0], sizes[1]

    def _expanded(self, batch: int, heads: int) -> Blocks:
        """The blocks, repeated for this batch and these heads."""
        blocks = self.blocks()
        if (batch, heads) == (self.batch, self.heads):
            return blocks
        own = torch.arange(self.batch * self.heads, device=self.device)
        own = own.view(self.batch, self.heads).expand(batch, heads).flatten()
        return lists.repeated(blocks, own, self.grid.rows * self.grid.columns)

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
        return picture.plotted(self.kinds()[0, head], repr(self).splitlines()[0], ax)

    def __repr__(self) -> str:
        shared = "" if self.heads == self.batch == 1 else f", {self.batch} x {self.heads} heads"
        title = (
            f"BlockLayout({self.queries} x {self.keys} tokens, block {self.block}{shared},"
            f" density {self.density:.3g})"
        )
        return f"{title}\n{picture.drawn(self.kinds()[0, 0])}"
