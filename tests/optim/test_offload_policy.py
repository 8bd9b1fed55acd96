"""The policy's decisions on traces: recorded, simulated and random ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from offload_simulation import (
    AUTO,
    CASES,
    GPT_1B,
    GPT_13B,
    STEP,
    UNDO,
    ChunkState,
    Machine,
    Plan,
    Residency,
    Scheme,
    Workload,
    compare,
    settle_plan,
    simulate,
)
from torchweld.optim.offload.policy import (
    MARGIN,
    Placement,
    Seen,
    Tracer,
    choose_resident,
    pack_chunks,
    search_chunk_size,
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(5, 60))
def test_chunk_sizes(sizes: list[int], most: int) -> None:
    """No size that the search could take wastes less."""
    found = search_chunk_size(sizes, 5, most, 3)
    assert found.waste == min(pack_chunks(sizes, size).waste for size in range(5, most + 1, 3))
    whole = [max(size, found.size) for size in sizes if size > found.size]
    assert found.waste == found.size * (found.chunks - len(whole)) + sum(whole) - sum(sizes)


def test_chunk_sizes_by_hand() -> None:
    assert pack_chunks([3, 3, 3, 10, 2], 6) == (6, 4, 3 + 4)
    assert search_chunk_size([3, 3, 3, 3], 4, 7, 1) == (6, 2, 0)
    with pytest.raises(torchweld.ArgumentError, match="sizes"):
        search_chunk_size([1], 4, 3, 1)


def test_the_farthest_next_use_goes() -> None:
    """Three layers forward and backward, room for two: at the turn the last ones stay."""
    residency = Residency([10] * 3, [[0], [1], [2], [2], [1], [0]], [20] * 6)
    moves = [residency.enter(moment, moment > 3) for moment in range(6)]
    assert [m.loaded for m in moves] == [(0,), (1,), (2,), (), (), (0,)]
    assert [m.evicted for m in moves] == [(), (), (0,), (), (), (2,)]
    assert residency.states == [
        ChunkState.COMPUTE,
        ChunkState.HOLD_AFTER_BACKWARD,
        ChunkState.FREE,
    ]
    # The next period finds the first ones.
    assert [residency.enter(moment).loaded for moment in range(2)] == [(), ()]
    with pytest.raises(MemoryError, match="moment 0 uses 30 bytes"):
        Residency([10] * 3, [[0, 1, 2]], [20]).enter(0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=8),
    st.lists(st.integers(18, 40), min_size=8, max_size=8),
)
def test_never_more_than_there_is_room_for(
    sizes: list[int], uses: list[list[int]], rooms: list[int]
) -> None:
    """With room for any two chunks: used chunks are present, with the fewest possible loads."""
    used = [sorted({chunk % len(sizes) for chunk in some}) for some in uses]
    residency = Residency(sizes, used, rooms[: len(used)])
    loads = 0
    for _ in range(2):
        for moment, chunks in enumerate(used):
            loads += len(residency.enter(moment).loaded)
            assert residency.held_bytes() <= rooms[moment]
            assert all(residency.states[chunk] is ChunkState.COMPUTE for chunk in chunks)
    if len(set(sizes)) == 1 and len(set(rooms[: len(used)])) == 1:
        assert loads == _fewest(used * 2, rooms[0] // sizes[0])


def _fewest(uses: list[list[int]], room: int) -> int:
    """The fewest loads, by exhaustive search."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chunks in uses:
        after: dict[frozenset[int], int] = {}
        for held, loads in best.items():
            everything = held | set(chunks)
            others = sorted(everything - set(chunks))
            for keep in product((False, True), repeat=len(others)):
                new = frozenset(chunks) | {c for c, k in zip(others, keep, strict=True) if k}
                if len(new) <= room:
                    count = loads + len(set(chunks) - held)
                    after[new] = min(count, after.get(new, count))
        best = after
    return min(best.values())


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


# --- Step times -----------------------------------------------------------------------------------

TWO = Workload("two layers", 2, 1000, tokens=1000)  # 12 million parameters a layer
FAST = Machine(1e12, compute=24e12, memory=1e12, link=24e9, host=336e9)


