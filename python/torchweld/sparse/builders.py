"""BlockLayout's builders: shared code, and the elementary patterns."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import lists, patterns
from torchweld.sparse.lists import Blocks, Lists
from torchweld.sparse.patterns import Grid

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCKS = (16, 32, 64, 128)
ATTENTION = ("bidirectional", "unidirectional")


def grid_of(seq_len: int | tuple[int, int], block: int, device: torch.device | str | None) -> Grid:
    pair = seq_len if isinstance(seq_len, tuple | list) else (seq_len, seq_len)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) and n >= 0 for n in pair):
        raise ArgumentError("BlockLayout", "seq_len", repr(seq_len), "tokens, or a pair of them")
    queries, keys = map(int, pair)
    if block not in BLOCKS:
        raise ArgumentError("BlockLayout", "block", repr(block), " or ".join(map(str, BLOCKS)))
    return Grid(queries, keys, block, torch.empty(0, device=device or "cpu").device)


def at_least(least: int, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < least:
            raise ArgumentError("BlockLayout", name, repr(value), f"an int >= {least}")


def is_unidirectional(attention: str) -> bool:
    if attention not in ATTENTION:
        raise ArgumentError("BlockLayout", "attention", repr(attention), " or ".join(ATTENTION))
    return attention == "unidirectional"


class Builders:
    """Class methods that build a layout.

    `seq_len` is a length in tokens, or a pair of them for queries and keys. The last query is
    aligned with the last key: a pattern of fewer queries than keys is the last rows of the pattern
    of as many. `attention="unidirectional"` lets no query see a later key, token by token.
    """

    @classmethod
    def _of(
        cls, grid: Grid, found: Lists | None, key: Hashable = None, batch: int = 1, heads: int = 1
    ) -> Self:
        raise NotImplementedError

    def blocks(self) -> Blocks:
        """The blocks, in order."""
        raise NotImplementedError

    @classmethod
    def _make(
        cls, grid: Grid, blocks: Blocks, key: Hashable = None, batch: int = 1, heads: int = 1
    ) -> Self:
        """Make a layout of these blocks. Without a key it equals only itself."""
        sizes = (batch, heads, grid.rows, grid.columns)
        found = lists.listed(blocks.number, blocks.mask, blocks.masks, sizes)
        return cls._of(grid, found, key, batch, heads)

    @classmethod
    def _union(
        cls,
        grid: Grid,
        numbers: Sequence[torch.Tensor],
        key: Hashable,
        attention: str = "bidirectional",
        heads: int = 1,
    ) -> Self:
        """The union of patterns, with block numbers of the aligned grid over all heads."""
        number = lists.in_order(torch.cat(list(numbers)))
        if len(numbers) > 1:
            number = number.unique_consecutive()
        blocks = Blocks(number, None, lists.no_masks(grid.block, grid.device))
        if is_unidirectional(attention):
            blocks = patterns.band(grid.aligned(), blocks, None, grid.before * grid.block)
        blocks = patterns.without_first(grid, blocks)
        return cls._make(grid, blocks, (*key, attention), 1, heads)  # type: ignore[misc]

    @classmethod
    def dense(
        cls,
        seq_len: int | tuple[int, int],
        *,
        block: int = 64,
        device: torch.device | str | None = None,
    ) -> Self:
        """Every block. It keeps no lists."""
        return cls._of(grid_of(seq_len, block, device), None, ("dense",))

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
    ) -> Self:
        """Blocks around the diagonal, or with `window_size` tokens before and after each query.

        `window_size` has FlashAttention's meaning: with (127, 0) a query sees its own key and the
        127 before it. -1 means no bound. Give only one of the two; the default is three blocks.
        """
        grid = grid_of(seq_len, block, device)
        if window_size is None:
            blocks = 3 if num_sliding_window_blocks is None else num_sliding_window_blocks
            at_least(1, num_sliding_window_blocks=blocks)
            key = ("sliding_window", blocks)
            return cls._union(grid, [patterns.window(grid.aligned(), blocks)], key, attention)
        if num_sliding_window_blocks is not None:
            came = f"given with num_sliding_window_blocks={num_sliding_window_blocks}"
            raise ArgumentError("BlockLayout", "window_size", came, "one of the two")
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
        number = patterns.spans(grid, first, end)
        blocks_ = Blocks(number, None, lists.no_masks(block, grid.device))
        key_ = ("sliding_window", before, after)
        return cls._make(grid, patterns.band(grid, blocks_, low, high), key_)

    @classmethod
    def block_local(
        cls,
        seq_len: int | tuple[int, int],
        num_local_blocks: int = 4,
        *,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> Self:
        """Windows of blocks along the diagonal. Each sees only itself."""
        grid = grid_of(seq_len, block, device)
        at_least(1, num_local_blocks=num_local_blocks)
        number = patterns.windows(grid.aligned(), [num_local_blocks])
        return cls._union(grid, [number], ("block_local", num_local_blocks), attention)

    @classmethod
    def strided(
        cls,
        seq_len: int | tuple[int, int],
        stride: int = 4,
        *,
        block: int = 64,
        attention: str = "bidirectional",
        device: torch.device | str | None = None,
    ) -> Self:
        """Sparse Transformer's strided pattern: near blocks, and those at multiples of `stride`."""
        grid = grid_of(seq_len, block, device)
        at_least(1, stride=stride)
        near = patterns.window(grid.aligned(), 2 * stride - 1)
        numbers = [near, patterns.strides(grid.aligned(), stride)]
        return cls._union(grid, numbers, ("strided", stride), attention)

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
    ) -> Self:
        """A sliding window with gaps: every `dilation`-th block."""
        grid = grid_of(seq_len, block, device)
        at_least(1, num_sliding_window_blocks=num_sliding_window_blocks, dilation=dilation)
        number = patterns.dilated(grid.aligned(), num_sliding_window_blocks, dilation)
        return cls._union(
            grid, [number], ("dilated", num_sliding_window_blocks, dilation), attention
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
    ) -> Self:
        """Distinct random blocks in every row, or all that the row may see if there are fewer."""
        grid = grid_of(seq_len, block, device)
        at_least(1, num_random_blocks=num_random_blocks)
        heads = num_heads if different_layout_per_head else 1
        return cls._with_random(grid, [], num_random_blocks, heads, seed, ("random",), attention)

    @classmethod
    def _with_random(
        cls,
        grid: Grid,
        shared: list[torch.Tensor],
        blocks: int,
        heads: int,
        seed: int,
        key: tuple[Any, ...],
        attention: str,
    ) -> Self:
        whole = grid.aligned()
        each = whole.rows * whole.columns
        numbers = [part + head * each for head in range(heads) for part in shared]
        numbers.append(patterns.random(whole, blocks, heads, seed, is_unidirectional(attention)))
        return cls._union(grid, numbers, (*key, blocks, heads, seed), attention, heads)

    @classmethod
    def global_tokens(
        cls,
        seq_len: int | tuple[int, int],
        tokens: int | Sequence[int],
        *,
        block: int = 64,
        device: torch.device | str | None = None,
    ) -> Self:
        """Tokens that see all tokens and are seen by all: the first `tokens`, or those listed.

        They are positions among the keys.
        """
        grid = grid_of(seq_len, block, device)
        listed = list(range(tokens)) if isinstance(tokens, int) else sorted(set(tokens))
        if listed and not 0 <= listed[0] <= listed[-1] < grid.keys:
            accepted = f"positions below {grid.keys}"
            raise ArgumentError("BlockLayout", "tokens", f"{listed[0]} to {listed[-1]}", accepted)
        chosen = torch.tensor(listed, dtype=torch.int64, device=grid.device)
        key = ("global_tokens", tuple(listed))
        return cls._make(grid, patterns.global_tokens(grid, chosen), key)
