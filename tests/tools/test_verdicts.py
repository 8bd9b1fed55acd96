"""Proof at first use: its decisions, records and messages, whatever goes wrong."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweld.dispatch import cache, verdicts
from torchweld.dispatch.verdicts import Verdict, Verdicts
from torchweld.registry import EAGER

BACKENDS = ("cuda", "triton")
MIXED = ("cuda/triton", "triton/cuda")


class FakeTrial:
    """Scripted kernels and a scripted device."""

    def __init__(
        self,
        key: str = "layer_norm",
        wrong: Sequence[str] = (),
        ms: Mapping[str, float] | None = None,
        evidence: str | None = None,
        capturing: bool = False,
        error: Exception | None = None,
        both: Sequence[str] = (),
    ) -> None:
        self.key, self.backends, self.both = key, BACKENDS, both
        self.wrong, self.ms, self.evidence = wrong, ms or {}, evidence
        self.capturing, self.error = capturing, error
        self.tried = 0

    def static(self) -> str:
        return self.evidence or EAGER

    def may_run(self) -> bool:
        return not self.capturing

    def fault(self, backend: str) -> str | None:
        self.tried += 1
        if self.error is not None:
            raise self.error
        return "wrong result: y is off by 1" if backend in self.wrong else None

    def preferred(self, backends: Sequence[str]) -> str | None:
        return self.evidence if self.evidence in (*backends, EAGER) else None

    def mixed(self, backends: Sequence[str]) -> Sequence[str]:
        return [name for name in self.both if set(name.split("/")) <= set(backends)]

    def times(self, backends: Sequence[str]) -> Mapping[str, float]:
        return {name: self.ms[name] for name in (*backends, EAGER)}


@pytest.fixture
def of_process(tmp_path: Path) -> Verdicts:
    return Verdicts(tmp_path / "verdicts.json", "a GPU")


def test_a_wrong_kernel_is_refused_with_one_warning(of_process: Verdicts) -> None:
    trial = FakeTrial(wrong=["cuda"], ms={"cuda": 0.1, "triton": 1.0, EAGER: 2.0})
    with pytest.warns(RuntimeWarning) as told:
        chosen = [of_process.decide(trial, "time") for _ in range(3)]
    assert chosen == ["triton"] * 3
    (warning,) = told
    message = str(warning.message)
    assert all(word in message for word in ("cuda", "layer_norm", "wrong result: y is off by 1"))


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"cuda": 3.0, "triton": 2.5, EAGER: 2.0}, EAGER),
        ({"cuda": 3.0, "triton": 1.0, EAGER: 2.0}, "triton"),
        ({"cuda": 0.9, "triton": 1.0, EAGER: 2.0}, "cuda"),
    ],
)
def test_a_slow_kernel_is_not_chosen(
    ms: dict[str, float], chosen: str, of_process: Verdicts
) -> None:
    assert of_process.decide(FakeTrial(ms=ms), "time") == chosen


@pytest.mark.parametrize(
    ("wrong", "chosen"),
    [([], "cuda/triton"), (["cuda/triton"], "triton/cuda"), (["cuda"], "triton")],
)
def test_a_direction_is_chosen_for_itself(
    wrong: list[str], chosen: str, of_process: Verdicts, tmp_path: Path
) -> None:
    """By check and time among kernels right in both directions; the next process reuses it."""
    ms = {"cuda": 2.0, "triton": 1.5, "cuda/triton": 1.0, "triton/cuda": 1.2, EAGER: 3.0}

    def trial() -> FakeTrial:
        return FakeTrial(wrong=wrong, ms=ms, both=MIXED)

    with pytest.warns(RuntimeWarning) if wrong else contextlib.nullcontext():
        assert of_process.decide(trial(), "time") == chosen
    again = trial()
    assert Verdicts(tmp_path / "verdicts.json", "a GPU").decide(again, "time") == chosen
    assert again.tried == 0


def test_checks_and_evidence_take_whole_backends(of_process: Verdicts) -> None:
    """They say nothing about the time of a mixture of backends."""
    check, evidence = FakeTrial(both=MIXED), FakeTrial("other", evidence="triton", both=MIXED)
    assert of_process.decide(check, "check") == "cuda"
    assert of_process.decide(evidence, "time") == "triton"
    assert check.tried == evidence.tried == len(BACKENDS)


@pytest.mark.parametrize(
    ("how", "tried", "chosen"),
    [("off", 0, EAGER), ("kept", 0, EAGER), ("check", 2, "cuda"), ("time", 2, "triton")],
)
def test_modes(how: str, tried: int, chosen: str, of_process: Verdicts) -> None:
    trial = FakeTrial(ms={"cuda": 3.0, "triton": 1.0, EAGER: 2.0})
    assert of_process.decide(trial, how) == chosen
    assert trial.tried == tried


def test_evidence_saves_the_timing_only(of_process: Verdicts) -> None:
    trial = FakeTrial(wrong=["cuda"], evidence="cuda", ms={"triton": 1.0, EAGER: 2.0})
    with pytest.warns(RuntimeWarning, match="wrong result"):
        assert of_process.decide(trial, "time") == "triton"
    other = FakeTrial("other", evidence="triton")
    assert of_process.decide(other, "time") == "triton"
    assert other.tried == 2


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts.mode_from({}) == "time"
    assert [verdicts.mode_from({verdicts.VARIABLE: m}) for m in verdicts.MODES] == [*verdicts.MODES]
    with pytest.warns(UserWarning, match="accepted: off, kept, check, time"):
        assert verdicts.mode_from({verdicts.VARIABLE: "always"}) == "time"


ERRORS = (
    None,
    None,
    torch.OutOfMemoryError("none left"),
    RuntimeError("unspecified launch failure"),
)
CALLS = st.lists(
    st.builds(
        dict,
        key=st.sampled_from(["a", "b", "c"]),
        how=st.sampled_from(verdicts.MODES),
        capturing=st.booleans(),
        error=st.sampled_from(ERRORS),
        restarted=st.booleans(),
        damaged=st.booleans(),
    ),
    max_size=20,
)
KERNELS = st.fixed_dictionaries(
    {
        key: st.builds(
            dict,
            wrong=st.lists(st.sampled_from(BACKENDS + MIXED), unique=True),
            evidence=st.sampled_from([None, EAGER]),
            both=st.sampled_from([(), MIXED]),
            ms=st.fixed_dictionaries(dict.fromkeys((*BACKENDS, *MIXED, EAGER), st.floats(0.1, 9))),
        )
        for key in "abc"
    }
)


@given(CALLS, KERNELS)
def test_whatever_happens(calls: list[dict], kernels: dict[str, dict]) -> None:
    """No exception and no wrong kernel; if nothing goes wrong, the fastest right kernel."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "verdicts.json"
        of_process = Verdicts(file, "a GPU")
        for call in calls:
            if call["damaged"]:
                file.write_text('{"a GPU": {"a": {"backend": "cu')
            if call["restarted"]:
                of_process = Verdicts(file, "a GPU")
            given = kernels[call["key"]]
            trial = FakeTrial(
                call["key"], capturing=call["capturing"], error=call["error"], **given
            )
            assert of_process.decide(trial, call["how"]) not in given["wrong"]
        for key, given in kernels.items():
            file.unlink(missing_ok=True)
            chosen = Verdicts(file, "a GPU").decide(FakeTrial(key, **given), "time")
            right = [name for name in BACKENDS if name not in given["wrong"]]
            mixed = FakeTrial(both=given["both"]).mixed(right)
            right += [EAGER, *(name for name in mixed if name not in given["wrong"])]
            if given["evidence"] is None or right == [EAGER]:
                assert given["ms"][chosen] == min(given["ms"][name] for name in right)
            else:
                assert chosen == EAGER


