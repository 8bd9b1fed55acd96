"""Records of evidence: what is replaced, and what stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweld.bench import jobs, recording, stages
from torchweld.bench.cases import Case
from torchweld.bench.jobs import Job, JobOutcome
from torchweld.bench.runner import Plan
from torchweld.registry import OPS, activation, parameter

LAYER_NORM = OPS["layer_norm"]
SMALL = (activation(8, 16), [16], parameter(16), parameter(16), 1e-5)
CASE = Case(LAYER_NORM, SMALL, torch.float32, "cpu")
MACHINE = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "date": "2026-01-01",
    "versions": {},
    "copy_gbps": 4000.0,
}


def _results(job: Job) -> list[list[Any]]:
    """Measured in this process."""
    return [list(entries) for what, entries in jobs.measure_here(job) if what == "results"]


def test_nothing_is_lost_before_something_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ended before its first case removes nothing, nor does one with other cases."""
    job = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0), device="cpu")
    monkeypatch.setattr(Job, "cases", lambda job: [CASE])
    record = recording.Record(tmp_path / "own.json", MACHINE, None)
    found = JobOutcome(_results(job), [], None)
    stages.record_job(job, found, record)

    def proof() -> dict[str, Any]:
        return json.loads(record.path.read_text())["ops"]["layer_norm"]["cpu"]

    before = proof()
    assert recording.count_passed(before) == 1
    stages.record_job(job, JobOutcome([], [], None), record)
    assert proof() == before
    record.begin("layer_norm", "cpu", recording.TESTED)
    record.add_outcome("layer_norm", "cpu", recording.TESTED, None)
    assert proof()["results"] == before["results"]
    assert recording.count_passed(proof()) == 2
    stages.record_job(replace(job, plan=replace(job.plan, directions=("fwd",))), found, record)
    assert recording.count_passed(proof()) == 2
    assert len(proof()["results"]) == len(before["results"])
