"""Tests and measurements on a GPU: the effects of a kernel that fails, hangs or crashes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from torchweld.bench import jobs
from torchweld.bench.cases import SMALLEST
from torchweld.bench.contract import Limit, Verdict, run_contract
from torchweld.bench.jobs import Job
from torchweld.bench.runner import Plan

pytestmark = pytest.mark.long

# After a planted fault every later test of its process fails, as after a kernel's fault on a GPU.
_OPS = """
import os, time
import pytest

broken = False
IDS = ["layer_norm-gpu-cuda-a", "layer_norm-gpu-cuda-b", "layer_norm-gpu-triton",
       "rms_norm-gpu-cuda", "rms_norm-gpu-triton", "layer_norm-cpu",
       "dropout_add_layer_norm-gpu-cuda"]


@pytest.mark.parametrize("target", IDS, ids=IDS)
def test_it(target):
    global broken
    if target == "layer_norm-gpu-cuda-a":
        FAULT
    assert not broken


def test_more():
    assert not broken
"""


def _failing(fault: str, tmp_path: Path) -> Counter[tuple[str, str, bool]]:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(_OPS.replace("FAULT", fault))
    targets = {(op, b) for op in ("layer_norm", "rms_norm") for b in ("cuda", "triton")}
    return _counted(run_contract(tmp_path, targets, Limit(8)))


def _counted(found: Iterable[Verdict]) -> Counter[tuple[str, str, bool]]:
    return Counter((tested.op, tested.backend, tested.fault is None) for tested in found)


INNOCENT = [("layer_norm", "triton"), ("rms_norm", "cuda"), ("rms_norm", "triton")]


@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        ("assert False", [False, True]),
        ("broken = True", [False, False]),
        ("os.abort()", [False]),
        ("time.sleep(1000)", [False]),
    ],
    ids=["fails", "breaks", "crashes", "hangs"],
)
def test_a_fault_is_of_its_op_and_backend(fault: str, outcomes: list[bool], tmp_path: Path) -> None:
    start = time.monotonic()
    counted = _failing(fault, tmp_path)
    expected = Counter([(*target, True) for target in INNOCENT])
    expected += Counter([("layer_norm", "cuda", passed) for passed in outcomes])
    assert counted == expected
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


def test_a_job_tells_what_it_measured() -> None:
    found = jobs.run_apart(JOB)
    assert found.fault is None
    directions = [{result.direction for result in results} for results in found.results]
    assert directions == [{"fwd"}, {"full"}]
    timed = {result.contender for results in found.results for result in results if result.ms}
    assert timed == {"eager", "cpu"}
    assert {line.op for line in found.overheads} == {"layer_norm"}


def test_a_worker_goes_on() -> None:
    """Its jobs share a process, and the one after a fault has a new one."""
    worker = jobs.Worker()
    try:
        pids = []
        for seconds in (600.0, 600.0, 0.01, 600.0):
            found = worker.run(JOB, seconds)
            assert found.fault == (None if seconds > 1 else "it took longer than 0.01 s")
            assert not found.is_shortage
            assert len(found.results) == (2 if seconds > 1 else 0)
            pids.append(worker._process.pid if worker._process else None)
        first, second, none, last = pids
        assert first == second != last
        assert none is None
    finally:
        worker.close()


def test_a_jobs_process_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin = time.perf_counter()
    _run_with(tmp_path, "os.abort()", 600, "ended with status -6")
    # A process starts slowly on a busy machine.
    seconds = math.ceil(3 * (time.perf_counter() - begin))
    _run_with(tmp_path, "time.sleep(9999)", seconds, f"longer than {seconds} s")


def _run_with(folder: Path, fault: str, seconds: int, told: str) -> None:
    """Earlier output counts; the fault is attributed to its backend."""
    planted = f"""
import os, time
from torchweld.bench import runner
measure = runner.measure
def planted(*given):
    yield next(measure(*given))
    {fault}
runner.measure = planted
"""
    (folder / "sitecustomize.py").write_text(planted)
    found = jobs.run_apart(JOB, seconds=seconds)
    assert [result.direction for result in found.results[0]] == ["fwd", "fwd"]
    assert len(found.results) == 1
    (refusal,) = jobs.refuse_all(JOB, found)
    assert (refusal.op, refusal.contender, refusal.status) == ("layer_norm", "cpu", "refused")
    assert told in (refusal.reason or "")
