"""The policy of what stays on the device. It sees only numbers.

As in Gemini, the memory that a step needs for other things is measured, and the device keeps a
margin. The rest of its memory holds activations and the states of whole buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from torchweld.errors import ArgumentError

# The share of the device's capacity available for plans.
MARGIN = 0.9


class Tracer:
    """The peak of other memory at each moment of a step, over the last steps."""

    def __init__(self, window: int = 3) -> None:
        self._window = window
        self._seen: dict[Hashable, deque[int]] = {}

    def add(self, moment: Hashable, in_use: int, planned: int) -> None:
        """Record the bytes in use at a moment, of which the plan accounts for `planned`."""
        seen = self._seen.setdefault(moment, deque(maxlen=self._window))
        seen.append(max(0, in_use - planned))

    def others(self, moment: Hashable) -> int:
        """The bytes of other memory at a moment; 0 before a measurement."""
        return max(self._seen.get(moment, [0]))

    def largest(self) -> int:
        """The most bytes of other memory at any moment."""
        return max((self.others(moment) for moment in self._seen), default=0)

    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self._seen

    def forget(self) -> None:
        """Forget all measurements."""
        self._seen.clear()


class ChunkSize(NamedTuple):
    """A chunk size, the number of chunks, and their unused bytes."""

    size: int
    chunks: int
    waste: int


def pack_chunks(sizes: Sequence[int], size: int) -> ChunkSize:
    """Count the chunks of this size that tensors fill in order.

    A tensor larger than a chunk has its own.
    """
    count, free, waste = 0, 0, 0
    for tensor in sizes:
        if tensor > free:
            waste += free
            count += 1
            free = max(size, tensor)
        free -= tensor
    return ChunkSize(size, count, waste + free)


def search_chunk_size(sizes: Sequence[int], least: int, most: int, step: int) -> ChunkSize:
    """Find the size from `least` to `most` that wastes least; the largest of equal ones."""
    if not 0 < least <= most or step < 1:
        actual = f"{least} to {most} by {step}"
        raise ArgumentError("search_chunk_size", "sizes", actual, "0 < least <= most, step >= 1")
    candidates = (pack_chunks(sizes, size) for size in range(least, most + 1, step))
    return min(candidates, key=lambda chunks: (chunks.waste, -chunks.size))


def choose_resident(sizes: Sequence[int], room: int) -> list[bool]:
    """Choose the buckets that keep their states on the device, in the order of parameters.

    The first ones stay: their gradients are ready last, so the host could not step them during the
    backward pass.
    """
    chosen: list[bool] = []
    for size in sizes:
        fits = size <= room and all(chosen)
        chosen.append(fits)
        room -= size if fits else 0
    return chosen


class Seen(NamedTuple):
    """The memory of the device in a phase of a step, in bytes.

    Args:
        peak: the most bytes in use.
        placed: the bytes that the current placement keeps on the device: states and activations,
            and the gradients of buckets on the device if other gradients are released.
        may_come: the bytes of gradients that did not exist, but may exist in the same phase of the
            next step.
    """

    peak: int
    placed: int
    may_come: int = 0


class Placement:
    """The rule of placement="auto": it decides which buckets keep their states on the device."""

    def __init__(self) -> None:
        self._tracer = Tracer()

    def decide(
        self,
        phases: Mapping[str, Seen],
        sizes: Sequence[int],
        capacity: int,
        keep: Callable[[int], int] = lambda room: 0,
    ) -> list[bool]:
        """Decide for the next step, from the phases of the last one.

        Other memory does not depend on the placement. So the room is the capacity, less the margin
        and the most other memory that any phase of the last steps used.

        Args:
            phases: the memory that each phase used.
            sizes: the bytes that each bucket takes on the device, in the order of parameters.
            capacity: the bytes of the device.
            keep: keeps activations in a room, and returns the bytes of it that they take.
                Activations have priority: an offloaded byte is copied twice in every step.
        """
        # Only a second step shows whether gradients outlive a step.
        is_first = self._tracer.is_empty()
        for name, seen in phases.items():
            self._tracer.add(name, seen.peak + seen.may_come * is_first, seen.placed)
        room = int(MARGIN * capacity) - self._tracer.largest()
        return choose_resident(sizes, room - keep(room))

    def forget(self) -> None:
        """Forget all measurements."""
        self._tracer.forget()
