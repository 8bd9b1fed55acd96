"""The order of jobs on a GPU: a dry run on an imitated one, and what a time limit leaves."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import conftest
from conftest import PLACES, running_at
from torchweld import functional
from torchweld.bench import cases, command, jobs, preflight, recording, runner, stages, steps
from torchweld.bench.cases import Case
from torchweld.bench.contenders import PEERS
from torchweld.bench.contract import Verdict
from torchweld.bench.jobs import Job, JobOutcome
from torchweld.bench.recording import Fault
from torchweld.bench.runner import Plan, Result
from torchweld.bench.stages import Step
from torchweld.bench.timing import clock_for
from torchweld.commands import cli
from torchweld.dispatch.call import call
from torchweld.ops.attention.samples import benchmark_window
from torchweld.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "name": "An imitation",
    "capability": "9.0",
    "date": "2026-01-01",
    "versions": {},
    "copy_gbps": 4000.0,
}
NAMES = stages.sort_names(recording.PROVEN)


class Imitation:
    """A machine of 16 cores whose clock advances by the predicted times of jobs."""

    cores = 16

    def __init__(self, slower: float = 1.0) -> None:
        self.time, self.slower = 0.0, slower
        self.ran: list[tuple[str, Job]] = []

    def now(self) -> float:
        return self.time

    def run(self, step: Step, until: float) -> Iterator[tuple[Job, JobOutcome | None]]:
        free = [self.time] * (step.at_once or self.cores)
        ends = self.time
        for job in step.jobs:
            begins = heapq.heappop(free)
            if begins >= until:
                heapq.heappush(free, begins)
                yield job, None
                continue
            heapq.heappush(free, begins + step.each * self.slower)
            ends = max(ends, begins + step.each * self.slower)
            self.ran.append((step.name, job))
            yield job, self.found(job)
        self.time = ends

    def found(self, job: Job) -> JobOutcome:
        (backend,) = job.plan.backends
        given = {"op": job.op, "shape": [8, 8], "dtype": "bfloat16", "elements": 64, "bytes": 128}
        times = {"ms": 1.0, "p20": 1.0, "p80": 1.0, "eager_ms": 2.0}
        results = [
            [
                Result(direction=d, contender=c, **given, **times)
                for c in ("eager", *job.plan.rivals, backend)
            ]
            for d in job.plan.directions
        ]
        return JobOutcome(results, [], None)

    def contract(self, targets: set[tuple[str, str]], seconds: float) -> Iterable[Verdict]:
        self.time += seconds
        yield from (Verdict(op, backend, None) for op, backend in sorted(targets))
        yield Verdict("lion", "cuda", Fault("test_x.py::test_it", None))
        yield Verdict(recording.OPTIMIZERS, "cuda", Fault("test_x.py::test_shared", None))


TIMED = "attention beside its rivals", "bfloat16 times"
ATTENTION = "block_sparse_attention"


def _record(tmp_path: Path) -> recording.Record:
    return recording.Record(tmp_path / "evidence.json", MACHINE, ROOT)


def test_a_dry_run_of_the_whole_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of the first stage fits its ten minutes, as predicted, and every kernel is in it."""
    lab, record = Imitation(), _record(tmp_path)
    results = stages.run("first", NAMES, lab, record)
    told = capsys.readouterr().out
    print(told)
    assert "no time was left" not in told
    assert lab.now() <= 600
    predicted = allowed = 0.0
    for step in stages.first(NAMES):
        assert f"{step.name}: some {step.predict(lab.cores):.0f} s" in told
        predicted += step.predict(lab.cores)
        allowed += step.seconds
        assert predicted <= allowed
    kernels = {(n, b) for n, p in recording.PROVEN.items() for b in recording.gpu_backends(p)}
    checked = [(job.op, b) for name, job in lab.ran[: len(kernels)] for b in job.plan.backends]
    assert set(checked) == kernels
    timed = [(name, job) for name, job in lab.ran if name in TIMED]
    assert {job.op for _, job in timed} == {n for n in OPS if recording.gpu_backends(OPS[n])}
    assert (timed[0][0], timed[0][1].op) == (TIMED[0], ATTENTION)
    assert len({(r.op, r.direction, r.contender) for r in results}) == len(results)


