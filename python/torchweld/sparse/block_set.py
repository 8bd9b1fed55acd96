"""An immutable set of blocks: its lists, its parts, unions and intersections."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from torchweld import state
from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns, picture
from torchweld.sparse.lists import Blocks, Lists
from torchweld.sparse.patterns import Grid

if TYPE_CHECKING:
    from typing_extensions import Self


class _Itself:
    """The key of a layout that equals only itself. Dynamo cannot trace `object()`."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockSet:
    """The blocks of a BlockLayout, and what can be done with them however they were chosen."""

    queries: int
    keys: int
    block: int
    batch: int
    heads: int
    device: torch.device
    key: Hashable
    lists: Lists | None

    @classmethod
    def _of_lists(
        cls, grid: Grid, made: Lists | None, key: Hashable = None, batch: int = 1, heads: int = 1
    ) -> Self:
        """Make a layout; None: of all blocks. With a key, it equals others of its key and grid."""
        key = _Itself() if key is None else (key, grid)
        # Dynamo cannot trace this query, and a layout made in a graph serves only that graph.
        traced = state.is_dynamo_compiling()
        if made is not None and not traced and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training cannot save inference tensors
                made = Lists(*[t.clone() for t in made])
        return cls(grid.queries, grid.keys, grid.block, batch, heads, grid.device, key, made)

    @classmethod
    def _of_blocks(
        cls, grid: Grid, blocks: Blocks, key: Hashable = None, batch: int = 1, heads: int = 1
    ) -> Self:
        sizes = (batch, heads, grid.rows, grid.columns)
        return cls._of_lists(grid, lists.make_lists(*blocks, sizes), key, batch, heads)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSet) and self.key == other.key

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

    def to(self, device: torch.device | str) -> Self:
        """The same layout on another device."""
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        with torch.inference_mode(False):
            copies = self.lists and Lists(*[t.to(device) for t in self.lists])
        key = (self.key, device)
        own = (self.queries, self.keys, self.block, self.batch, self.heads)
        return type(self)(*own, device, key, copies)

    def blocks(self) -> Blocks:
        """The blocks, in order."""
        if self.lists is not None:
            return lists.blocks_of(self.lists)
        number = torch.arange(self.grid.rows * self.grid.columns, device=self.device)
        return Blocks(number, None, lists.no_masks(self.block, self.device))

    def causal(self) -> Self:
        """Exclude keys that come after their query. The last query sees every key.

        `causal=True` in the call does the same without lists.
        """
        high = self.keys - self.queries
        restricted = patterns.cut_band(self.grid, self.blocks(), None, high)
        key = ("causal", self.key)
        return self._of_blocks(self.grid, restricted, key, self.batch, self.heads)

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> Self:
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
            return self._of_lists(grid, None, key)
        number, mask, masks = self.blocks()
        line, column = number // self.grid.columns, number % self.grid.columns
        head, row = line // self.grid.rows, line % self.grid.rows
        row, column = row - queries[0] // self.block, column - keys[0] // self.block
        inside = (row >= 0) & (row < grid.rows) & (column >= 0) & (column < grid.columns)
        number = ((head * grid.rows + row) * grid.columns + column)[inside]
        blocks = Blocks(number, None if mask is None else mask[inside], masks)
        return self._of_blocks(grid, blocks, key, self.batch, self.heads)

    def of_heads(self, batch: tuple[int, int], heads: tuple[int, int]) -> Self:
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
        own = self._number_heads()[b:b_end, h:h_end]
        key = ("heads", self.key, *ranges)
        return self._of_blocks(self.grid, self._take_heads(own), key, *counts)

    def repeat_for_query_heads(self, group: int) -> Self:
        """The layout of query heads, from one of key heads that `group` adjacent ones share."""
        if self.lists is None or self.heads == 1 or group == 1:
            return self
        if torch.compiler.is_dynamo_compiling() or self._is_captured():
            return self._repeat(self.lists, group)
        by_group: dict[int, Self] = self.__dict__.setdefault("_by_group", {})
        if group not in by_group:
            by_group[group] = self._repeat(self.lists, group)
        return by_group[group]

    def _repeat(self, own: Lists, group: int) -> Self:
        repeated = lists.repeat_for_query_heads(own, group)
        key = ("query heads", self.key, group)
        return self._of_lists(self.grid, repeated, key, self.batch, self.heads * group)

    def _is_captured(self) -> bool:
        """Whether a CUDA graph, which owns what it allocates, is captured now."""
        return self.device.type == "cuda" and state.is_capturing()

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """All that decides how attention is computed, but for lengths and the lists' values."""
        return self.block, self.batch, self.heads, self.device, self.lists is None

    def _number_heads(self) -> torch.Tensor:
        numbers = torch.arange(self.batch * self.heads, device=self.device)
        return numbers.view(self.batch, self.heads)

    def _take_heads(self, own: torch.Tensor) -> Blocks:
        """The blocks of these heads, given by number for each row of the batch."""
        return lists.repeat_heads(self.blocks(), own.flatten(), self.grid.rows * self.grid.columns)

    def __or__(self, other: Self) -> Self:
        """The blocks of either layout."""
        return self._join(other, union=True)

    def __and__(self, other: Self) -> Self:
        """The blocks of both layouts."""
        return self._join(other, union=False)

    def _join(self, other: Self, union: bool) -> Self:
        if not isinstance(other, BlockSet) or self.grid != other.grid:
            accepted = f"a layout of {self.grid}"
            raise ArgumentError("BlockLayout", "other", repr(other), accepted)
        if self.lists is None or other.lists is None:
            dense, rest = (self, other) if self.lists is None else (other, self)
            return dense if union else rest
        counts = self._join_heads(other)
        one, two = (
            part.blocks()
            if counts == (part.batch, part.heads)
            else part._take_heads(part._number_heads().expand(counts))
            for part in (self, other)
        )
        blocks = lists.join(one, two, self.block, union)
        key = ("|" if union else "&", self.key, other.key)
        return self._of_blocks(self.grid, blocks, key, *counts)

    def _join_heads(self, other: Self) -> tuple[int, int]:
        sizes = []
        for name in ("batch", "heads"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and 1 not in (mine, theirs):
                accepted = f"a layout for {mine} {name}, or one that is shared"
                raise ArgumentError("BlockLayout", "other", f"for {theirs} {name}", accepted)
            sizes.append(max(mine, theirs))
        return sizes[0], sizes[1]

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
