"""How the automatic choice uses evidence from GPUs, and what `torchweld tune` keeps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld import cli, tune
from torchweld.bench import isolated, recording, runner, stages
from torchweld.bench.cases import Case
from torchweld.bench.isolated import Found, Job
from torchweld.bench.runner import Plan
from torchweld.dispatch import cache, evidence
from torchweld.registry import OPS, Op, activation, parameter

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


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Evidence of a GPU for the test to change."""
    proofs: dict[str, Any] = {}
    record = {"gpu": "NVIDIA H200", "capability": "9.0", "ops": {"layer_norm": proofs}}
    monkeypatch.setattr(evidence, "records", lambda: {"NVIDIA H200": record})
    evidence._verdict.cache_clear()
    yield proofs
    evidence._verdict.cache_clear()


def _proof(ms: float, passed: int = 9, failed: int = 0) -> dict[str, Any]:
    return _outcomes(passed, failed) | {"results": [_timed(ms, 8192, 1024)]}


def _outcomes(passed: int, failed: int, dtype: str | None = None) -> dict[str, Any]:
    faults = [{"what": "a test", "dtype": dtype}] * failed
    return {"outcomes": {"tested": {"passed": passed, "faults": faults}}}


def _timed(ms: float, rows: int, width: int, direction: str = "fwd") -> dict[str, Any]:
    return {
        "direction": direction,
        "dtype": "bfloat16",
        "shape": [rows, width],
        "elements": rows * width,
        "ms": ms,
        "eager_ms": 2.0,
    }


@pytest.mark.parametrize(
    ("proofs", "reason"),
    [
        ({}, "it has run on no GPU"),
        ({"cuda": _proof(1.0)}, None),
        ({"cuda": _proof(2.5)}, "measured at 0.80x eager's speed"),
        (
            {"cuda": _proof(1.0), "triton": _proof(0.8)},
            "measured at 2.00x eager's speed, triton at",
        ),
        ({"cuda": _proof(1.0), "triton": _proof(0.8, failed=1)}, None),
        ({"cuda": _proof(1.0, failed=1)}, "it has run on no GPU"),
        ({"cuda": _proof(1.0, passed=0)}, "it has run on no GPU"),
    ],
)
def test_verdict_on_a_backend(
    proofs: dict[str, Any], reason: str | None, planted: dict[str, Any]
) -> None:
    planted.update(proofs)
    x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    verdict = evidence.against(LAYER_NORM, "cuda", [x])
    assert verdict is None if reason is None else str(verdict).startswith(reason)


def test_verdict_is_of_the_dtype_measured(planted: dict[str, Any]) -> None:
    planted["cuda"] = _proof(1.0)
    assert evidence.against(LAYER_NORM, "cuda", [torch.empty(8192, 1024)]) is not None


SHAPES = [(32768, 1024), (4096, 4096), (32768, 4096), (4096, 65536), (16384, 8192)]
CLASSES = list(itertools.product(SHAPES, ("fwd", "full")))


@pytest.mark.parametrize(("shape", "direction"), CLASSES)
def test_a_measured_shape_is_judged_by_its_own_times(
    shape: tuple[int, int], direction: str, planted: dict[str, Any]
) -> None:
    """Times at other widths, sizes and directions do not matter."""
    planted["cuda"] = _proof(0) | {
        "results": [_timed(2.5 - (c == (shape, direction)), *c[0], c[1]) for c in CLASSES]
    }
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    x.requires_grad_(direction == "full")
    assert evidence.against(LAYER_NORM, "cuda", [x]) is None


def test_width_counts_before_size(planted: dict[str, Any]) -> None:
    results = [_timed(1.0, 2**15, 2**12), _timed(2.5, 2**11, 2**16)]
    planted["cuda"] = _proof(0) | {"results": results}
    for rows, width, wins in ((2**15, 2**12, True), (2**11, 2**16, False), (2**20, 2**12, True)):
        x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        assert (evidence.against(LAYER_NORM, "cuda", [x]) is None) == wins


