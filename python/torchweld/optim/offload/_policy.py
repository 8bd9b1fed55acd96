"""The policy of what stays on the device. It sees only numbers.

As in Gemini, the memory that a step needs for other things is measured, and the device keeps a
margin. The rest of its memory holds activations and the states of whole buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# The share of the device's capacity available for plans.
MARGIN = 0.9
# The number of steps whose measurements count.
_REMEMBERED = 3


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
        # The peaks of other memory in each phase of the last steps.
        self._others: dict[str, deque[int]] = {}

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
        is_first = not self._others
        for name, seen in phases.items():
            others = seen.peak + seen.may_come * is_first - seen.placed
            self._others.setdefault(name, deque(maxlen=_REMEMBERED)).append(max(0, others))
        room = int(MARGIN * capacity) - max(map(max, self._others.values()), default=0)
        return choose_resident(sizes, room - keep(room))

    def forget(self) -> None:
        """Forget all measurements."""
        self._others.clear()