def test_the_second_stage_fits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = Imitation()
    stages.run("second", NAMES, lab, _record(tmp_path))
    assert "no time was left" not in capsys.readouterr().out
    assert lab.now() <= 600
    predicted = allowed = 0.0
    for step in stages.second(NAMES):
        predicted, allowed = predicted + step.predict(lab.cores), allowed + step.seconds
        assert predicted <= allowed


def test_every_rival_has_its_row(tmp_path: Path) -> None:
    """Dense attention by each of torch's kernels, FlexAttention, and the steps of other packages.

    torch's fused AdamW is the eager contender of AdamW.
    """
    lab, record = Imitation(), _record(tmp_path)
    stages.run("first", NAMES, lab, record)
    ops = json.loads(record.path.read_text())["ops"]
    dense = {"sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"}
    assert dense < PEERS.keys()
    for result in ops[ATTENTION]["triton"]["results"]:
        assert result["rivals_ms"].keys() == {"eager", "flex"} | dense
    for result in ops["linear_act"]["triton"]["results"]:
        if result["direction"] == "fwd":
            assert "gemm" in result["rivals_ms"]
    assert "torch_muon" in steps.PEERS
    (step,) = {str(r["rivals_ms"].keys() - {"eager"}) for r in ops["adam"]["cuda"]["results"]}
    assert "bitsandbytes" in step
    assert isinstance(steps.KINDS[0].eager([torch.ones(1)]), torch.optim.AdamW)
    # Compiling beforehand is no measurement: its jobs are not in the record.
    compiled = [job for name, job in lab.ran if name == "all sizes, compiled"]
    assert {job.op for job in compiled} == {n for n in OPS if "triton" in OPS[n].sources}
    compiled = [job for job in compiled if job.op == ATTENTION]
    assert [len(job.sizes or ()) for job in compiled] == [1] * len(OPS[ATTENTION].benchmarks_on_gpu)
    assert len({case.arguments for job in compiled for case in _cases_on_gpu(job)}) == len(compiled)


def _cases_on_gpu(job: Job) -> list[Case]:
    return [case for case in job.cases() if isinstance(case, Case)]


def test_the_later_stages_have_what_the_first_left(tmp_path: Path) -> None:
    lab, record = Imitation(), _record(tmp_path)
    for stage in stages.STAGES:
        stages.run(stage, NAMES, lab, record)
    steps = {
        job.op for name, job in lab.ran if name in ("optimizers", "AdamW on a billion elements")
    }
    assert steps == {n for n, p in recording.PROVEN.items() if n not in OPS}
    assert {tuple(job.dtypes) for name, job in lab.ran if name == "float32 times"} == {("float32",)}
    assert all(job.plan.rivals for name, job in lab.ran if name == "beside torch.compile")


def test_a_failure_takes_its_own_key_away(tmp_path: Path) -> None:
    """A failing test counts for the rule that it names, or for none."""
    record = _record(tmp_path)
    stages.run("first", NAMES, Imitation(), record)
    ops = json.loads(record.path.read_text())["ops"]
    failed = {op for op, proofs in ops.items() if any(map(recording.list_faults, proofs.values()))}
    assert failed == {"lion", recording.OPTIMIZERS}
    (line,) = [
        line
        for line in recording.list_states(ROOT, {"An imitation": {"ops": ops}})
        if line[0] == recording.OPTIMIZERS
    ]
    assert "1 failed" in line[3]


def test_what_no_time_is_left_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine three times slower keeps to the stage's time, except for jobs already under way."""
    lab = Imitation(slower=3.0)
    stages.run("first", NAMES, lab, _record(tmp_path))
    told = capsys.readouterr().out
    assert "no time was left for" in told
    longest = max(step.each for step in stages.first(NAMES)) * lab.slower
    assert lab.now() <= 600 + longest
    # The most used ops have been measured nonetheless.
    assert ("bfloat16 times", "layer_norm") in {(name, job.op) for name, job in lab.ran}