def test_step_times_by_hand() -> None:
    """A layer: 1 ms forward, 3 ms backward, 1 ms a copy, 1 ms a step, 2 ms one that is undoable."""
    forward, backward, copy = 1e-3, 3e-3, 1e-3
    step, early = 12e6 * STEP / 336e9, 12e6 * (STEP + UNDO) / 336e9
    assert (step, early) == pytest.approx((1e-3, 2e-3))

    def seconds(on_device: int, scheme: Scheme = Scheme.OVERLAPPED) -> float:
        return simulate(TWO, FAST, Plan(on_device, scheme=scheme)).seconds

    computes = 2 * (forward + backward)
    assert seconds(0, Scheme.SERIAL) == pytest.approx(computes + 2 * (copy + step + copy))
    # The last gradient leaves, both step, and the second one returns.
    assert seconds(0, Scheme.PUBLISHED) == pytest.approx(computes + copy + 2 * step + copy)
    # The first one is over by then.
    assert seconds(0) == pytest.approx(computes + copy + step + copy)
    on_device = 12e6 * STEP / 1e12
    assert seconds(2) == pytest.approx(computes + 2 * on_device)
    # The step on the host is over, and its layer returns while the other one steps.
    assert seconds(1) == pytest.approx(computes + copy)


def test_peaks_by_hand() -> None:
    layer, kept, working = 12e6, 1000 * 1000 * 2, 34 * 1000 * 1000
    params = 2 * 2 * layer
    for on_device, releases in product((0, 1, 2), (False, True)):
        peaks = simulate(TWO, FAST, Plan(on_device, releases=releases)).peaks
        states = 12 * on_device * layer
        assert peaks == {
            "forward": 2 * kept + working + params + states,
            # The second layer's gradient leaves while the first one comes.
            "backward": kept + working + params + states + 2 * 2 * layer,
            "step": params + states + 2 * layer * (on_device if releases else 2),
        }
    tight = Machine(simulate(TWO, FAST, Plan(1)).peak)
    assert simulate(TWO, tight, Plan(1)).peak == tight.capacity
    with pytest.raises(MemoryError):
        simulate(TWO, tight, Plan(2))
    # One layer's parameters at a time: the last one comes in the forward and the first one in the
    # backward, which stays for the next forward, stepped.
    small = Machine(2 * kept + working + 2 * 2 * layer + 2 * layer)
    streamed = simulate(TWO, small, Plan(0, streams=True))
    assert len(streamed.busy["to the device"]) == 2 + 1


def test_gradients_that_are_released_are_charged_where_they_stay() -> None:
    """Four layers: two step on the device, and two gradients are on their way."""
    four = replace(TWO, layers=4)
    kept, working, layer = 2e6, 34e6, 12e6
    peaks = simulate(four, FAST, Plan(2)).peaks
    least = working + 4 * 2 * layer + 2 * 12 * layer
    assert peaks["forward"] == least + 4 * kept
    assert peaks["backward"] == least + kept + (2 + 2) * 2 * layer
    assert peaks["step"] == least - working + 2 * 2 * layer
    assert simulate(four, FAST, Plan(2, releases=False)).peaks["step"] == peaks["step"] + 4 * layer


# --- The rule that ships --------------------------------------------------------------------------


class _OldPlacement(Placement):
    """Charges all gradients in every phase, also where activations come without them."""

    def decide(self, phases: Any, *rest: Any) -> Any:
        charged = {n: seen._replace(peak=seen.peak + seen.may_come) for n, seen in phases.items()}
        return super().decide(charged, *rest)


class _Host(Placement):
    def decide(self, phases: Any, sizes: Any, *rest: Any) -> Any:
        return [False] * len(sizes)


