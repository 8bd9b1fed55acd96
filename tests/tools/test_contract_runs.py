"""Tests and measurements on a GPU: the effects of a kernel that fails, hangs or crashes."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchweld.bench import jobs
from torchweld.bench.cases import SMALLEST
from torchweld.bench.contract import Limit, Verdict, run_contract
from torchweld.bench.jobs import Job, JobOutcome
from torchweld.bench.runner import Plan

pytestmark = pytest.mark.long


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis takes longer to import than such tests run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


# After a planted fault every later test of its process fails, as after a kernel's fault on a GPU.
_OPS = """
import os, time
import pytest

broken = False
FAULTS = {
    "layer_norm-gpu-cuda": "assert False",
    "rms_norm-gpu-cuda": "broken = True",
    "normalize_act-gpu-cuda": "os.abort()",
    "bias_act-gpu-cuda": "time.sleep(1000)",
}
IDS = [f"{name}-{test}" for name in FAULTS for test in "ab"]
IDS += ["layer_norm-gpu-triton", "rms_norm-gpu-triton", "normalize_act-gpu-triton"]
IDS += ["softmax_dropout-gpu-triton", "layer_norm-cpu", "dropout_add_layer_norm-gpu-cuda"]


@pytest.mark.parametrize("target", IDS, ids=IDS)
def test_it(target):
    if target.endswith("-a"):
        exec(FAULTS[target[:-2]], globals())
    assert not broken


def test_more():
    assert not broken
"""
OUTCOMES = {
    ("layer_norm", "cuda"): [False, True],  # it fails
    ("rms_norm", "cuda"): [False, False],  # it breaks the GPU
    ("normalize_act", "cuda"): [False],  # it crashes
    ("bias_act", "cuda"): [False],  # it hangs
    ("layer_norm", "triton"): [True],
    ("rms_norm", "triton"): [True],
    ("normalize_act", "triton"): [True],
    ("softmax_dropout", "triton"): [True],
}


def _counted(found: Iterable[Verdict]) -> Counter[tuple[str, str, bool]]:
    return Counter((tested.op, tested.backend, tested.fault is None) for tested in found)


@pytest.mark.usefixtures("few_plugins")
def test_a_fault_is_of_its_op_and_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(_OPS)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # four at once: others run while one hangs
    start = time.monotonic()
    counted = _counted(run_contract(tmp_path, {*OUTCOMES}, Limit(6)))
    assert counted == Counter(
        (*t, passed) for t, outcomes in OUTCOMES.items() for passed in outcomes
    )
    assert time.monotonic() - start < 60


_RULES = """
import os
import pytest

broken = False


@pytest.mark.parametrize("x", [1, 2], ids=["gpu-cuda-AdamW", "gpu-cuda-Lion"])
def test_named(x):
    global broken
    broken |= x == 1 and BROKEN
    assert not broken


@pytest.mark.parametrize("x", [1, 2], ids=["0-gpu-cuda", "0-emulator"])
def test_all(x):
    assert not broken


def test_nothing_named():
    pass
"""


@pytest.mark.usefixtures("few_plugins")
@pytest.mark.parametrize("broken", [False, True])
def test_a_rules_fault_is_its_own(broken: bool, tmp_path: Path) -> None:
    """Tests that name no rule count for each."""
    tests = tmp_path / "tests" / "optim"
    tests.mkdir(parents=True)
    (tests / "test_optim_cuda.py").write_text(_RULES.replace("BROKEN", str(broken)))
    counted = _counted(run_contract(tmp_path, {("adam", "cuda"), ("lion", "cuda")}))
    assert counted == Counter(
        [("adam", "cuda", not broken), ("lion", "cuda", True), *[(r, "cuda", True) for r in RULES]]
    )


RULES = ("adam", "lion")


# --- Measurements -----------------------------------------------------------------------------

JOB = Job(
    op="layer_norm",
    plan=Plan(("fwd", "full"), ("cpu",), (), seconds=0.0, rounds=(2, 3)),
    dtypes=("float32",),
    sizes=(SMALLEST,),
    overhead=True,
    device="cpu",
)


# Measures as it does, but does what a file says after the first direction.
_PLANTED = """
import os, time
from pathlib import Path
from torchweld.bench import runner
measure = runner.measure
def planted(*given):
    found = measure(*given)
    yield next(found)
    exec(Path(FILE).read_text())
    yield from found
runner.measure = planted
"""


class _Counted(jobs.Worker):
    """A worker that knows how often it started a process."""

    starts = 0

    def _start(self) -> subprocess.Popen[str]:
        self.starts += 1
        return super()._start()


@dataclass
class Ran:
    """A job's outcome, and then its worker: the starts, and whether it has a process."""

    outcome: JobOutcome
    starts: int
    lives: bool


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    """A worker's jobs, one after another."""
    folder = tmp_path_factory.mktemp("planted")
    fault = folder / "fault.py"
    (folder / "sitecustomize.py").write_text(_PLANTED.replace("FILE", repr(str(fault))))
    worker = _Counted()

    def run(planted: str, seconds: float = 600.0) -> Ran:
        fault.write_text(planted)
        found = worker.run(JOB, seconds)
        return Ran(found, worker.starts, worker._process is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        try:
            found = {"first": run("")}
            begin = time.perf_counter()
            found["second"] = run("")
            # It measures more than the one before the fault.
            longest = 1 + round(3 * (time.perf_counter() - begin))
            found[f"longer than {longest} s"] = run("time.sleep(9999)", longest)
            found["ended with status -6"] = run("os.abort()")
            yield found
        finally:
            worker.close()


def test_a_job_tells_what_it_measured(ran: dict[str, Ran]) -> None:
    found = ran["first"].outcome
    assert found.fault is None
    directions = [{result.direction for result in results} for results in found.results]
    assert directions == [{"fwd"}, {"full"}]
    timed = {result.contender for results in found.results for result in results if result.ms}
    assert timed == {"eager", "cpu"}
    assert {line.op for line in found.overheads} == {"layer_norm"}


def test_a_worker_goes_on(ran: dict[str, Ran]) -> None:
    """Its jobs share a process, and the one after a fault has a new one."""
    assert [(each.starts, each.lives) for each in ran.values()] == [
        *[(1, True), (1, True), (1, False)],
        (2, False),
    ]
    assert ran["second"].outcome.fault is None
    assert len(ran["second"].outcome.results) == 2


def test_a_jobs_process_may_end(ran: dict[str, Ran]) -> None:
    """Earlier output counts; the fault is attributed to its backend."""
    for told, each in list(ran.items())[2:]:
        found = each.outcome
        assert told in (found.fault or "")
        assert not found.is_shortage
        assert [result.direction for result in found.results[0]] == ["fwd", "fwd"]
        assert len(found.results) == 1
        (refusal,) = jobs.refuse_all(JOB, found)
        assert (refusal.op, refusal.contender, refusal.status) == ("layer_norm", "cpu", "refused")
        assert told in (refusal.reason or "")


def test_a_process_that_has_no_time_tells_nothing() -> None:
    found = jobs.run_apart(JOB, 0.01)
    assert found.fault == "it took longer than 0.01 s"
    assert not found.is_shortage
    assert found.results == []
