"""The policy's decisions on traces, recorded and random ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweld.optim.offload._policy import Placement, Seen, choose_resident


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(-50, 900))
def test_the_first_buckets_stay(sizes: list[int], room: int) -> None:
    chosen = choose_resident(sizes, room)
    count = sum(chosen)
    assert chosen == [True] * count + [False] * (len(sizes) - count)
    assert sum(sizes[:count]) <= max(room, 0)
    assert count == len(sizes) or sum(sizes[: count + 1]) > room


def test_the_last_three_steps_are_remembered() -> None:
    """A trace as a device recorded it: bytes in use, and what the placement knew of them."""
    placement, found = Placement(), []
    for in_use, placed in [(9, 4), (7, 4), (6, 4), (5, 4), (3, 4)]:
        phases = {"backward": Seen(in_use, placed), "step": Seen(placed, placed)}
        found.append(sum(placement.decide(phases, [1] * 20, 10)))
    assert found == [9 - others for others in (5, 5, 5, 3, 2)]


def test_gradients_may_outlive_the_first_step() -> None:
    """One step shows nothing of it, and a later one does."""
    placement = Placement()
    first = {"forward": Seen(50, 0, may_come=30), "backward": Seen(60, 0)}
    assert sum(placement.decide(first, [10] * 9, 100)) == 1  # 90 - 80
    for _ in range(2):
        assert sum(placement.decide(first, [10] * 9, 100)) == 1  # three steps are remembered
    assert sum(placement.decide(first, [10] * 9, 100)) == 3  # 90 - 60
    grown = first | {"forward": Seen(50 + 30 + 30, 30)}
    assert sum(placement.decide(grown, [10] * 9, 100)) == 1
    placement.forget()
    assert sum(placement.decide(first, [10] * 9, 100, keep=lambda room: room)) == 0
