"""Builders of compound patterns, named like DeepSpeed's configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchweld.errors import ArgumentError
from torchweld.sparse import patterns
from torchweld.sparse.builders import Builders, at_least, grid_of, is_unidirectional

if TYPE_CHECKING:
    from typing_extensions import Self


def _indices(begins: Sequence[int], ends: Sequence[int] | None, limit: int) -> list[int]:
    """The blocks of these ranges, or the blocks `begins`, below the limit."""
    begins = list(begins)
    ends = [begin + 1 for begin in begins] if ends is None else list(ends)
    if len(ends) != len(begins) or any(b < 0 or b >= e for b, e in zip(begins, ends, strict=True)):
        accepted = "as many ends as beginnings, each after its beginning"
        raise ArgumentError("BlockLayout", "global_block_indices", f"{begins} to {ends}", accepted)
    return sorted({i for b, e in zip(begins, ends, strict=True) for i in range(b, min(e, limit))})


class Compounds(Builders):
    """Class methods that build compound patterns."""

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
    ) -> Self:
        """Sparse Transformer's fixed pattern: local windows, whose last blocks all rows see.

        With `num_different_global_patterns` the `num_heads` heads differ: the global blocks of head
        h come before those of head h - 1 in a window.
        """
        grid = grid_of(seq_len, block, device)
        whole = grid.aligned()
        at_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        at_least(1, num_heads=num_heads, different_patterns=num_different_global_patterns)
        if num_local_blocks < num_global_blocks * num_different_global_patterns:
            came = f"{num_different_global_patterns}, of {num_global_blocks} global blocks each"
            accepted = f"as many as {num_local_blocks} local blocks have room for"
            raise ArgumentError("BlockLayout", "num_different_global_patterns", came, accepted)
        backward_only = is_unidirectional(attention)
        heads = num_heads if num_different_global_patterns > 1 else 1
        last = grid.columns - grid.columns % num_local_blocks
        local = patterns.windows(whole, [num_local_blocks])
        numbers = []
        for head in range(heads):
            place = 1 + head % num_different_global_patterns
            first = num_local_blocks - place * num_global_blocks
            begins = list(range(first, last, num_local_blocks))
            if last < grid.columns:  # the last window is shorter
                begins.append(max(min(last + first, grid.columns - num_global_blocks), 0))
            chosen = _indices(begins, [b + num_global_blocks for b in begins], grid.columns)
            parts = [
                local,
                *patterns.seen_by_all(whole, chosen, backward_only, horizontal_global_attention),
            ]
            numbers += [part + head * whole.rows * whole.columns for part in parts]
        key = (
            *("fixed", heads, num_local_blocks, num_global_blocks),
            *(horizontal_global_attention, num_different_global_patterns),
        )
        return cls._union(grid, numbers, key, attention, heads)

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
    ) -> Self:
        """Local windows of given sizes (the last one repeats), global blocks and random blocks."""
        grid = grid_of(seq_len, block, device)
        whole = grid.aligned()
        at_least(0, num_random_blocks=num_random_blocks)
        sizes = list(local_window_blocks)
        if not sizes or min(sizes) < 1:
            raise ArgumentError("BlockLayout", "local_window_blocks", repr(sizes), "sizes >= 1")
        backward_only = is_unidirectional(attention)
        chosen = _indices(global_block_indices, global_block_end_indices, grid.columns)
        shared = [
            patterns.windows(whole, sizes),
            *patterns.seen_by_all(whole, chosen, backward_only, horizontal_global_attention),
        ]
        heads = num_heads if different_layout_per_head else 1
        key = ("variable", tuple(sizes), tuple(chosen), horizontal_global_attention)
        return cls._with_random(grid, shared, num_random_blocks, heads, seed, key, attention)

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
    ) -> Self:
        """BigBird's pattern: a sliding window, global first blocks, and random blocks.

        Unidirectional rows draw from the blocks that they may see, so the first rows have fewer.
        """
        grid = grid_of(seq_len, block, device)
        whole = grid.aligned()
        at_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
        at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        chosen = list(range(min(num_global_blocks, grid.columns)))
        shared = [
            patterns.window(whole, num_sliding_window_blocks),
            *patterns.seen_by_all(whole, chosen, False, True),
        ]
        heads = num_heads if different_layout_per_head else 1
        key = ("bigbird", num_sliding_window_blocks, num_global_blocks)
        return cls._with_random(grid, shared, num_random_blocks, heads, seed, key, attention)

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
    ) -> Self:
        """Longformer's pattern: a sliding window, and blocks that see all and are seen by all."""
        grid = grid_of(seq_len, block, device)
        whole = grid.aligned()
        at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        chosen = _indices(global_block_indices, global_block_end_indices, grid.columns)
        numbers = [
            patterns.window(whole, num_sliding_window_blocks),
            *patterns.seen_by_all(whole, chosen, False, True),
        ]
        key = ("longformer", num_sliding_window_blocks, tuple(chosen))
        return cls._union(grid, numbers, key, attention)
