"""The bubble of a pipeline: on made-up times, and on stages that sleep, against the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from processes import on
from seams import splits_backwards
from sleeper import Sleeper
from torchweld.distributed.pipelines import stages
from torchweld.distributed.pipelines.timeline import Action, Timeline, estimate_bubble, record

UNIT, MICROBATCHES, STEPS = 0.02, 4, 12


def _made() -> Timeline:
    """Two ranks, one microbatch; the second forward is half a second late, the backward not."""
    times = [
        Action(0, 0, 0, "forward", 10.0, 11.0),
        Action(1, 1, 0, "forward", 11.5, 12.5),
        Action(1, 1, 0, "full", 12.5, 14.5),
        Action(0, 0, 0, "full", 14.5, 16.5),
    ]
    return Timeline(times)


def test_what_is_spent() -> None:
    """Idle time is unavoidable; the rest of the waiting is overhead."""
    timeline = _made()
    spent = timeline.sum_times()
    assert spent[0] == (3.0, 3.5, 0.0)
    assert spent[1] == (3.0, 3.0, 0.5)
    assert timeline.bubble() == pytest.approx(6.5 / 13)
    assert timeline.overhead() == pytest.approx(0.5 / 13)


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    _made().draw(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    _made().show()
    out = capsys.readouterr().out
    assert "idle 50.0%, by (p-1)/(m+p-1) 50.0%" in out


@pytest.mark.parametrize(
    ("schedule", "units", "low", "high"),
    [
        ("gpipe", 30, 0.8, 1.2),
        ("1f1b", 30, 0.8, 1.2),
        pytest.param("zbvzerobubble", 27, 0.0, 0.6, marks=splits_backwards),  # it has less
    ],
)
@on(2)
def test_the_bubble_is_the_formulas(
    rank: int, schedule: stages.Name, units: int, low: float, high: float
) -> None:
    """Stages sleep for a known time, so that the schedule is measured and not the machine."""
    expected, ideal = estimate_bubble(2, MICROBATCHES), units * UNIT
    batch = torch.ones(2 * MICROBATCHES, 4)
    pipe = stages.pipeline(
        [Sleeper(UNIT) for _ in range(4)],
        schedule,
        MICROBATCHES,
        lambda y, _: y.square().sum(),
        (batch[:2],),
        costs=[1.0] * 4,
    )
    found: list[Timeline] = []
    # Repeat until other processes hardly disturb a step; the first one makes buffers.
    while len(found) < 2 or (len(found) < STEPS and min(map(_length, found)) > 1.05 * ideal):
        with record(pipe.schedule) as timeline:
            args = (batch,) if pipe.is_first else ()
            pipe.schedule.step(*args, target=batch if pipe.is_last else None)
        found.append(timeline)
    count = len(pipe.cuts) * MICROBATCHES
    for timeline in found:
        begin, end = timeline.span
        for spent in timeline.sum_times().values():
            assert sum(spent) == pytest.approx(end - begin)
        assert sum(action.kind == "forward" for action in timeline.actions) == count
    assert low * expected <= min(found, key=_length).bubble() <= high * expected


def _length(timeline: Timeline) -> float:
    begin, end = timeline.span
    return end - begin
