"""Decides from numbers only, without a device, what is on the device when.

A chunk is memory that moves as one: a bucket's states, or a layer's parameters. A training step is
a period of moments. Each moment uses some chunks and needs some other memory. As in Gemini, a
warm-up measures the other memory, the device keeps a margin, and chunks are evicted in the order of
their next use, the farthest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from torchweld.errors import ArgumentError

# The share of the device's capacity available for plans.
MARGIN = 0.9


class ChunkState(Enum):
    """The state of a chunk: its use on the device, or its absence."""

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_BACKWARD = "hold after backward"  # its gradients are complete


_NEXT = {
    ChunkState.FREE: {ChunkState.HOLD, ChunkState.COMPUTE},
    ChunkState.HOLD: {ChunkState.COMPUTE, ChunkState.FREE},
    ChunkState.COMPUTE: {ChunkState.HOLD, ChunkState.HOLD_AFTER_BACKWARD},
    ChunkState.HOLD_AFTER_BACKWARD: {ChunkState.FREE, ChunkState.HOLD, ChunkState.COMPUTE},
}


class Tracer:
    """The peak of other memory at each moment, over the last periods."""

    def __init__(self, window: int = 3) -> None:
        self._window = window
        self._seen: dict[Hashable, deque[int]] = {}

    def add(self, moment: Hashable, in_use: int, planned: int) -> None:
        """Record the bytes in use at a moment, and how many of them the plan knows."""
        seen = self._seen.setdefault(moment, deque(maxlen=self._window))
        seen.append(max(0, in_use - planned))

    def others(self, moment: Hashable) -> int:
        """The bytes of other memory at a moment; 0 before a measurement."""
        return max(self._seen.get(moment, [0]))

    def largest(self) -> int:
        """The most at any moment."""
        return max((self.others(moment) for moment in self._seen), default=0)

    def forget(self) -> None:
        """Forget all measurements."""
        self._seen.clear()


class ChunkSize(NamedTuple):
    """A chunk size, the number of chunks, and their unused bytes."""

    size: int
    chunks: int
    waste: int


def packed(sizes: Sequence[int], size: int) -> ChunkSize:
    """Chunks of this size that tensors fill in order; a larger tensor has a chunk of its own."""
    count, free, waste = 0, 0, 0
    for tensor in sizes:
        if tensor > free:
            waste += free
            count += 1
            free = max(size, tensor)
        free -= tensor
    return ChunkSize(size, count, waste + free)


def search_chunk_size(sizes: Sequence[int], least: int, most: int, step: int) -> ChunkSize:
    """The size between these that wastes least; the largest of equals."""
    if not 0 < least <= most or step < 1:
        came = f"{least} to {most} by {step}"
        raise ArgumentError("search_chunk_size", "sizes", came, "0 < least <= most, step >= 1")
    found = (packed(sizes, size) for size in range(least, most + 1, step))
    return min(found, key=lambda chunks: (chunks.waste, -chunks.size))


def resident(sizes: Sequence[int], room: int) -> list[bool]:
    """Which buckets, in the order of parameters, keep their states on the device.

    The gradients of the first parameters come last. By then the host has stepped the others, or has
    begun to. So the first ones stay.
    """
    chosen: list[bool] = []
    for size in sizes:
        fits = size <= room and all(chosen)
        chosen.append(fits)
        room -= size if fits else 0
    return chosen


class Moves(NamedTuple):
    """Chunks that a moment brings to the device, and those evicted before."""

    loaded: tuple[int, ...]
    evicted: tuple[int, ...]


class Residency:
    """Chunks on a device over a period that repeats.

    Args:
        sizes: the bytes of each chunk.
        uses: the chunks that each moment uses.
        rooms: the bytes for chunks at each moment.
    """

    def __init__(
        self, sizes: Sequence[int], uses: Sequence[Sequence[int]], rooms: Sequence[int]
    ) -> None:
        self._sizes, self._uses = sizes, uses
        # Chunks brought for a moment stay for the next one.
        self._rooms = [min(pair) for pair in pairwise([*rooms, rooms[0]])] if rooms else []
        self.states = [ChunkState.FREE] * len(sizes)
        self._moments: dict[int, list[int]] = {}
        for moment, used in enumerate(uses):
            for chunk in used:
                self._moments.setdefault(chunk, []).append(moment)

    def held(self) -> int:
        """The bytes of all chunks on the device."""
        on_device = zip(self._sizes, self.states, strict=True)
        return sum(size for size, state in on_device if state is not ChunkState.FREE)

    def until_use(self, chunk: int, moment: int) -> int:
        """Moments until the chunk's next use after this one; over a period if there is none."""
        period = len(self._uses)
        waits = ((at - moment - 1) % period + 1 for at in self._moments.get(chunk, ()))
        return min(waits, default=2 * period)

    def enter(self, moment: int, after_backward: bool = False) -> Moves:
        """Bring the chunks that the moment uses, and evict others as needed.

        Raises MemoryError if the moment's own chunks do not fit.
        """
        used = self._uses[moment]
        for chunk, state in enumerate(self.states):
            if state is ChunkState.COMPUTE:
                self._to(chunk, _after(after_backward))
        missing = [chunk for chunk in used if self.states[chunk] is ChunkState.FREE]
        room = self._rooms[moment] - sum(self._sizes[chunk] for chunk in missing)
        evicted = []
        while self.held() > room:
            others = [c for c, state in enumerate(self.states) if state is not ChunkState.FREE]
            others = [chunk for chunk in others if chunk not in used]
            if not others:
                needed = sum(self._sizes[chunk] for chunk in used)
                raise MemoryError(f"moment {moment} uses {needed} bytes; {room} are free")
            farthest = max(others, key=lambda chunk: (self.until_use(chunk, moment), chunk))
            self._to(farthest, ChunkState.FREE)
            evicted.append(farthest)
        for chunk in used:
            self._to(chunk, ChunkState.COMPUTE)
        return Moves(tuple(missing), tuple(evicted))

    def _to(self, chunk: int, state: ChunkState) -> None:
        assert state in _NEXT[self.states[chunk]] or state is self.states[chunk]
        self.states[chunk] = state


def _after(backward: bool) -> ChunkState:
    return ChunkState.HOLD_AFTER_BACKWARD if backward else ChunkState.HOLD
