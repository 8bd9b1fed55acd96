"""`torchweld tune`: the questions of first uses, asked beforehand, and the file to ship."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweld.bench.cases import CASES, DTYPES, SMALLEST, Case, cases
from torchweld.commands import cli, tune
from torchweld.dispatch import choice
from torchweld.dispatch.proof import Checker
from torchweld.dispatch.store import Store
from torchweld.registry import OPS, materialize
from trying import CONDITIONS, Trials


@pytest.mark.parametrize("name", ["layer_norm", "softmax_dropout"])
def test_calls_of_declared_shapes_find_their_answers(name: str, trials: Trials) -> None:
    tune.ask(name, "cpu")
    tried = len(trials.answers())
    assert tried
    for case in cases([OPS[name]], "cpu", DTYPES["cuda"], tune.SIZES):
        for train in (False, True):
            inputs = materialize(case.arguments, case.dtype, "cpu", requires_grad=train)
            with torch.set_grad_enabled(train):
                assert choice.choose(OPS[name], inputs) == "cpu"
    assert len(trials.answers()) == tried


def test_kernels_that_are_not_timed_are_called_forward_and_backward(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's Triton kernels ask about their tiles then."""
    op, ran = OPS["block_sparse_attention"], Counter[str]()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran[str(func)] += 1
            return func(*args, **(kwargs or {}))

    sample = CASES[op.name].samples[5]
    few = [Case(op, sample, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(tune, "op_cases", lambda *_: few)
    with Count():  # which no trial sees
        tune.ask("block_sparse_attention", "cpu")
    assert ran["torchweld.block_sparse_attention.cpu"] == 4
    assert ran["torchweld.block_sparse_attention_backward.cpu"] == 2


def test_every_codec_of_a_rule_is_checked(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the user's need no trial then."""
    monkeypatch.setattr(tune, "STEPS", (2, 64, 64))
    tune.ask("adam", "cpu")
    steps = [e.kind["step"] for e in trials.checker.entries() if e.kind["op"] == "adam"]
    assert len(steps) == 4  # float32, clipped, bfloat16 states, 8-bit states
    assert any("uint8" in step for step in steps)
    assert any("bfloat16" in step for step in steps)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("a_gpu")
def test_a_process_that_dies_is_told_and_the_others_run(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command[-1])
        if command[-1] == "rms_norm":
            raise subprocess.TimeoutExpired(command, tune.SECONDS)
        return SimpleNamespace(returncode=-6 if command[-1] == "layer_norm" else 0)

    monkeypatch.setattr(tune.subprocess, "run", run)
    assert cli.main(["tune", "layer_norm", "rms_norm", "bias_act"]) == 1
    assert ran == ["layer_norm", "rms_norm", "bias_act"]
    told = capsys.readouterr()
    assert "layer_norm: its process ended with status -6" in told.err
    assert "rms_norm: it took longer than 300 s" in told.err
    assert cli.main(["tune", "bias_act"]) == 0


@pytest.mark.usefixtures("a_gpu")
def test_a_file_to_ship_answers_elsewhere(
    trials: Trials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        tune.subprocess,
        "run",
        lambda command, **_: (tune.ask(command[-1], "cpu"), SimpleNamespace(returncode=0))[1],
    )
    monkeypatch.setattr(tune, "SIZES", (SMALLEST,))
    shipped = tmp_path / "shipped.json"
    assert cli.main(["tune", "layer_norm", "--write", str(shipped)]) == 0
    printed = capsys.readouterr().out
    assert "layer_norm, fwd, float32" in printed
    assert f"written: {shipped}" in printed
    fresh = Checker(Store(tmp_path / "fresh.json", [shipped]), CONDITIONS)
    assert len(fresh.entries()) == len(trials.answers()) > 0
    assert {entry.answer.backend for entry in fresh.entries()} == {"cpu"}


@pytest.mark.usefixtures("a_gpu")
def test_a_file_that_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune.subprocess, "run", lambda *_, **__: pytest.fail("it began"))
    assert cli.main(["tune", "--write", str(tmp_path)]) == 2
    assert "--write" in capsys.readouterr().err


def test_tuning_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    assert cli.main(["tune"]) == 2
    assert "torchweld tune: torch sees no GPU here" in capsys.readouterr().err
