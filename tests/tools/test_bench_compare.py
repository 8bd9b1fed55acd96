"""`torchweld bench compare`: which losses count, and which are noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweld.bench.report import Report
from torchweld.bench.runner import Result
from torchweld.commands import cli


def _saved(path: Path, speeds: dict[str, float], *, spread: float = 0.0) -> str:
    """A run in which each contender has this speed-up over eager's 2 ms."""
    results = [
        Result(
            op="layer_norm",
            shape=[8, 16],
            dtype="float32",
            direction="fwd",
            contender=contender,
            elements=128,
            bytes=1024,
            ms=2 / speed,
            p20=(1 - spread) * 2 / speed,
            p80=(1 + spread) * 2 / speed,
            eager_ms=2.0,
            speed_up=speed,
        )
        for contender, speed in {"eager": 1.0, **speeds}.items()
    ]
    Report({"name": "a CPU"}, results).save(path)
    return str(path)


def _compare(tmp_path: Path, after: dict[str, float], *flags: str, spread: float = 0.0) -> int:
    before = _saved(tmp_path / "before.json", {"cpu": 2.0, "triton": 1.0})
    later = _saved(tmp_path / "after.json", after, spread=spread)
    return cli.main(["bench", "compare", before, later, *flags])


def test_a_loss_is_shown_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(tmp_path, {"cpu": 1.5, "triton": 1.5}) == 1
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["2.00x", "1.50x", "-25%", "slower"] in [line[-4:] for line in lines]
    assert ["1.00x", "1.50x", "+50%", "faster"] in [line[-4:] for line in lines]
    assert "2 cases in both, 0 only before, 0 only after; 1 became slower" in printed


@pytest.mark.parametrize(
    ("speed", "spread", "flags", "status"),
    [
        (1.92, 0.0, (), 0),  # within the tolerance
        (1.92, 0.0, ("--tolerance", "0.01"), 1),
        (1.5, 0.3, (), 0),  # the times scatter by more
        (1.5, 0.2, (), 1),
    ],
)
def test_what_counts(
    tmp_path: Path, speed: float, spread: float, flags: tuple[str, ...], status: int
) -> None:
    assert _compare(tmp_path, {"cpu": speed, "triton": 1.0}, *flags, spread=spread) == status


def test_cases_of_one_run_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(tmp_path, {"cpu": 2.0, "cuda": 9.0}, "--all") == 0
    assert "1 cases in both, 1 only before, 1 only after" in capsys.readouterr().out
    assert _compare(tmp_path, {"cuda": 9.0}) == 2
    assert "no case in common" in capsys.readouterr().err


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text('{"machine": 1}')
    for name in ("odd.json", "missing.json"):
        path = str(tmp_path / name)
        assert cli.main(["bench", "compare", path, path]) == 2
        assert "not a file that --json wrote" in capsys.readouterr().err
