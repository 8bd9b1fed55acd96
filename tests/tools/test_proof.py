"""The check at first use: its decisions, records and messages, whatever goes wrong."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweld import files
from torchweld.commands import tune
from torchweld.dispatch import bare, proof, store
from torchweld.dispatch.proof import Checker, Question
from torchweld.dispatch.store import SHIPPED_VARIABLE, Store, list_shipped, write
from trying import CONDITIONS, time_by

BACKENDS = ("cuda", "triton")
EAGER = "eager"
TWICE = ["cuda", "cuda", "triton", "triton"]  # each correct candidate runs twice
ONE = torch.ones(4096, dtype=torch.float64)


class Script:
    """A question about scripted kernels."""

    def __init__(
        self,
        name: str = "layer_norm",
        wrong: Sequence[str] = (),
        ms: Mapping[str, float] | None = None,
        error: Exception | None = None,
        fails: Mapping[str, Exception] | None = None,
        size: int = 0,
        **fields: Any,
    ) -> None:
        self.ms, self.wrong, self.error, self.fails = ms or {}, wrong, error, fails or {}
        self.judged: list[str] = []
        self.timed: list[str] = []
        given: dict[str, Any] = {"prepare": self._prepare, **fields}
        self.question = Question(
            kind={"op": name},
            size=size,
            device=torch.device("cpu"),
            fallback=EAGER,
            candidates=BACKENDS,
            run=self._run,
            trusted=lambda: {"y": ONE},
            exact=lambda: {"y": ONE},
            **given,
        )

    def _run(self, backend: str) -> dict[str, torch.Tensor]:
        self.judged.append(backend)
        if self.error is not None:
            raise self.error
        return {"y": ONE + (backend in self.wrong)}

    def _prepare(self, backend: str) -> Callable[[], Any]:
        def call() -> float:
            if backend in self.fails:
                raise self.fails[backend]
            self.timed.append(backend)
            return self.ms[backend]

        return call


@pytest.fixture(autouse=True)
def on_a_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted calls return the milliseconds that they take."""
    monkeypatch.setattr(proof, "mode", "check")
    monkeypatch.setattr(proof, "can_check", lambda device: True)
    time_by(monkeypatch, _take_times)


def _take_times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    found = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):
            found[name] = call()
    return found


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    return _make_checker(tmp_path)


def _make_checker(folder: Path) -> Checker:
    """That of a new process."""
    return Checker(Store(folder / "answers.json"), CONDITIONS)


def _ask(checker: Checker, script: Script) -> str:
    answer = checker.ask(script.question)
    return EAGER if answer is None else answer.backend


FAST = {"cuda": 1.0, "triton": 2.0, EAGER: 3.0}


def test_a_wrong_kernel_is_refused_with_one_warning(checker: Checker) -> None:
    script = Script(wrong=["cuda"], ms={"triton": 1.0, EAGER: 2.0})
    with pytest.warns(RuntimeWarning) as told:
        chosen = [_ask(checker, script) for _ in range(3)]
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
        ({"cuda": 1.99, "triton": 5.0, EAGER: 2.0}, EAGER),  # within the lead
        ({"cuda": 1.95, "triton": 5.0, EAGER: 2.0}, "cuda"),
    ],
)
def test_a_candidate_needs_a_lead(ms: dict[str, float], chosen: str, checker: Checker) -> None:
    assert _ask(checker, Script(ms=ms)) == chosen