def test_this_machine_runs_jobs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real lab, with processes that do nothing: every job ends, or is not begun."""
    limits = []

    def run(worker: jobs.Worker, job: Job, seconds: float) -> JobOutcome:
        limits.append(seconds)
        return JobOutcome([], [], None)

    monkeypatch.setattr(jobs.Worker, "run", run)
    lab = stages.Machine(ROOT)
    step = stages.first(NAMES)[1]
    found = list(lab.run(step, lab.now() + 60))
    assert {str(job) for job, _ in found} == {str(job) for job in step.jobs}
    assert all(came is not None for _, came in found)
    assert max(limits) <= 4 * step.each
    assert [came for _, came in lab.run(step, lab.now() - 1)] == [None] * len(step.jobs)


# --- Failures that are no kernel's fault ----------------------------------------------------------

LAYER_NORM = OPS["layer_norm"]
SMALL = Case(LAYER_NORM, LAYER_NORM.tiny, torch.float32, "cpu")
ON_CPU = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0, (1, 1)), device="cpu")


def _short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB")


def _measured(monkeypatch: pytest.MonkeyPatch) -> JobOutcome:
    monkeypatch.setattr(Job, "cases", lambda job: [SMALL])
    found = [list(r) for what, r in jobs.measure_here(ON_CPU) if what == "results"]
    return JobOutcome(found, [], None)


def _proof(record: recording.Record) -> dict[str, Any]:
    proof: dict[str, Any] = json.loads(record.path.read_text())["ops"]["layer_norm"]["cpu"]
    return proof


@pytest.mark.parametrize("where", ["inputs", "exact results", "kernel", "timed", "killed"])
def test_a_lack_of_memory_leaves_the_record(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes up: the kernel has neither passed nor failed."""
    record = _record(tmp_path)
    stages.record_job(ON_CPU, _measured(monkeypatch), record)
    before = record.path.read_text()
    assert recording.count_passed(_proof(record)) == 1
    if where == "inputs":
        monkeypatch.setattr(Case, "draw", _short)
    elif where == "exact results":
        monkeypatch.setattr(runner.Judge, "__init__", _short)
    elif where == "kernel":
        monkeypatch.setitem(vars(LAYER_NORM), "kernels", {"cpu": _short})
    elif where == "timed":
        monkeypatch.setattr(runner, "_try_out", lambda *_: (None, runner.OUT_OF_MEMORY))
    found = _measured(monkeypatch)
    if where == "killed":
        monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "killed"))
        (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
        (tmp_path / "killed").chmod(0o755)
        found = jobs.run_apart(ON_CPU)
        assert found.results == []
    results = stages.record_job(ON_CPU, found, record)
    (absent,) = {r.reason for r in results if r.contender == "cpu"}
    assert {r.status for r in results if r.contender == "cpu"} == {"absent"}
    assert "memory" in str(absent) or "status -9" in str(absent)
    assert record.path.read_text() == before


def test_a_baseline_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is judged and timed nonetheless, and has no speed relative to eager."""

    def tried(problem: Any, direction: str, contender: Any) -> tuple[None, str | None]:
        return None, runner.OUT_OF_MEMORY if contender.name == "eager" else None

    monkeypatch.setattr(runner, "_try_out", tried)
    record = _record(tmp_path)
    stages.record_job(ON_CPU, _measured(monkeypatch), record)
    proof = _proof(record)
    assert (recording.count_passed(proof), recording.list_faults(proof)) == (1, [])
    assert [(r["direction"], r["eager_ms"]) for r in proof["results"]] == [
        ("fwd", None),
        ("full", None),
    ]
    read = recording.list_results(json.loads(record.path.read_text()), None)
    assert [r.speed_up for r in read] == [None, None]


def test_a_rival_without_a_kernel_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN serves no CPU, as it does not serve every GPU and shape."""
    op = OPS[ATTENTION]
    rival = replace(PEERS["sdpa_cudnn"], devices=("cpu",))
    monkeypatch.setitem(PEERS, "sdpa_cudnn", rival)
    case = Case(op, op.tiny, torch.float32, "cpu")
    plan = Plan(("fwd",), ("cpu",), ("sdpa", "sdpa_cudnn"), 0.0, (1, 1))
    (results,) = runner.measure(case, plan, clock_for("cpu"))
    status = {r.contender: r.status for r in results}
    assert status == {"eager": "timed", "cpu": "timed", "sdpa": "timed", "sdpa_cudnn": "absent"}


def test_long_attention_is_judged_on_its_first_and_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scores decide, not the elements of q, and a wrong kernel is found there."""
    op = OPS[ATTENTION]
    case = Case(op, benchmark_window(4096, 1, 8)[0], torch.float32, "cpu")
    problem = case.draw()
    assert problem.inputs[0].numel() < cases.MOST_JUDGED // 256
    assert problem.part() is problem
    monkeypatch.setattr(cases, "MOST_JUDGED", 4096 * 4096 - 1)
    part = problem.part()
    assert part.inputs[0].shape[-2] < 4096
    query = part.inputs[0].shape
    assert [grad.shape for grad in part.grads] == [query, query[:-1]]
    check = runner._Check(problem)
    assert check.is_part
    assert check.find_fault(partial(call, op)) is None

    def wrong(*arguments: Any) -> Any:
        y, lse = call(op, *arguments)
        return y * 1.01, lse

    assert str(check.find_fault(wrong)).startswith("wrong result: y is off")

    def wrong_at_the_end(*arguments: Any) -> Any:
        y, lse = call(op, *arguments)
        factors = torch.ones(y.shape)
        factors[-1, -1, -3:] = 1.01
        return y * factors, lse

    assert part.inputs[0].shape[0] == 2
    assert str(check.find_fault(wrong_at_the_end)).startswith("wrong result: y is off")


@pytest.mark.parametrize(
    ("test", "error", "outcome"),
    [
        ("test_it[gpu-cuda]", torch.OutOfMemoryError("CUDA out of memory"), "skipped"),
        ("test_it[gpu-cuda]", RuntimeError("CUDA error: out of memory"), "skipped"),
        (
            "test_it[gpu-cuda]",
            RuntimeError("out of resource: shared memory"),
            "failed",
        ),
        ("test_it[gpu-cuda]", AssertionError("off by 1"), "failed"),
        ("test_it[cpu]", MemoryError("locked"), "failed"),
    ],
)
def test_a_test_without_memory_is_skipped(test: str, error: Exception, outcome: str) -> None:
    """On a GPU, and so the contract's run counts neither a pass nor a fault."""
    item: Any = SimpleNamespace(nodeid=test, path=ROOT, location=("", 1, ""))
    ended: Any = SimpleNamespace(excinfo=SimpleNamespace(value=error))
    hook = conftest.pytest_runtest_makereport(item, ended)
    next(hook)
    report: Any = SimpleNamespace(failed=True, outcome="failed", when="call", longrepr=None)
    with pytest.raises(StopIteration) as returned:
        hook.send(report)
    assert returned.value.value.outcome == outcome


@pytest.mark.parametrize("lacks", ["C compiler", "Python.h", "ptxas", "cuda", "triton"])
def test_what_is_missing_is_said_before_the_record_is_touched(
    lacks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tools = {tool: None if tool == lacks else "/usr/bin/it" for tool in preflight.find_tools()}
    monkeypatch.setattr(preflight, "find_tools", lambda: tools)
    reason = "softmax_dropout does not run: illegal address"
    monkeypatch.setattr(preflight, "why_not", lambda name: reason if name == lacks else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_begin_report", lambda device: pytest.fail("it has begun"))
    folder = tmp_path / "evidence"
    assert cli.main(["bench", "--record", "--evidence", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "nothing was measured or recorded" in told
    assert lacks in told
    assert not folder.exists()


def test_a_kernel_runs_before_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own process: its last words are the reason."""
    monkeypatch.setattr(preflight.BACKENDS["triton"], "why_missing", lambda: None)
    if not torch.cuda.is_available():
        assert "softmax_dropout does not run" in str(preflight.why_not("triton"))
    preflight.run_one("cpu", "cpu")
    results = iter((1, 2))  # the kernel's and the reference's
    monkeypatch.setattr(functional, "softmax_dropout", lambda x: x + next(results))
    with pytest.raises(AssertionError):
        preflight.run_one("cpu", "cpu")


@pytest.mark.skipif(PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2]))
def test_jobs_of_the_first_step_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a kernel is judged by the reference in float64, and its outcome recorded."""
    name = "softmax_dropout"
    op = OPS[name]
    (job,) = [j for j in stages.first([name])[1].jobs if j.op == name]
    # Not rows of one element: fused arithmetic rounds their gradients, of exactly zero, otherwise.
    small = [Case(op, op.tiny, torch.float32, "cpu")]
    monkeypatch.setattr(Job, "cases", lambda job: small)
    job = replace(job, device="cpu")
    with running_at("interpreter", monkeypatch):
        measured = [list(r) for what, r in jobs.measure_here(job) if what == "results"]
    found = JobOutcome(measured, [], None)
    record = _record(tmp_path)
    stages.record_job(job, found, record)
    proof: dict[str, Any] = json.loads(record.path.read_text())["ops"][name]["triton"]
    assert (recording.count_passed(proof), recording.list_faults(proof)) == (1, [])
    assert [r["direction"] for r in proof["results"]] == ["full"]
