"""Builders of compound patterns, named like DeepSpeed's configurations."""

from __future__ import annotations

from collections.abc import Sequence

from torchweld.errors import ArgumentError
from torchweld.sparse import patterns
from torchweld.sparse.builders import (
    Draft,
    check_at_least,
    draft_union,
    draft_with_random,
    is_unidirectional,
)
from torchweld.sparse.patterns import Grid


def _list_indices(begins: Sequence[int], ends: Sequence[int] | None, limit: int) -> list[int]:
    """List the blocks of these ranges below the limit. Without `ends`, each range is one block."""
    begins = list(begins)
    ends = [begin + 1 for begin in begins] if ends is None else list(ends)
    if len(ends) != len(begins) or any(b < 0 or b >= e for b, e in zip(begins, ends, strict=True)):
        accepted = "as many ends as beginnings, each after its beginning"
        raise ArgumentError("BlockLayout", "global_block_indices", f"{begins} to {ends}", accepted)
    return sorted({i for b, e in zip(begins, ends, strict=True) for i in range(b, min(e, limit))})


def build_fixed(
    grid: Grid,
    num_heads: int,
    num_local_blocks: int,
    num_global_blocks: int,
    attention: str,
    horizontal_global_attention: bool,
    num_different_global_patterns: int,
) -> Draft:
    """Build Sparse Transformer's fixed pattern."""
    whole = grid.aligned()
    check_at_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
    check_at_least(1, num_heads=num_heads, different_patterns=num_different_global_patterns)
    if num_local_blocks < num_global_blocks * num_different_global_patterns:
        actual = f"{num_different_global_patterns}, with {num_global_blocks} global blocks each"
        accepted = f"at most {num_local_blocks // num_global_blocks}, for {num_local_blocks} blocks"
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
        chosen = _list_indices(begins, [b + num_global_blocks for b in begins], grid.columns)
        shared = patterns.list_global_blocks(
            whole, chosen, backward_only, horizontal_global_attention
        )
        numbers += [number + head * whole.rows * whole.columns for number in (local, *shared)]
    key = (
        *("fixed", heads, num_local_blocks, num_global_blocks),
        *(horizontal_global_attention, num_different_global_patterns),
    )
    return draft_union(grid, numbers, key, attention, heads)


def build_variable(
    grid: Grid,
    heads: int,
    num_random_blocks: int,
    local_window_blocks: Sequence[int],
    global_block_indices: Sequence[int],
    global_block_end_indices: Sequence[int] | None,
    attention: str,
    horizontal_global_attention: bool,
    seed: int,
) -> Draft:
    """Build local windows, global blocks and random blocks."""
    whole = grid.aligned()
    check_at_least(0, num_random_blocks=num_random_blocks)
    sizes = list(local_window_blocks)
    if not sizes or min(sizes) < 1:
        raise ArgumentError("BlockLayout", "local_window_blocks", repr(sizes), "sizes >= 1")
    backward_only = is_unidirectional(attention)
    chosen = _list_indices(global_block_indices, global_block_end_indices, grid.columns)
    shared = [
        patterns.list_windows(whole, sizes),
        *patterns.list_global_blocks(whole, chosen, backward_only, horizontal_global_attention),
    ]
    key = ("variable", tuple(sizes), tuple(chosen), horizontal_global_attention)
    return draft_with_random(grid, shared, num_random_blocks, heads, seed, key, attention)


def build_bigbird(
    grid: Grid,
    heads: int,
    num_random_blocks: int,
    num_sliding_window_blocks: int,
    num_global_blocks: int,
    attention: str,
    seed: int,
) -> Draft:
    """Build BigBird's pattern."""
    whole = grid.aligned()
    check_at_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
    check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
    chosen = list(range(min(num_global_blocks, grid.columns)))
    shared = [
        patterns.list_window(whole, num_sliding_window_blocks),
        *patterns.list_global_blocks(whole, chosen, False, True),
    ]
    key = ("bigbird", num_sliding_window_blocks, num_global_blocks)
    return draft_with_random(grid, shared, num_random_blocks, heads, seed, key, attention)


def build_longformer(
    grid: Grid,
    num_sliding_window_blocks: int,
    global_block_indices: Sequence[int],
    global_block_end_indices: Sequence[int] | None,
    attention: str,
) -> Draft:
    """Build Longformer's pattern."""
    whole = grid.aligned()
    check_at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
    chosen = _list_indices(global_block_indices, global_block_end_indices, grid.columns)
    numbers = [
        patterns.list_window(whole, num_sliding_window_blocks),
        *patterns.list_global_blocks(whole, chosen, False, True),
    ]
    key = ("longformer", num_sliding_window_blocks, tuple(chosen))
    return draft_union(grid, numbers, key, attention)