@pytest.mark.parametrize("tunes", [False, True])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("how", proof.MODES)
def test_modes(
    how: str, timed: bool, tunes: bool, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `torchweld tune` times; what must be timed does not serve a user's process until then,
    and what need not be is never timed."""
    monkeypatch.setattr(proof, "mode", how)
    if not tunes:
        monkeypatch.setattr(proof, "choose_fastest", None)
    ms = {"cuda": 3.0, "triton": 1.0, EAGER: 2.0}
    script = Script(ms=ms) if timed else Script(prepare=None)
    tried = how == "check" and (tunes or not timed)
    served = ("triton" if timed else "cuda") if tried else EAGER
    assert _ask(checker, script) == served
    assert script.judged == (TWICE if tried else [])
    assert bool(script.timed) == (tried and timed)
    # Compiled code looks answers up by fields, also answers of earlier processes.
    monkeypatch.setattr(proof, "mode", "check")
    _ask(checker, Script("other", prepare=None))
    monkeypatch.setattr(proof, "mode", how)
    assert checker.find_backends(op="other") == ({"cuda"} if how != "off" else set())


def test_the_environment() -> None:
    assert proof.read_mode({}) == "check"
    assert [proof.read_mode({proof.VARIABLE: m}) for m in proof.MODES] == [*proof.MODES]
    with pytest.warns(UserWarning, match="accepted: off, kept, check"):
        assert proof.read_mode({proof.VARIABLE: "always"}) == "check"


def test_answers_depend_on_kernels_in_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hash took the files of one folder: kernels below it would have kept old answers."""
    kernel = tmp_path / "triton_kernels" / "attention" / "forward.py"
    kernel.parent.mkdir(parents=True)
    monkeypatch.setattr(proof, "_PACKAGE", tmp_path / "python" / "torchweld")
    kernel.write_text("y = x")
    before = proof._hash_kernels.__wrapped__()
    kernel.write_text("y = 2 * x")
    assert proof._hash_kernels.__wrapped__() != before


def test_a_capture_tries_nothing(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(ms=FAST)
    with monkeypatch.context() as capture:
        capture.setattr(proof, "is_capturing", lambda device: True)
        with pytest.warns(RuntimeWarning, match="nothing is tried while a graph is captured"):
            assert [_ask(checker, script) for _ in range(2)] == [EAGER] * 2
    assert script.judged == []
    assert _ask(checker, script) == "cuda"


# --- Sizes ----------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(0, 9), st.sampled_from([*BACKENDS, EAGER]), min_size=1),
    st.integers(-1, 10),
)
def test_the_nearest_timed_size_serves(known: dict[int, str], size: int) -> None:
    def times(fastest: str) -> dict[str, float]:
        return {name: 1.0 if name == fastest else 9.0 for name in (*BACKENDS, EAGER)}

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        checker = _make_checker(Path(folder))
        for n, backend in known.items():
            script = Script(ms=times(backend), size=n)
            assert _ask(checker, script) == backend
            assert script.timed, "each size is tuned by itself"
        patch.setattr(proof, "choose_fastest", None)
        script = Script(ms=times(EAGER), size=size)
        nearest = min(abs(n - size) for n in known)
        assert _ask(checker, script) in {known.get(size - nearest), known.get(size + nearest)}
        assert not script.judged


# --- Whatever goes wrong --------------------------------------------------------------------------

ERRORS = (
    None,
    None,
    torch.OutOfMemoryError("none left"),
    RuntimeError("unspecified launch failure"),
)
CALLS: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.builds(
        dict,
        name=st.sampled_from(["a", "b", "c"]),
        how=st.sampled_from(proof.MODES),
        tunes=st.booleans(),
        capturing=st.booleans(),
        error=st.sampled_from(ERRORS),
        fails=st.dictionaries(
            st.sampled_from([*BACKENDS, EAGER]), st.sampled_from(ERRORS[2:]), max_size=1
        ),
        restarted=st.booleans(),
        damaged=st.booleans(),
    ),
    max_size=20,
)
KERNELS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        name: st.builds(
            dict,
            wrong=st.lists(st.sampled_from(BACKENDS), unique=True),
            ms=st.fixed_dictionaries(dict.fromkeys((*BACKENDS, EAGER), st.floats(0.1, 9))),
        )
        for name in "abc"
    }
)


@given(CALLS, KERNELS)
def test_whatever_happens(calls: list[dict], kernels: dict[str, dict]) -> None:
    """No exception and no wrong kernel; if nothing goes wrong, the fastest right kernel."""
    patch = pytest.MonkeyPatch()
    with TemporaryDirectory() as folder, warnings.catch_warnings(), patch.context() as patched:
        warnings.simplefilter("ignore")
        place = Path(folder)
        checker = _make_checker(place)
        for call in calls:
            if call["damaged"]:
                (place / "answers.json").write_text('{"answers": [{"kind": {"op": "a"}, "answ')
            if call["restarted"]:
                checker = _make_checker(place)
            patched.setattr(proof, "is_capturing", lambda _, c=call["capturing"]: c)
            patched.setattr(proof, "mode", call["how"])
            patched.setattr(proof, "choose_fastest", tune.choose_fastest if call["tunes"] else None)
            kernel = kernels[call["name"]]
            script = Script(call["name"], error=call["error"], fails=call["fails"], **kernel)
            chosen = _ask(checker, script)
            assert chosen not in kernel["wrong"]
            assert not proof._checking._is_owned()  # type: ignore[attr-defined]
        patched.setattr(proof, "is_capturing", lambda _: False)
        patched.setattr(proof, "mode", "check")
        patched.setattr(proof, "choose_fastest", tune.choose_fastest)
        for name, kernel in kernels.items():
            (place / "answers.json").unlink(missing_ok=True)
            chosen = _ask(_make_checker(place), Script(name, **kernel))
            ms, right = kernel["ms"], [n for n in BACKENDS if n not in kernel["wrong"]]
            best = min(right, key=lambda n: ms[n], default=EAGER)
            assert chosen == (best if ms[best] * tune.LEAD < ms[EAGER] else EAGER)


