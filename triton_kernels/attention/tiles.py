"""The tiles of attention's kernels, and into how many pieces long lines are divided.

One product feeds the next, so that Triton gives every warp 16 whole rows of both. A tile therefore
takes `4 * max(rows // 64, 1)` warps: with more, several warps compute the same rows. The tiles here
do not.

A user's process takes the rule's tile. `torchweld tune` times the others on its GPU, and keeps the
fastest for later processes (torchweld/dispatch/tile_proof.py).
docs/notebook/attention-tiles.md has what they take on each GPU, and what an H200 measured;
tests/tools/test_triton_aot.py compiles them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from ..memory import MOST_SHARED_MEMORY
from ..tiled import Tile

Tiles = tuple[Tile, ...]


class TileChoice(NamedTuple):
    """A kernel's tiles for blocks of 128 and for smaller ones.

    The rule's tile is the first one that is no longer than a block. `torchweld tune` times a tile
    of 64 rows after it, and the `further` tiles for light calls, against it. `heavy` tiles serve
    calls with random numbers, biases or mask bits, which take registers.
    """

    light: Tiles
    heavy: Tiles
    further: Tiles = ()


def _same(*tiles: Tile) -> TileChoice:
    return TileChoice(tiles, tiles)


_WIDE, _NARROW = (
    (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
)
_SCORES = Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)
_AHEAD = Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)
_LONG = (Tile(128, 128, 8, 2),)
_SMALL = Tile(32, 32, 4, 1)
_NARROWEST = 64  # head with tiles of its own
# The kernels, and the sums of keys, of values or of both that a launch has. By the generation of
# the GPU and the padded head. From sm_90 on a group of four warps computes 64 rows at once.
FORWARD, QUERIES, KEYS, VALUES, BOTH = "forward", "queries", "keys", "values", "both"
_TILES: dict[int, dict[str, dict[int, TileChoice]]] = {
    80: {
        FORWARD: {
            64: _same(*_SCORES),
            128: TileChoice((_SCORES[0], Tile(64, 32, 4, 2)), (Tile(128, 32, 8, 2), _SCORES[1])),
            256: _same(Tile(32, 32, 4, 2)),
        },
        QUERIES: {
            64: TileChoice(_WIDE, _NARROW),
            128: TileChoice(_WIDE, _NARROW),
            256: _same(Tile(32, 32, 4, 2)),
        },
        KEYS: {128: TileChoice(_NARROW, _NARROW[1:]), 256: _same(_SMALL)},
        VALUES: {128: _same(*_NARROW), 256: _same(_SMALL)},
        BOTH: {64: TileChoice(_NARROW[1:], (Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)))},
    },
    90: {
        FORWARD: {
            64: TileChoice(_SCORES, (_SCORES[0], _AHEAD[1]), _LONG),
            128: TileChoice((_AHEAD[0], _SCORES[1]), (_SCORES[0], _AHEAD[1]), _SCORES[:1]),
            256: TileChoice(_NARROW, (_NARROW[0], Tile(64, 16, 4, 2))),
        },
        QUERIES: {
            64: TileChoice((_AHEAD[1], _WIDE[1]), _AHEAD[1:]),
            128: TileChoice((_AHEAD[0], _WIDE[1]), _AHEAD[1:]),
            256: TileChoice((_NARROW[0], Tile(64, 16, 4, 2)), (_NARROW[0], Tile(32, 32, 4, 2))),
        },
        KEYS: {
            128: TileChoice(_NARROW, (_NARROW[0], Tile(64, 16, 4, 2))),
            256: TileChoice((_SMALL,), (Tile(16, 32, 4, 1),)),
        },
        VALUES: {
            128: _same(*_NARROW),
            256: TileChoice((Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)), (Tile(32, 32, 4, 2),)),
        },
        BOTH: {
            64: TileChoice(_SCORES[1:], _NARROW[1:]),
            128: TileChoice((_WIDE[1], _AHEAD[1]), (_AHEAD[1], _NARROW[1]), _SCORES[:1]),
        },
    },
    100: {
        FORWARD: {
            64: TileChoice(_SCORES, _SCORES, _LONG),
            128: TileChoice(_SCORES, _SCORES, _LONG),
            256: _same(*_NARROW),
        },
        QUERIES: {
            64: TileChoice(_WIDE, _NARROW),
            128: TileChoice(_WIDE, _NARROW),
            256: _same(*_NARROW),
        },
        KEYS: {128: _same(*_NARROW), 256: _same(_SMALL)},
        VALUES: {128: _same(*_NARROW), 256: _same(_SMALL)},
        BOTH: {64: _same(*_NARROW)},
    },
}


def generation_of(capability: tuple[int, int], memory: int) -> int:
    """Whose tiles a GPU takes, by its products and by its shared memory.

    The tiles of sm_80 fit every GPU: they take no more than LEAST_SHARED_MEMORY.
    """
    by_products = {9: 90, 10: 100}.get(capability[0], 80)
    return by_products if memory >= MOST_SHARED_MEMORY else 80


def sums_of(generation: int, width: int, *, plain: bool) -> tuple[str, ...]:
    """What the launches for a padded head sum: keys and values together, or one after the other.

    Both sums of a head of 128 spill a few registers on sm_90, but the scores are computed once: an
    H200 takes 1.21 ms where two launches without spills take 2.1. `plain`: 16 bits, and no bias for
    each pair.
    """
    widest = max(_TILES[generation][BOTH]) if plain else _NARROWEST
    return (BOTH,) if width <= widest else (KEYS, VALUES)


def tiles_of(
    generation: int,
    kernel: str,
    width: int,
    block: int,
    line: int,
    *,
    wide: bool,
    heavy: bool,
    biased: bool,
) -> list[Tile]:
    """The tiles for a padded head, a block, and lines of so many tokens on average.

    `wide`: elements are of float32; `biased`: the places of each pair's bias take registers.
    """
    choice = _TILES[generation][kernel][max(width, _NARROWEST)]
    tiles = choice.heavy if heavy else choice.light
    by_rule, *smaller = [tile for tile in tiles if tile.own <= block] or [tiles[-1]]
    # From sm_100 on, products of 64 rows take slower instructions.
    others = [t for t in smaller if t.own == 64 and generation < 100]
    if not heavy:  # a longer part of long lines
        others += [t for t in choice.further if t.own <= block and 4 * t.taken <= line]
    of_keys = kernel in (KEYS, VALUES, BOTH)
    # The gradients of keys, two sums of products, would spill with four warps.
    fixed = ((32, 8, 2) if of_keys else (32, 4, 3)) if biased else (32, 8, 1)
    if wide or biased:
        by_rule, others = Tile(min(by_rule.own, 32), *fixed), []
    return list(dict.fromkeys(_shrink(tile, block, line) for tile in (by_rule, *others)))


def _shrink(tile: Tile, block: int, line: int) -> Tile:
    """Limit a tile to a block, and to part of a line, whose last tile is half empty on average."""
    own, taken, warps, stages, *_ = tile
    if block < own:
        own, warps = block, max(warps * block // own, 4)
    while taken > 32 and 4 * taken > line:
        taken //= 2
    return Tile(own, taken, warps, stages)


class Pieces(NamedTuple):
    """How many pieces lines have beyond their first, and a piece's fewest entries of all heads."""

    extras: int
    least: int


LEAST_TOKENS = 2048  # of a piece; dkv.py has the costs
_PROGRAMS = 2  # of a processor


def divide(
    planes: int,
    lines: int,
    walked: int,
    group: int,
    block: int,
    own: int,
    processors: int,
    *,
    has_table: bool,
    per_head: bool,
) -> Pieces | None:
    """For `lines` lines, of at most `walked` tokens for each of a group's heads; None: as a whole.

    `per_head`: heads that share keys have layouts of their own.
    """
    least = triton.cdiv(LEAST_TOKENS, block)
    longest = group * triton.cdiv(walked, block)
    programs = planes * lines * (block // own)
    if not programs or longest <= least:
        return None
    wanted = triton.cdiv(_PROGRAMS * processors, programs)
    if per_head:  # in whole heads
        pieces = min(wanted, group, longest // least)
        return Pieces(lines * (pieces - 1), least) if pieces > 1 else None
    if not has_table:  # all lines are equally long
        pieces = min(wanted, longest // least)
        return Pieces(lines * (pieces - 1), least) if pieces > 1 else None
    return Pieces(max(lines // 2, lines * (wanted - 1), 1), least)
