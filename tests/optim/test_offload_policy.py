"""The policy's decisions on traces: recorded, simulated and random ones."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from torchweld.optim.offload import simulation
from torchweld.optim.offload.policy import (
    MARGIN,
    ChunkState,
    Residency,
    Tracer,
    packed,
    resident,
    search_chunk_size,
)
from torchweld.optim.offload.simulation import (
    CASES,
    GPT_1B,
    GPT_13B,
    STEP,
    UNDO,
    Machine,
    Plan,
    Scheme,
    Workload,
    automatic,
    compare,
    simulate,
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(5, 60))
def test_chunk_sizes(sizes: list[int], most: int) -> None:
    """No size that the search could take wastes less."""
    found = search_chunk_size(sizes, 5, most, 3)
    assert found.waste == min(packed(sizes, size).waste for size in range(5, most + 1, 3))
    whole = [max(size, found.size) for size in sizes if size > found.size]
    assert found.waste == found.size * (found.chunks - len(whole)) + sum(whole) - sum(sizes)


def test_chunk_sizes_by_hand() -> None:
    assert packed([3, 3, 3, 10, 2], 6) == (6, 4, 3 + 4)
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
            assert residency.held() <= rooms[moment]
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
    chosen = resident(sizes, room)
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
    others = 2 * kept + working
    peaks = [simulate(TWO, FAST, Plan(on_device)).peak for on_device in (0, 1, 2)]
    assert peaks == [others + 2 * 2 * layer + 2 * 2 * layer + 12 * n * layer for n in range(3)]
    tight = Machine(peaks[1])
    assert simulate(TWO, tight, Plan(1)).peak == peaks[1]
    with pytest.raises(MemoryError):
        simulate(TWO, tight, Plan(2))
    with pytest.raises(MemoryError):
        simulate(TWO, tight, Plan(1, margin=MARGIN))
    # One layer's parameters at a time: the last one comes in the forward and the first one in the
    # backward, which stays for the next forward, stepped.
    small = Machine(others + 2 * 2 * layer + 2 * layer)
    streamed = simulate(TWO, small, Plan(0, streams=True))
    assert len(streamed.busy["to the device"]) == 2 + 1


@pytest.mark.parametrize(("work", "machine"), CASES)
def test_auto_is_the_fastest(work: Workload, machine: Machine) -> None:
    """At most 3% slower than any static placement, by any scheme."""
    rows = compare(work, machine)
    auto = rows.pop("auto")
    assert auto is not None
    placed = [seconds for seconds in rows.values() if seconds is not None]
    assert placed
    assert auto <= 1.03 * min(placed)
    published = [s for name, s in rows.items() if s and Scheme.PUBLISHED.value in name]
    on_device = rows["all on the device"]
    if on_device is None:  # the device has room for a part of the states
        assert min(published) / auto >= 1.3
    plan, outcome = automatic(work, machine)
    assert outcome.peak <= MARGIN * machine.capacity
    assert on_device is not None or 0 < plan.states_on_device < work.layers


@pytest.mark.parametrize("work", [GPT_1B, GPT_13B])
def test_auto_fits_wherever_the_host_does(work: Workload) -> None:
    """Down to the smallest device that holds a layer, with the margin that auto keeps."""
    least = Plan(0, streams=True)
    for gb in (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 141):
        machine = Machine(gb * 1e9)
        try:
            simulate(work, Machine(MARGIN * gb * 1e9), least)
        except MemoryError:
            with pytest.raises(MemoryError):
                automatic(work, machine)
            continue
        assert automatic(work, machine)[1].peak <= MARGIN * machine.capacity


def test_more_memory_is_never_slower() -> None:
    times = [automatic(GPT_13B, Machine(gb * 1e9))[1].seconds for gb in (16, 24, 40, 80, 141, 288)]
    assert times == sorted(times, reverse=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(["--plot", str(tmp_path / "steps.png")])
    printed = capsys.readouterr().out
    assert printed.count("auto has the states of") == len(CASES)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
