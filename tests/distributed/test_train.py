"""examples/train.py: every strategy learns the same, also when resuming another's run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import train
from comparing import shares_rows
from processes import processes

SMALL = ["--width", "32", "--length", "32", "--layers", "2", "--steps", "2", "--max-norm", "0.3"]


def _train(rank: int, arguments: list[str], path: Path) -> None:
    record = train.train(train.options([*SMALL, *arguments]), torch.device("cpu"))
    if rank == 0:
        torch.save(record, path)


def _run(count: int, folder: Path, *arguments: str) -> dict:
    with processes(count) as some:
        some.run(None, _train, list(arguments), folder / "record.pt")
    return torch.load(folder / "record.pt")


@cache
def _alone(folder: Path, *arguments: str) -> dict:
    return _run(1, folder, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


# The example's own options; test_stack.py tries all strategies.
CASES = [
    (2, ["--strategy", "zero1", "--optimizer", "lamb"]),
    (2, ["--strategy", "zero3", "--recompute", "selective", "--sparse"]),
    (2, ["--strategy", "tp+sp", "--optimizer", "lamb", "--sparse"]),
    (2, ["--strategy", "pp", "--optimizer", "adamw8bit"]),
    (4, ["--strategy", "fsdp+tp", "--optimizer", "lamb", "--sparse"]),
]


@pytest.mark.parametrize(("count", "arguments"), CASES, ids=str)
def test_strategies_learn_the_same(folder: Path, count: int, arguments: list[str]) -> None:
    kept = [a for a in ("--sparse",) if a in arguments]
    if "--optimizer" in arguments:
        kept += ["--optimizer", arguments[arguments.index("--optimizer") + 1]]
    found, wanted = _run(count, folder, *arguments), _alone(folder, *kept)
    # Losses are rounded to 2**-24 of their size; two steps leave them within a few of those.
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


def test_goes_on_from_another_strategy(folder: Path) -> None:
    """Two parts with different strategies and numbers of processes make one run."""
    wanted = _alone(folder, "--steps", "3")["losses"]
    for first, then in (
        ((2, "zero1"), (2, "pp")),
        ((2, "pp"), (4, "fsdp+tp")),
        ((4, "zero3"), (1, "ddp")),
    ):
        saved = str(folder / f"{first[1]}-{then[1]}")
        begun = _run(first[0], folder, "--strategy", first[1], "--steps", "2", "--save", saved)
        ended = _run(then[0], folder, "--strategy", then[1], "--steps", "1", "--resume", saved)
        assert begun["losses"] == pytest.approx(wanted[:2], rel=1e-6)
        assert ended["losses"] == pytest.approx(wanted[2:], rel=1e-6)


def test_one_bit(folder: Path) -> None:
    """Its warm-up averages in float32, and so its first two losses are Adam's of one process."""
    found = _run(2, folder, "--optimizer", "one_bit_adam", "--steps", "8")
    wanted = _alone(folder, "--optimizer", "one_bit_adam", "--steps", "8")
    assert found["losses"][:2] == pytest.approx(wanted["losses"][:2], rel=1e-6)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-2)


# test_parallelize.py and test_grid.py have pipelines of sharded stages, and grids.
DECLARED = [
    "ring = 2\ntensor = {size = 2, sequence = true}",
    'ring = 2\ndata = "zero3"',
]


@shares_rows
@pytest.mark.parametrize("declared", DECLARED)
def test_a_declaration_in_a_file(folder: Path, declared: str) -> None:
    config = folder / "parallel.toml"
    config.write_text(f"[parallel]\n{declared}\n")
    found = _run(4, folder, "--config", str(config))
    assert found["losses"] == pytest.approx(_alone(folder)["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(_alone(folder)["norms"], rel=1e-5)


REFUSED = {
    "--width": ["--width", "30"],
    "--resume": ["--resume", "nowhere"],
    "--json": ["--json", "a-file/record.json"],
    "--save": ["--save", "a-file/folder"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_trained_is_refused_before(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("[serial]")
    with pytest.raises(SystemExit) as ended:
        train.check(train.options(REFUSED[option]))
    assert str(ended.value).startswith(option)


@pytest.mark.parametrize("option", ["--rows", "--steps", "--width", "--microbatches", "--lr"])
def test_numbers_are_checked(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.options([option, "0"])
    assert option in capsys.readouterr().err


def test_a_checkpoint_of_another_optimizer_is_refused(folder: Path) -> None:
    saved = str(folder / "of-adamw")
    _run(1, folder, "--save", saved)
    with pytest.raises(
        Exception, match=r"--resume: .* is not of a model .* --optimizer one_bit_adam"
    ):
        _run(1, folder, "--resume", saved, "--optimizer", "one_bit_adam")
