"""The command line as users run it: in a separate process."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

import fresh
import torchweld
from torchweld.commands import cli, doctor, sdpa
from torchweld.dispatch import choice, native, proof
from torchweld.dispatch.proof import Checker
from torchweld.dispatch.store import Answer, Entry, Store
from torchweld.registry import EAGER, OPS

# As `python -m torchweld`.
MODULE = "import runpy; runpy.run_module('torchweld', run_name='__main__', alter_sys=True)"


def _run(*arguments: str, **environment: str) -> str:
    finished = fresh.run(MODULE, *arguments, **environment)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout


def _row(printed: str, name: str) -> list[str]:
    """The cells of the op's line in the doctor's table."""
    return next(line.split() for line in printed.splitlines() if line.strip().startswith(name))


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "doctor" in printed
    assert "bench" in printed


@pytest.mark.parametrize(
    ("command", "word"), [("demo", "GPT"), ("tune", "GPU"), ("bench", "torch.compile")]
)
def test_help_keeps_capitals(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert word in capsys.readouterr().out.split("options:")[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "layer_nrom"], "did you mean 'layer_norm'?; see torchweld bench --help"),
        (["bench", "--dtype", "bfloat61"], "did you mean 'bfloat16'?; see torchweld bench --help"),
        (["bench", "--quick", "nosuch"], "torchweld bench: argument op: 'nosuch' is not one of"),
        (["dcotor"], "did you mean 'doctor'?; see torchweld --help"),
    ],
)
def test_a_wrong_name_is_said_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve lines of usage came before it, and no suggestion."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_doctor() -> None:
    printed = _run("doctor")
    for words in (
        torchweld.__version__,
        torch.__version__,
        "glibc",
        "instruction set",
        "GPU",
        "ptxas",
    ):
        assert words in printed
    for op in OPS:
        served = "yes" if "torchweld_cpu" not in native.missing else "no"
        assert _row(printed, op)[1:3] == ["yes", served]
    assert "the automatic choice" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_reader_may_leave() -> None:
    """`torchweld doctor | head` ends quietly, and with the status that shells give."""
    left = "import os; read, write = os.pipe(); os.dup2(write, 1); os.close(write); os.close(read)"
    ended = fresh.run(f"{left}; {MODULE}", "doctor")
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_link_joins_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without torchrun there is one; the command says how to start more."""
    assert cli.main(["link", "--parameters", "350e6", "--step-ms", "400"]) == 2
    assert "torchrun --nproc-per-node 2 -m torchweld link" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--parameters=nan", "--step-ms=0", "--batch=-1"])
def test_numbers_of_a_link_are_above_0(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the ranks are joined."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["link", "--parameters", "350e6", "--step-ms", "400", wrong])
    assert ended.value.code == 2
    assert (
        f"argument {wrong.split('=')[0]}: {wrong.split('=')[1]} is not" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_standard_output_may_be_closed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `>&-`, or in a process without a console."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main([command]) == 0


def test_doctor_lists_what_was_found_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On this GPU, with what decided and the day; of another GPU, or other kernels, nothing."""
    kept = Store(tmp_path / "answers.json")
    for device, op in (("this GPU", "layer_norm"), ("another", "rms_norm")):
        answer = Answer("cuda", {}, {"cuda": 1.0, EAGER: 2.0}, "2026-01-02")
        kept.add(Entry({"device": device}, {"op": op, "direction": "fwd"}, 12, answer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = Checker(Store(tmp_path / "answers.json"), {"device": "this GPU"})
    monkeypatch.setattr(proof, "checker_for", lambda device: engine)
    expected = "layer_norm, fwd, sizes below 2^12, timed 2026-01-02"
    assert doctor._answers_here() == [("cuda", expected)]
    assert doctor._why_not_found(OPS["layer_norm"], "cuda") is None
    assert "cuda comes first" in str(doctor._why_not_found(OPS["layer_norm"], "triton"))
    assert doctor._why_not_found(OPS["rms_norm"], "cuda") == choice.UNTRIED


def test_doctor_prints_a_report_for_an_issue() -> None:
    printed = _run("doctor", "--report").strip()
    assert printed.startswith("<details><summary>torchweld doctor</summary>\n\n```\nVersions")
    assert printed.endswith("```\n\n</details>")


def test_doctor_says_which_attention_torch_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own function says of the same calls, and why that may be slow."""
    facts = dict(sdpa.list_choices())
    q = torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16, requires_grad=True)
    fused = torch._fused_sdp_choice(q, q, q, None, 0.0, True) == 1
    if not torch.cuda.is_available():
        assert facts["causal"].startswith("flash" if fused else "math")
        assert (
            facts["learnt bias"]
            == "math: it keeps all scores, of queries x keys, forward and backward"
        )
        assert facts["wider keys"].startswith("math")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args: 2)
    assert dict(sdpa.list_choices())["causal"].startswith("efficient: Flash and cuDNN are faster")


def test_doctor_without_libraries(tmp_path: Path) -> None:
    printed = _run("doctor", TORCHWELD_LIB=str(tmp_path))
    assert "not loaded" in printed
    assert "does not exist" in printed
    assert "install g++" in printed
    assert _row(printed, "layer_norm")[1:4] == ["yes", "no", "(1)"]


def test_doctor_on_what_is_forced() -> None:
    isa = native.BASELINE
    printed = _run("doctor", TORCHWELD_CPU_ISA=isa, TORCHWELD_BACKEND="eager")
    assert f"instruction set {isa} (TORCHWELD_CPU_ISA={isa})" in printed
    assert "eager for every op, by TORCHWELD_BACKEND" in printed


def test_doctor_on_what_cannot_be_forced() -> None:
    printed = _run("doctor", TORCHWELD_CPU_ISA="mmx", TORCHWELD_BACKEND="fastest")
    assert "TORCHWELD_CPU_ISA is 'mmx'; accepted on this machine" in printed
    assert "is 'fastest'; accepted: eager or cpu" in printed
    assert _row(printed, "rms_norm")[2] == "no"