@given(
    st.sampled_from(["", "{", "[]", '{"answers": 3}', '{"answers": [3, {}, {"kind": 1}]}', "\x00"])
)
def test_a_damaged_file_is_put_aside_or_replaced(text: str) -> None:
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        file = Path(folder) / "answers.json"
        file.write_text(text)
        assert _ask(_make_checker(Path(folder)), Script(ms=FAST)) == "cuda"
        (entry,) = _make_checker(Path(folder)).entries()
        assert (entry.answer.backend, entry.answer.ms) == ("cuda", FAST)
        aside = file.with_suffix(".damaged")
        assert aside.exists() == (len(told) == 1)
        assert not aside.exists() or aside.read_text() == text


@pytest.mark.parametrize("key", ["backend", "faults", "ms"])
def test_an_entry_of_another_form_is_not_read(key: str, tmp_path: Path) -> None:
    """It may be of another version; the others of the file are read."""
    for name in ("layer_norm", "rms_norm"):
        _ask(_make_checker(tmp_path), Script(name, ms=FAST))
    file = tmp_path / "answers.json"
    content = json.loads(file.read_text())
    value = content["answers"][0]["answer"].pop(key)
    file.write_text(json.dumps(content))
    (entry,) = _make_checker(tmp_path).entries()
    assert entry.kind == {"op": "rms_norm"}
    content["answers"][0]["answer"] |= {key: value, "backend": 3}
    file.write_text(json.dumps(content))
    assert len(_make_checker(tmp_path).entries()) == 1


def test_a_kernel_whose_launches_differ_is_not_used(checker: Checker) -> None:
    """Within the bounds, but by other bits in its second launch."""

    class Racing(Script):
        def _run(self, backend: str) -> dict[str, torch.Tensor]:
            ran = super()._run(backend)
            late = backend == "cuda" and self.judged.count("cuda") == 2
            return {"y": ran["y"].where(ONE.cumsum(0) < 4096, 1 + 1e-16 * 3)} if late else ran

    with pytest.warns(RuntimeWarning, match="cuda for .* two equal launches differ in y"):
        assert _ask(checker, Racing(ms=FAST)) == "triton"


def test_want_of_memory_is_kept_for_the_process_only(checker: Checker, tmp_path: Path) -> None:
    script = Script(error=torch.OutOfMemoryError("none left"))
    with pytest.warns(RuntimeWarning, match="could not be tried: OutOfMemoryError"):
        assert [_ask(checker, script) for _ in range(3)] == [EAGER] * 3
    assert script.judged == ["cuda"]
    assert _ask(_make_checker(tmp_path), Script(ms=FAST)) == "cuda"


def test_a_call_that_fails_on_the_whole_is_no_candidate(checker: Checker) -> None:
    """The fallback's too: dense attention without memory, for example."""
    out, fault = torch.OutOfMemoryError("none left"), RuntimeError("an illegal memory access")
    assert (
        _ask(checker, Script("a", ms={"cuda": 3.0, "triton": 2.0}, fails={EAGER: out})) == "triton"
    )
    assert _ask(checker, Script("b", ms=FAST, fails={"cuda": fault})) == "triton"
    assert _ask(checker, Script("c", ms=FAST, fails=dict.fromkeys(FAST, fault))) == EAGER