class _Half(Placement):
    def decide(self, phases: Any, sizes: Any, capacity: int, *rest: Any) -> Any:
        return super().decide(phases, sizes, capacity // 2, *rest)


class _Greedy(Placement):
    """Keeps no margin."""

    def decide(self, phases: Any, sizes: Any, capacity: int, *rest: Any) -> Any:
        return super().decide(phases, sizes, int(capacity / MARGIN), *rest)


def _placements(work: Workload, machine: Machine, releases: bool) -> dict[int, float]:
    """The seconds of all placements of states that keep the margin, by layers on the device."""
    found = {}
    for on_device in range(work.layers + 1):
        try:
            outcome = simulate(work, machine, Plan(on_device, releases=releases))
        except MemoryError:
            continue
        if on_device == 0 or outcome.peak <= MARGIN * machine.capacity:
            found[on_device] = outcome.seconds
    return found


def _is_the_fastest(
    work: Workload, machine: Machine, releases: bool, rule: type[Placement] = Placement
) -> bool:
    """Whether the rule keeps the margin, is at most 3% slower than any placement that keeps it, and
    has as many layers on the device.

    With released gradients it may be one fewer: the forward has none of the gradients that a bucket
    on the device is charged with.
    """
    plan, outcome = settle_plan(work, machine, releases, rule)
    placements = _placements(work, machine, releases)
    return (
        outcome.peak <= MARGIN * machine.capacity
        and outcome.seconds <= 1.03 * min(placements.values())
        and plan.states_on_device >= max(placements) - releases
    )


SETTLING = [
    (work, Machine(gb * 1e9))
    for work, sizes in ((GPT_1B, (8, 10, 12, 16, 24, 80)), (GPT_13B, (64, 80, 141, 192, 288)))
    for gb in sizes
]


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(("work", "machine"), SETTLING)
def test_auto_is_the_fastest(work: Workload, machine: Machine, releases: bool) -> None:
    """`Placement`, which the optimizer asks, decides here step after step."""
    assert _is_the_fastest(work, machine, releases)


@pytest.mark.parametrize("rule", [_OldPlacement, _Host, _Half, _Greedy])
def test_a_worse_rule_is_not_the_fastest(rule: type[Placement]) -> None:
    assert not all(_is_the_fastest(*case, False, rule) for case in SETTLING)


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize(("work", "machine"), CASES)
def test_auto_beside_static_placements(work: Workload, machine: Machine, releases: bool) -> None:
    """The docs' table: no static placement of the optimizer is faster, by any scheme."""
    rows = compare(work, machine)
    auto = rows[AUTO[releases]]
    host = rows[f"states on the host, {Scheme.OVERLAPPED.value}"]
    if host is None:  # the device has no room even for the parameters
        assert auto is None
        return
    assert auto is not None
    assert auto <= min(s for name, s in rows.items() if s is not None and name not in AUTO.values())
    if rows["all on the device"] is None:  # the device has room for a part of the states
        published = rows[f"states on the host, {Scheme.PUBLISHED.value}"]
        assert published is not None
        assert published / auto >= 1.3


def test_the_share_that_stays() -> None:
    """13B on 80 GB, as the docs say."""
    found = [settle_plan(GPT_13B, Machine(80e9), releases) for releases in (False, True)]
    assert [plan.states_on_device for plan, _ in found] == [5, 9]
    assert [round(outcome.seconds, 2) for _, outcome in found] == [6.64, 6.28]


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("work", [GPT_1B, GPT_13B])
def test_auto_fits_wherever_the_host_does(work: Workload, releases: bool) -> None:
    """Down to the smallest device that holds the parameters and gradients."""
    for gb in (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 141):
        machine = Machine(gb * 1e9)
        try:
            alone = simulate(work, machine, Plan(0, releases=releases)).peak
        except MemoryError:
            with pytest.raises(MemoryError):
                settle_plan(work, machine, releases)
            continue
        plan, outcome = settle_plan(work, machine, releases)
        assert outcome.peak <= max(alone, MARGIN * machine.capacity)
        assert plan.states_on_device == 0 or outcome.peak <= MARGIN * machine.capacity


@pytest.mark.parametrize("releases", [False, True])
def test_more_memory_is_never_slower(releases: bool) -> None:
    # With all states on the device nothing steps on the host beside it, which takes 0.7% longer.
    sizes = (64, 80, 100, 141, 160, 192)
    times = [settle_plan(GPT_13B, Machine(gb * 1e9), releases)[1].seconds for gb in sizes]
    assert times == sorted(times, reverse=True)


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
