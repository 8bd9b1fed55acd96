"""A small `torchweld demo`: losses do not depend on fusion, and the JSON is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchweld.bench.models import demo
from torchweld.commands import cli

SIZES = {"LAYERS": 1, "HEADS": 2, "LENGTH": 32, "BATCH": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "WIDTH", {"cpu": 16, "cuda": 64})
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    monkeypatch.setattr(demo, "WORDS", 700)
    monkeypatch.setattr(demo.torchweld, "keep_pages", lambda: demo.torchweld.pages.KeptPages("-"))


def test_everything_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    arguments = ["demo", "--device", "cpu", "--seconds", "1e-6"]
    assert cli.main([*arguments, "--json", str(results), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "model = torchweld.fuse(model)" in printed
    saved = json.loads(results.read_text())
    assert len(saved["settings"]) == 3
    for setting, rows in saved["settings"].items():
        assert setting in printed
        assert [row["contender"] for row in rows] == ["eager", "fused", "fused, 8-bit AdamW"]
        for row in rows:
            assert row["total"] == pytest.approx(row["forward"] + row["backward"] + row["step"])
            assert row["speed_up"] == pytest.approx(rows[0]["total"] / row["total"])
        # float32 and 8-bit states, two of each parameter; small tensors stay in float32.
        assert rows[0]["optimizer_bytes"] == pytest.approx(rows[1]["optimizer_bytes"], rel=0.01)
        assert rows[2]["optimizer_bytes"] < rows[1]["optimizer_bytes"]
    lengths = {len(losses) for losses in saved["losses"].values()}
    assert len(lengths) == 1
    assert [row["contender"] for row in saved["words"]] == ["eager", "linear_cross_entropy"]
    assert "head and loss of 700 words" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_contenders_learn_the_same_without_dropout() -> None:
    """The losses of eager and fused are the same curve, to float32's rounding."""
    learners = demo.Setting("cpu", 0.0, batch=SIZES["BATCH"]).learners(["eager", "fused"], seed=3)
    for learner in learners:
        for _ in range(10):
            learner.learn()
    eager, fused = (torch.tensor(learner.losses) for learner in learners)
    assert eager[-1] < 0.95 * eager[0]
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=0)


def test_what_it_cannot_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert "torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "ten"])
def test_the_time_is_checked(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--seconds", seconds])
    assert ended.value.code == 2
    assert "--seconds" in capsys.readouterr().err


def test_a_picture_has_a_pictures_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--plot", "loss.txt"]) == 2
    assert "--plot: loss.txt" in capsys.readouterr().err


def test_an_interruption_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_measured", interrupt)
    assert cli.main(["demo", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "torchweld demo: interrupted\n"
