"""A launch with several tiles, of which one serves.

The first tile is the rule's. It serves in ahead-of-time compiles, and until
torchweld.dispatch.tile_proof is connected, which knows the tiles that `torchweld tune` timed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .launch import Launch, run


class Tile(NamedTuple):
    """What a program has of queries and of keys: its own, and as many as it takes at a time."""

    own: int
    taken: int
    warps: int
    stages: int
    specialised: bool = False  # its warps: one copies, others multiply
    persistent: bool = False  # as many programs as fit the GPU

    def __str__(self) -> str:
        words = f"{self.own} x {self.taken} by {self.warps} warps, {self.stages} stages"
        words += ", warp-specialised" if self.specialised else ""
        return f"{words}, persistent" if self.persistent else words


class TiledLaunch(NamedTuple):
    """Launches of a kernel that differ in their tile, and write the same results."""

    key: Hashable  # equal for calls that one answer serves
    # Everything that results depend on, by name, and what only times depend on besides.
    describe: Callable[[], dict[str, Any]]
    size: int
    tiles: Sequence[Tile]
    launch: Callable[[Tile], Launch]
    results: Sequence[torch.Tensor]  # each launch overwrites them, and reads none of them
    after: Callable[[Tile], Iterable[Launch]] = lambda tile: ()  # what follows that launch

    def launches_with(self, tile: Tile) -> list[Launch]:
        return [self.launch(tile), *self.after(tile)]

    def launches(self) -> list[Launch]:
        return [*[self.launch(tile) for tile in self.tiles], *self.after(self.tiles[0])]


choose: Callable[[torch.Tensor, TiledLaunch], Tile] | None = None


def run_tiled(on: torch.Tensor, tiled: TiledLaunch) -> None:
    """Run the launch with the tile that serves this class of calls."""
    tiles = tiled.tiles
    tile = tiles[0] if choose is None or len(tiles) == 1 else choose(on, tiled)
    run(on, *tiled.launches_with(tile))