def test_a_read_only_home_is_each_process_for_itself(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError("read-only")

    monkeypatch.setattr(store, "hold_lock", refuse)
    monkeypatch.setattr(store, "write", refuse)
    script = Script(ms=FAST)
    assert [_ask(checker, script) for _ in range(2)] == ["cuda"] * 2
    assert script.judged == TWICE


# --- Questions inside a trial ---------------------------------------------------------------------


def test_a_question_inside_a_trial_has_a_trial_of_its_own(checker: Checker) -> None:
    """Candidates are judged and timed as they will serve."""
    inner = Script("inner", ms=FAST)
    seen: list[tuple[str, str]] = []

    class Outer(Script):
        def _run(self, backend: str) -> dict[str, torch.Tensor]:
            seen.append(("judged", _ask(checker, inner)))
            return super()._run(backend)

        def _prepare(self, backend: str) -> Callable[[], Any]:
            call = super()._prepare(backend)

            def asks() -> Any:
                seen.append(("timed", _ask(checker, inner)))
                return call()

            return asks

    assert _ask(checker, Outer("outer", ms=FAST)) == "cuda"
    assert seen == [("judged", "cuda")] * 4 + [("timed", "cuda")] * 3
    assert inner.judged == TWICE
    assert _ask(checker, inner) == "cuda"


def test_other_threads_take_the_fallback_during_a_trial(checker: Checker) -> None:
    """A trial's backward runs in a thread of autograd's, which must not wait for the trial."""
    inner, chosen = Script("inner", ms=FAST), []

    class Outer(Script):
        def _run(self, backend: str) -> dict[str, torch.Tensor]:
            thread = threading.Thread(target=lambda: chosen.append(_ask(checker, inner)))
            thread.start()
            thread.join(timeout=10)
            assert not thread.is_alive()
            return super()._run(backend)

    assert _ask(checker, Outer("outer", ms=FAST)) == "cuda"
    assert chosen == [EAGER] * 4
    assert _ask(checker, inner) == "cuda"


# --- Files that are shipped -----------------------------------------------------------------------


def test_a_shipped_file_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache is empty; what was found on this machine comes first."""
    tuned = _make_checker(tmp_path / "tuned")
    assert _ask(tuned, Script(ms=FAST)) == "cuda"
    shipped = tmp_path / "shipped.json"
    write(shipped, tuned.entries())
    monkeypatch.setenv(SHIPPED_VARIABLE, str(shipped))
    fresh = Checker(Store(tmp_path / "fresh" / "answers.json", list_shipped()), CONDITIONS)
    script = Script(ms={"cuda": 9.0, "triton": 1.0, EAGER: 3.0})
    assert _ask(fresh, script) == "cuda"
    assert script.judged == []
    assert _ask(_make_checker(tmp_path / "fresh"), script) == "triton"
    assert _ask(fresh, script) == "triton"
    monkeypatch.setattr(proof, "mode", "kept")
    other = Checker(Store(tmp_path / "none.json", list_shipped()), {"device": "another GPU"})
    assert _ask(other, Script(ms=FAST)) == EAGER


def test_a_shipped_file_is_only_read(tmp_path: Path) -> None:
    """The user may have named the wrong file."""
    theirs = tmp_path / "settings.yaml"
    theirs.write_text("not: ours")
    with pytest.warns(UserWarning, match="of TORCHWELD_TUNED, is no file of answers"):
        assert Store(tmp_path / "answers.json", [theirs]).entries(CONDITIONS) == []
    assert theirs.read_text() == "not: ours"


def test_a_file_that_cannot_be_finished_stays_as_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "shipped.json", tmp_path / "link.json"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write_text(link, "after" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert file.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"shipped.json", "link.json"}
    files.write_text(link, "after")
    assert file.read_text() == "after"
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_new_file_can_be_read_by_others(tmp_path: Path) -> None:
    """As the user's umask has it: another user of a container reads what was shipped."""
    before = os.umask(0o022)
    try:
        write(tmp_path / "shipped.json", [])
    finally:
        os.umask(before)
    assert (tmp_path / "shipped.json").stat().st_mode & 0o777 == 0o644


def test_a_user_without_a_home_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of a user that the container does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", store.FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert store.find_folder() == Path(tempfile.gettempdir(), f"torchweld-{2**31 - 7}")


# --- Processes ------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def _rank(folder: Path, rank: int, dies: bool, names: Sequence[str]) -> None:
    """A process that asks in an order of its own; one that is interrupted ends."""
    checker = _make_checker(folder)
    for at, name in enumerate(names):
        if dies and at == len(names) // 2:
            os._exit(9)
        assert _ask(checker, Script(name, ms=FAST)) == "cuda"


def test_processes_lose_no_answer(tmp_path: Path) -> None:
    """One cache and real processes; some die."""
    names = [f"class {n}" for n in range(12)]
    ranks = []
    for rank in range(6):
        order = random.Random(rank).sample(names, len(names))
        ranks.append(FORK.Process(target=_rank, args=(tmp_path, rank, rank in (1, 3), order)))
        ranks[-1].start()
    for process in ranks:
        process.join(timeout=60)
    assert all(ranks[rank].exitcode == 0 for rank in (0, 2, 4, 5))
    kept = {entry.kind["op"]: entry.answer.backend for entry in _make_checker(tmp_path).entries()}
    assert kept == dict.fromkeys(names, "cuda")
    assert {f.name for f in tmp_path.iterdir()} == {"answers.json", "answers.lock"}


def test_copies_for_a_trial_lie_as_the_arguments() -> None:
    """Padded rows stay padded; one tensor in two places stays one; broadcast ones are packed."""
    padded, broadcast = torch.randn(4, 16)[:, :7], torch.randn(3, 1).expand(3, 5)
    copies = bare._clone([padded, padded, broadcast, padded.t(), 2.0])
    assert copies[0] is copies[1]
    assert copies[0].stride() == (16, 1)
    assert copies[3].stride() == (1, 16)
    for copied, x in zip(copies, (padded, padded, broadcast, padded.t()), strict=False):
        assert torch.equal(copied, x)
        assert copied.data_ptr() != x.data_ptr()
