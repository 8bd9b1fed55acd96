"""The order of jobs on a GPU: a dry run on an imitated one, and what a time limit leaves."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import PLACES, running_at
from torchweld.bench import isolated, recording, stages
from torchweld.bench.cases import Case
from torchweld.bench.contract import Verdict
from torchweld.bench.isolated import Found, Job
from torchweld.bench.recording import Fault
from torchweld.bench.runner import Result
from torchweld.bench.stages import Step
from torchweld.dispatch import evidence
from torchweld.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "name": "An imitation",
    "capability": "9.0",
    "date": "2026-01-01",
    "versions": {},
    "copy_gbps": 4000.0,
}
NAMES = stages.in_order(recording.PROVEN)


class Imitation:
    """A machine of 16 cores whose clock advances by the predicted times of jobs."""

    cores = 16

    def __init__(self, slower: float = 1.0) -> None:
        self.time, self.slower = 0.0, slower
        self.ran: list[tuple[str, Job]] = []

    def now(self) -> float:
        return self.time

    def run(self, step: Step, until: float) -> Iterator[tuple[Job, Found | None]]:
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

    def found(self, job: Job) -> Found:
        (backend,) = job.plan.backends
        given = {"op": job.op, "shape": [8, 8], "dtype": "bfloat16", "elements": 64, "bytes": 128}
        times = {"ms": 1.0, "p20": 1.0, "p80": 1.0, "eager_ms": 2.0}
        results = [
            [Result(direction=d, contender=c, **given, **times) for c in ("eager", backend)]
            for d in job.plan.directions
        ]
        return Found(results, [], None)

    def contract(self, targets: set[tuple[str, str]], seconds: float) -> Iterable[Verdict]:
        self.time += seconds
        yield from (Verdict(op, backend, None) for op, backend in sorted(targets))
        yield Verdict("lion", "cuda", Fault("test_x.py::test_it", None))
        yield Verdict(recording.OPTIMIZERS, "cuda", Fault("test_x.py::test_shared", None))


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
        assert f"{step.name}: some {step.predicted(lab.cores):.0f} s" in told
        predicted += step.predicted(lab.cores)
        allowed += step.seconds
        assert predicted <= allowed
    kernels = {(n, b) for n, p in recording.PROVEN.items() for b in recording.gpu_backends(p)}
    checked = [(job.op, b) for name, job in lab.ran[: len(kernels)] for b in job.plan.backends]
    assert set(checked) == kernels
    timed = {job.op for name, job in lab.ran if name == "bfloat16 times"}
    assert timed == {n for n in OPS if recording.gpu_backends(OPS[n])}
    assert len({(r.op, r.direction, r.contender) for r in results}) == len(results)


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
    failed = {op for op, proofs in ops.items() if any(map(evidence.faults, proofs.values()))}
    assert failed == {"lion", recording.OPTIMIZERS}
    (line,) = [
        line
        for line in recording.standing(ROOT, {"An imitation": {"ops": ops}})
        if line[0] == recording.OPTIMIZERS
    ]
    assert "1 failed" in line[3]


def test_what_no_time_is_left_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine six times slower keeps to the stage's time, except for jobs already under way."""
    lab = Imitation(slower=6.0)
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

    def run(job: Job, seconds: float) -> Found:
        limits.append(seconds)
        return Found([], [], None)

    monkeypatch.setattr(isolated, "run", run)
    lab = stages.Machine(ROOT)
    step = stages.first(NAMES)[1]
    found = list(lab.run(step, lab.now() + 60))
    assert {str(job) for job, _ in found} == {str(job) for job in step.jobs}
    assert all(came is not None for _, came in found)
    assert max(limits) <= 4 * step.each
    assert [came for _, came in lab.run(step, lab.now() - 1)] == [None] * len(step.jobs)


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax_dropout"])
def test_jobs_of_the_first_step_in_the_emulator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a kernel is judged by the reference in float64, and its outcome recorded."""
    op = OPS[name]
    (job,) = [j for j in stages.first([name])[0].jobs if j.op == name]
    small = [Case(op, op.samples[0], torch.float32, "cpu")]
    monkeypatch.setattr(Job, "cases", lambda job: small)
    job = replace(job, device="cpu")
    with running_at("emulator", monkeypatch):
        measured = [list(r) for what, r in isolated.measured(job) if what == "results"]
    found = Found(measured, [], None)
    record = _record(tmp_path)
    stages.keep(job, found, record)
    proof: dict[str, Any] = json.loads(record.path.read_text())["ops"][name]["cuda"]
    assert (evidence.passed(proof), evidence.faults(proof)) == (1, [])
    assert [r["direction"] for r in proof["results"]] == ["full"]