def test_another_capability_is_no_evidence(
    planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted["cuda"] = _proof(1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    for capability, taken in (((9, 0), True), ((8, 9), False)):
        evidence._verdict.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        arguments = ("layer_norm", "cuda", ("cuda",), 0, torch.bfloat16, "fwd", 1024, 23)
        assert (evidence._verdict(*arguments) is None) == taken


def test_a_record_of_nothing_hides_no_evidence(
    planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted `torchweld tune` leaves such a record."""
    planted["cuda"] = _proof(1.0)
    empty = {"ops": {"layer_norm": {"cuda": {"outcomes": {}, "results": []}}}}
    monkeypatch.setattr(evidence, "own", lambda gpu: empty)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: MACHINE["name"])
    arguments = ("layer_norm", "cuda", ("cuda",), 0, torch.bfloat16, "fwd", 1024, 23)
    assert evidence._verdict(*arguments) is None


def test_verdict_is_among_what_can_serve(
    planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faster backend that rejects these arguments does not compete."""
    monkeypatch.setattr(Op, "refused", lambda _, name, __: "no" if name == "triton" else None)
    planted.update({"cuda": _proof(1.0), "triton": _proof(0.8)})
    x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    assert evidence.against(LAYER_NORM, "cuda", [x]) is None


@pytest.mark.parametrize("faulty", [False, True])
def test_what_tuning_finds_is_gone_by(
    faulty: bool, planted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only on this GPU and with this torch; a wrong kernel is never chosen, whatever is shipped."""
    gpu = MACHINE["name"]
    planted["cpu"] = _proof(2.5)
    versions = {"torch": torch.__version__, "torchweld": torchweld.__version__}
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: gpu)
    if faulty:
        wrong = {"cpu": "wrong"}
        monkeypatch.setattr(runner, "_fault", lambda judge, contender: wrong.get(contender.name))
    record = recording.Record(evidence.own_path(gpu), MACHINE | {"versions": versions}, None)
    job = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0), device="cpu")
    monkeypatch.setattr(Job, "cases", lambda job: [CASE])
    results = stages.keep(job, Found(_results(job), [], None), record)
    assert {result.direction for result in results} == {"fwd", "full"}

    def verdict() -> str | None:
        evidence._verdict.cache_clear()
        evidence.own.cache_clear()
        return evidence._verdict("layer_norm", "cpu", ("cpu",), 0, torch.float32, "full", 16, 7)

    if faulty:
        assert str(verdict()).startswith("it has run on no GPU")
    else:
        (ours,) = [r for r in results if (r.contender, r.direction) == ("cpu", "full")]
        assert ours.ms is not None
        assert ours.eager_ms is not None
        ratio = ours.eager_ms / ours.ms
        slower = f"measured at {ratio:.2f}x eager's speed"
        assert verdict() == (None if ratio >= 1 else slower)
    # Another torch, another time.
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert str(verdict()).startswith("it has run on no GPU")  # of float32; bfloat16 is planted
    evidence.own.cache_clear()


def _results(job: Job) -> list[list[Any]]:
    """Measured in this process."""
    return [list(entries) for what, entries in isolated.measured(job) if what == "results"]


def test_nothing_is_lost_before_something_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ended before its first case removes nothing, nor does one with other cases."""
    job = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0), device="cpu")
    monkeypatch.setattr(Job, "cases", lambda job: [CASE])
    record = recording.Record(tmp_path / "own.json", MACHINE, None)
    found = Found(_results(job), [], None)
    stages.keep(job, found, record)

    def proof() -> dict[str, Any]:
        return json.loads(record.path.read_text())["ops"]["layer_norm"]["cpu"]

    before = proof()
    assert evidence.passed(before) == 1
    stages.keep(job, Found([], [], None), record)
    assert proof() == before
    record.begin("layer_norm", "cpu", recording.TESTED)
    record.add_outcome("layer_norm", "cpu", recording.TESTED, None)
    assert proof()["results"] == before["results"]
    assert evidence.passed(proof()) == 2
    stages.keep(replace(job, plan=replace(job.plan, directions=("fwd",))), found, record)
    assert evidence.passed(proof()) == 2
    assert len(proof()["results"]) == len(before["results"])


def test_a_fault_is_of_its_dtype(planted: dict[str, Any]) -> None:
    times = [_timed(1.0, 8192, 1024) | {"dtype": d} for d in ("bfloat16", "float16")]
    planted["cuda"] = _outcomes(9, 1, "float16") | {"results": times}
    for dtype, sound in ((torch.bfloat16, True), (torch.float16, False)):
        x = torch.empty(8192, 1024, dtype=dtype)
        assert (evidence.against(LAYER_NORM, "cuda", [x]) is None) == sound


@pytest.mark.parametrize("torch_version", [torch.__version__, "9.9"])
def test_tuning_goes_on_with_what_this_torch_found(
    torch_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    evidence.own.cache_clear()
    versions = {"torch": torch.__version__, "torchweld": torchweld.__version__}
    earlier = MACHINE | {"versions": versions | {"torch": torch_version}}
    path = evidence.own_path(MACHINE["name"])
    before = recording.Record(path, earlier, None)
    before.add_outcome("layer_norm", "cuda", recording.JUDGED, None)
    record = tune.own_record(MACHINE | {"versions": versions})
    record.add_outcome("rms_norm", "cuda", recording.JUDGED, None)
    kept = set(json.loads(record.path.read_text())["ops"])
    assert kept == {"rms_norm"} | ({"layer_norm"} if torch_version == torch.__version__ else set())
    evidence.own.cache_clear()


def test_tuning_that_is_interrupted_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each op and backend has a process of its own, kept as soon as it ends. How long all of them
    take is said first."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    evidence.own.cache_clear()
    versions = {"torch": torch.__version__, "torchweld": torchweld.__version__}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "machine", lambda _: MACHINE | {"versions": versions})
    monkeypatch.setattr(tune, "clock_for", lambda _: None)
    monkeypatch.setattr(tune.limits, "copy_gbps", lambda *_: 4000.0)
    monkeypatch.setattr(tune, "show_machine", lambda _: None)
    ran: list[tuple[str, str]] = []

    def run(job: Job) -> Found:
        if len(ran) == 3:
            raise KeyboardInterrupt
        (backend,) = job.plan.backends
        ran.append((job.op, backend))
        return Found([], [], "it was killed")

    monkeypatch.setattr(tune.isolated, "run", run)
    with pytest.raises(KeyboardInterrupt):
        tune._tune(["layer_norm", "rms_norm"])
    kept = json.loads(evidence.own_path(MACHINE["name"]).read_text())["ops"]
    assert {(op, backend) for op, proofs in kept.items() for backend in proofs} == set(ran)
    assert ran == [("layer_norm", "cuda"), ("layer_norm", "triton"), ("rms_norm", "cuda")]
    assert "4 processes of some 10 s each: about 1 min" in capsys.readouterr().out
    evidence.own.cache_clear()


def test_tuning_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    assert cli.main(["tune"]) == 2
    assert "torchweld tune: torch sees no GPU here" in capsys.readouterr().err
