"""The policy's decisions on traces, recorded and random ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchweld.optim.offload.policy import Placement, Seen, Tracer, choose_resident


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(-50, 900))
def test_the_first_buckets_stay(sizes: list[int], room: int) -> None:
    chosen = choose_resident(sizes, room)
    count = sum(chosen)
    assert chosen == [True] * count + [False] * (len(sizes) - count)
    assert sum(sizes[:count]) <= max(room, 0)
    assert count == len(sizes) or sum(sizes[: count + 1]) > room


def test_the_tracer_remembers_a_few_periods() -> None:
    """A trace as a device recorded it: bytes in use, and what the plan knew of them."""
    tracer = Tracer(window=3)
    trace = [(9, 4), (7, 4), (6, 4), (5, 4), (3, 4)]
    found = []
    for in_use, planned in trace:
        tracer.add("backward", in_use, planned)
        tracer.add("step", planned, planned)
        found.append(tracer.others("backward"))
    assert found == [5, 5, 5, 3, 2]
    assert (tracer.largest(), tracer.others("forward")) == (2, 0)
    tracer.forget()
    assert tracer.largest() == 0


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