@given(st.sampled_from(["", "{", "[]", '{"a GPU": {"layer_norm": 3}}', '{"a GPU": []}', "\x00"]))
def test_a_damaged_file_is_put_aside_or_made_anew(text: str) -> None:
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        file = Path(folder) / "verdicts.json"
        file.write_text(text)
        trial = FakeTrial(ms={"cuda": 1.0, "triton": 2.0, EAGER: 3.0})
        assert Verdicts(file, "a GPU").decide(trial, "time") == "cuda"
        kept = Verdicts(file, "a GPU").all_kept()["layer_norm"]
        assert (kept.backend, kept.by) == ("cuda", "time")
        aside = file.with_suffix(".damaged")
        assert aside.exists() == (len(told) == 1)
        assert not aside.exists() or aside.read_text() == text


def test_want_of_memory_is_kept_for_the_process_only(of_process: Verdicts, tmp_path: Path) -> None:
    trial = FakeTrial(error=torch.OutOfMemoryError("none left"))
    with pytest.warns(RuntimeWarning, match="could not be tried: OutOfMemoryError"):
        assert [of_process.decide(trial, "time") for _ in range(3)] == [EAGER] * 3
    assert trial.tried == 1
    again = FakeTrial(ms={"cuda": 1.0, "triton": 2.0, EAGER: 3.0})
    assert Verdicts(tmp_path / "verdicts.json", "a GPU").decide(again, "time") == "cuda"


# --- Processes --------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def _rank(file: Path, rank: int, dies: bool, keys: Sequence[str]) -> None:
    """A process with a clock of its own, and so with other times; one that is interrupted ends."""
    of_process, draw = Verdicts(file, "a GPU"), random.Random(rank)

    class Trial(FakeTrial):
        def times(self, backends: Sequence[str]) -> Mapping[str, float]:
            if dies:
                os._exit(9)
            return {name: draw.random() for name in (*backends, EAGER)}

    chosen = {key: of_process.decide(Trial(key), "time") for key in keys}
    (file.parent / f"{rank}.told").write_text(json.dumps(chosen))


def test_processes_choose_alike(tmp_path: Path) -> None:
    """One cache, real processes, some of which die in the middle of a trial."""
    file = tmp_path / "verdicts.json"
    keys = [f"class {n}" for n in range(12)]
    ranks = []
    for rank in range(6):
        order = random.Random(rank).sample(keys, len(keys))
        ranks.append(FORK.Process(target=_rank, args=(file, rank, rank in (1, 3), order)))
        ranks[-1].start()
    for process in ranks:
        process.join(timeout=60)
    assert all(ranks[rank].exitcode == 0 for rank in (0, 2, 4, 5))
    chosen = [json.loads((tmp_path / f"{rank}.told").read_text()) for rank in (0, 2, 4, 5)]
    assert all(of_rank == chosen[0] for of_rank in chosen)
    kept = {key: verdict.backend for key, verdict in Verdicts(file, "a GPU").all_kept().items()}
    assert kept == chosen[0]
    assert len(set(kept.values())) > 1  # else all may have been static


def _update(file: Path, writer: int) -> None:
    for n in range(50):
        cache.update(file, lambda content, n=n: content.update({f"{writer} {n}": n}))


def test_no_update_is_lost(tmp_path: Path) -> None:
    writers = [FORK.Process(target=_update, args=(tmp_path / "kept.json", n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(cache.read(tmp_path / "kept.json")) == 200
    assert {f.name for f in tmp_path.iterdir()} == {"kept.json", "kept.lock"}


def test_a_process_that_waits_too_long_goes_by_evidence(
    of_process: Verdicts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "PATIENCE", 0.05)
    held: list[Path] = []
    locked = cache.locked

    def remember(file: Path, seconds: float | None = None):
        held.append(file)
        return locked(file, seconds)

    monkeypatch.setattr(cache, "locked", remember)
    of_process.decide(FakeTrial("other"), "check")
    of_process.decide(FakeTrial(), "check")
    Path(tmp_path / "verdicts.json").unlink()
    (file,) = [f for f in held[2:] if f.parent.name == "trials"]
    fresh = Verdicts(tmp_path / "verdicts.json", "a GPU")
    with locked(file), pytest.warns(RuntimeWarning, match="another process has been trying it"):
        assert fresh.decide(FakeTrial(evidence="triton"), "time") == "triton"


def test_verdicts_of_another_kind_are_not_read() -> None:
    assert verdicts._verdict({"backend": "cuda", "by": "time", "faults": {}, "ms": {}}) == Verdict(
        "cuda", "time", {}, {}
    )
    assert verdicts._verdict({"backend": 3, "by": "time", "faults": {}, "ms": {}}) is None
    assert verdicts._verdict(["cuda"]) is None
