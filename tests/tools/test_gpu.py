"""The run on a GPU: its steps rehearsed, what faults cost, and what its record keeps."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import PLACES, running_at
from torchweld import functional
from torchweld.bench import command
from torchweld.bench.cases import CASES, SMALLEST, Case
from torchweld.bench.measure import clock, evidence, gpu, jobs, machine, windows
from torchweld.bench.measure.contenders import DENSE
from torchweld.bench.measure.jobs import Job
from torchweld.bench.measure.overhead import Overhead
from torchweld.bench.measure.runner import Plan, Result
from torchweld.bench.models import whole
from torchweld.bench.models.blocks import BLOCKS
from torchweld.commands import cli
from torchweld.registry import OPS
from torchweld.sparse import BlockLayout

ROOT = Path(__file__).resolve().parents[2]
MACHINE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "date": "2026-01-01",
    "versions": {"torch": "2.11.0"},
    "copy_gbps": 4000.0,
}
NAMES = [*evidence.PROVEN, *BLOCKS]


def _read(record: gpu.EvidenceRecord) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.path.read_text())
    return content


def _result(
    op: str, contender: str, ms: float | None = 1.0, dtype: str = "bfloat16", **more: Any
) -> Result:
    result = Result(op, [8, 8], dtype, "full", contender, 64, 128, **more)
    result.ms, result.eager_ms = ms, 2.0
    return result


# --- Steps ----------------------------------------------------------------------------------------


def test_the_steps_have_every_kernel_and_rival() -> None:
    steps = {name: jobs for name, _, jobs in gpu.list_steps(gpu.sort_names(NAMES))}
    parts = [part for _, part, _ in gpu.list_steps(NAMES)]
    assert parts == sorted(parts)
    assert parts[-1] == 1
    timed = [job for name, step in steps.items() if name != gpu.COMPILING for job in step]
    kernels = set(gpu.list_targets(NAMES))
    assert {(job.op, b) for job in timed for b in job.plan.backends} == kernels
    assert {job.op for job in steps["blocks"]} == {*BLOCKS}
    ops = {name for name, _ in kernels if name in OPS}
    assert {job.op for job in steps[gpu.COMPILING]} == ops
    rivals = {job.op: set(job.plan.rivals) for job in steps["attention and GEMMs against rivals"]}
    assert rivals == {"block_sparse_attention": {*DENSE, "flex"}, "linear_act": {"gemm"}}
    assert steps["ops against eager"][0].op == "batch_norm_act"
    assert {*whole.MODELS} >= {s.arguments[0] for s in gpu.TO_RUN if s.module == "models.whole"}
    assert all(importlib.util.find_spec(f"torchweld.bench.{s.module}") for s in gpu.TO_RUN)
    assert steps["optimizers"][0].op == "adam"
    assert "bitsandbytes" in steps["optimizers"][0].plan.rivals


class _Imitation:
    """A clock, and jobs that take 2 s and find a row with each backend and rival, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now, self.path, self.rows = 0.0, path, list[int]()
        monkeypatch.setattr(gpu.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu.os, "cpu_count", lambda: 1)
        monkeypatch.setattr(gpu, "run_apart", self.run_apart)
        monkeypatch.setattr(gpu, "_run_tests", self.run_tests)
        monkeypatch.setattr(gpu.Script, "run", self.run_script)

    def run_script(self, path: Path, device: str, until: float, *, tiny: bool) -> bool:
        self.now += 20
        path.write_text("{}")
        return self.now <= until

    def run_tests(
        self, root: Path, target: tuple[str, str], record: gpu.EvidenceRecord, until: float
    ) -> bool:
        if self.now < until:
            self.now += 2
            fault = "it is off" if target[0] == "lion" else None
            record.add_outcome(*target, gpu.TESTED, fault)
            return True
        return False

    def run_apart(
        self, jobs: Sequence[Job], *, until: float, patience: float, at_once: int
    ) -> Iterator[Any]:
        for job in jobs:
            if self.now >= until:
                return
            self.now += 2
            found = [*job.plan.backends, *job.plan.rivals, "eager", "fused"]
            yield job, [_result(job.op, c, dtype=job.dtypes[0]) for c in found], [], False
            text = self.path.read_text()
            self.rows.append(text.count('"ms"'))
            yield job, [], [], True


@pytest.mark.parametrize("minutes", [9, 2])
def test_a_rehearsal_of_the_whole_run(
    minutes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends in time, says what it left out, and the record has each row when it is found."""
    record = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    lab = _Imitation(monkeypatch, record.path)
    gpu.run(NAMES, record, ROOT, minutes)
    told, content = capsys.readouterr().out, _read(record)
    assert lab.now <= 60 * minutes + 5
    assert ("no time was left" in told) == (minutes == 2)
    assert lab.rows == sorted(lab.rows)
    assert lab.rows[-1] > 0
    assert content["versions"] == MACHINE["versions"]
    assert content["gpu"] == MACHINE["name"]
    assert content["commit"]
    norm = content["ops"]["layer_norm"]["triton"]
    assert norm["outcomes"][gpu.JUDGED]["passed"] >= 1
    assert norm["outcomes"][gpu.TESTED] == {"passed": 1, "faults": []}
    assert norm["results"][0]["rivals_ms"]["eager"] == 1.0
    if minutes == 9:
        assert {*content["scripts"]} == {script.name for script in gpu.TO_RUN}
        attention = content["ops"]["block_sparse_attention"]["triton"]["results"]
        assert attention[0]["rivals_ms"].keys() >= {*DENSE, "flex", "eager"}
        assert content["ops"]["lion"]["cuda"]["outcomes"][gpu.TESTED]["faults"] == ["it is off"]
        assert {row["op"] for row in content["models"]} == {*BLOCKS}
        assert all(len(proof["results"]) == 1 for proof in content["ops"]["adam"].values())


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures neither rows nor scripts again; other sources that compile to the same count."""
    record = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    for what, ended in (("windows", True), ("losses", False)):
        record.add_script(what, {}, ended=ended)
    row = _result("layer_norm", "triton")
    row.shape, row.variant = list(CASES["layer_norm"].benchmarks_on_gpu[0][0].shape), ""
    for op in ("layer_norm", "rms_norm"):
        record.add_results([replace(row, op=op)])
    content = _read(record)
    proof = content["ops"]["layer_norm"]["triton"]
    proof["results"] += [proof["results"][0] | {"direction": "fwd", "ms": 3.0}]
    proof["sources"], proof["results"][0]["code"] = "then", {"3.7.1": "a"}
    record.path.write_text(json.dumps(content))
    codes = {"3.7.1": "a"}
    present = SimpleNamespace(get=lambda at, otherwise: codes)
    monkeypatch.setattr(evidence, "read_codes", lambda: present)
    again = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    shape = "x".join(map(str, row.shape))
    known = again.list_known("layer_norm", "triton")
    assert known == [f"{shape} bfloat16 full"]
    job = Job("layer_norm", Plan(["fwd", "full"], ["triton"], [], 0.0), ["bfloat16"], known=known)
    first, *others = [job.directions_of(case) for case in job.cases()]
    assert first == ["fwd"]
    assert all(each == ["fwd", "full"] for each in others)
    assert again.list_known("rms_norm", "triton") == known
    assert [again.has_script(name) for name in ("windows", "losses", "gpt_layer")] == [True] + [
        False
    ] * 2
    again.add_outcome("layer_norm", "triton", gpu.TESTED, None)
    (kept,) = _read(again)["ops"]["layer_norm"]["triton"]["results"]
    assert kept["direction"] == "full"
    codes["3.7.1"] = "b"
    record.path.write_text(json.dumps(content))
    changed = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    assert changed.list_known("layer_norm", "triton") == []


def test_scripts_run_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes on the CPU; models of transformers where that is installed."""
    has_models = importlib.util.find_spec("transformers") is not None
    of_models = [s for s in gpu.TO_RUN if s.module == "models.whole"]
    left = [] if has_models else [s for s in of_models if "gpt_layer" not in s.arguments]
    every = [s for s in gpu.TO_RUN if s not in left]
    monkeypatch.setattr(gpu, "TO_RUN", every)
    record = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    until = time.monotonic() + 600
    assert gpu.run_scripts(record, "cpu", until, tiny=True) == []
    scripts = _read(record)["scripts"]
    assert {*scripts} == {script.name for script in every}
    assert all(found["ended"] and found["found"] for found in scripts.values())
    of_windows = scripts["windows"]["found"]["rows"]
    ours = [row for row in of_windows if row["contender"] not in windows.PEERS]
    if importlib.util.find_spec("cudnn") is None:
        assert "pip install nvidia-cudnn-frontend" in of_windows[-1]["fault"]
    assert all(row["fault"] == "" and row["full"] > 0 for row in ours)
    monkeypatch.setattr(gpu.Script, "run", lambda *_, **__: pytest.fail("it runs again"))
    assert gpu.run_scripts(record, "cpu", until, tiny=True) == []


def test_cudnn_s_attention_takes_the_blocks_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with its signatures, which knows no backward pass for heads of 64.

    Its wheel may be missing, and it asks for a GPU.
    """
    layout = BlockLayout.sliding_window(640, window_size=(127, 0), block=64)
    blocks, counts = windows.list_blocks(2, 3, 640, "cpu")
    visible = torch.zeros(10, 10, dtype=torch.bool)
    for row, (listed, count) in enumerate(zip(blocks[1, 2], counts[1, 2], strict=True)):
        visible[row, listed[:count].long()] = True
    of_tokens = layout.to_mask().reshape(10, 64, 10, 64)
    assert torch.equal(visible, of_tokens.any(3).any(1))

    def attend(
        q_tensor: Any, k_tensor: Any, v_tensor: Any, q2k_block_index: Any, **how: Any
    ) -> Any:
        assert {*how} == {"q2k_block_nums", "sparse_block_size"}
        assert q2k_block_index.dtype is how["q2k_block_nums"].dtype is torch.int32
        mask = visible.repeat_interleave(64, 0).repeat_interleave(64, 1)
        y = torch.nn.functional.scaled_dot_product_attention(q_tensor, k_tensor, v_tensor, mask)
        return {"o_tensor": y, "lse_tensor": y[..., 0].float()}

    def refuse(*given: Any, **how: Any) -> Any:
        assert len(given) == 7
        raise NotImplementedError("SM90 backward requires head_dim=128")

    named = {"block_sparse_attention_forward": attend, "block_sparse_attention_backward": refuse}
    module = types.ModuleType("cudnn.block_sparse_attention")
    module.__dict__.update(named)
    parent = types.ModuleType("cudnn")
    parent.__spec__ = importlib.machinery.ModuleSpec("cudnn", None)
    monkeypatch.setitem(sys.modules, "cudnn", parent)
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", module)
    monkeypatch.setattr(windows, "contenders", lambda *_: {windows.CUDNN: windows._cudnn})
    (measured,) = windows.measure(2, 640, 1, "cpu", torch.float32, 0.0)
    assert measured["fwd"] > 0
    assert "full" not in measured
    assert "head_dim=128" in measured["fault"]


def test_a_clock_is_sampled_meanwhile() -> None:
    rate = clock.Rate(["sh", "-c", "echo 1000; echo N/A; echo 1755; echo 1980; exec sleep 60"])
    end = time.monotonic() + 30
    while rate.find_mhz(0.0) != 1755 and time.monotonic() < end:
        time.sleep(0.01)
    assert rate.find_mhz(0.0) == 1755
    assert rate.find_mhz(time.monotonic()) == 1980  # nothing yet: the last one
    assert clock.Rate(["/no/such/tool"]).find_mhz(0.0) is None


@pytest.mark.skipif(PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2]))
def test_a_job_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a kernel is judged by the reference in float64, and its outcome recorded."""
    op = OPS["softmax_dropout"]
    monkeypatch.setattr(
        Job, "cases", lambda job: [Case(op, CASES[op.name].tiny, torch.float32, "cpu")]
    )
    plan = Plan(["full"], ["triton"], [], seconds=0.0, rounds=(1, 1))
    record = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    with running_at("interpreter", monkeypatch):
        for _, results in jobs.measure_here(Job(op.name, plan, device="cpu")):
            record.add_results(results)
    proof = _read(record)["ops"][op.name]["triton"]
    assert evidence.describe_counts(proof) == "1 passed, 0 failed, 1 times"


@pytest.mark.parametrize("lacks", ["C compiler", "Python.h", "ptxas", "cuda", "triton"])
def test_what_is_missing_is_said_before_the_record_is_touched(
    lacks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tools = {tool: None if tool == lacks else "/usr/bin/it" for tool in machine.find_tools()}
    monkeypatch.setattr(machine, "find_tools", lambda: tools)
    reason = "softmax_dropout does not run: illegal address"
    monkeypatch.setattr(machine, "why_not", lambda name: reason if name == lacks else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_begin_report", lambda device: pytest.fail("it has begun"))
    assert cli.main(["bench", "--record", "--evidence", str(tmp_path / "evidence")]) == 2
    told = capsys.readouterr().err
    assert "nothing was measured or recorded" in told
    assert lacks in told
    assert not (tmp_path / "evidence").exists()


def test_a_kernel_runs_before_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own process: its last words are the reason."""
    monkeypatch.setattr(machine.BACKENDS["triton"], "why_missing", lambda: None)
    if not torch.cuda.is_available():
        assert "softmax_dropout does not run" in str(machine.why_not("triton"))
    machine.run_one("cpu", "cpu")
    results = iter((1, 2))  # the kernel's and the reference's
    monkeypatch.setattr(functional, "softmax_dropout", lambda x: x + next(results))
    with pytest.raises(AssertionError):
        machine.run_one("cpu", "cpu")


# --- The record -----------------------------------------------------------------------------------


def test_what_a_record_replaces_and_keeps(tmp_path: Path) -> None:
    record = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    assert record.path == tmp_path / "nvidia-h200.json"
    record.add_results([_result("layer_norm", "eager", 2.0), _result("layer_norm", "triton")])
    wrong = _result("layer_norm", "triton", None, status="refused", reason="off by 1")
    record.add_results([replace(wrong, shape=[9, 9])])
    first = _read(record)["ops"]["layer_norm"]["triton"]
    assert first["outcomes"][gpu.JUDGED] == {"passed": 1, "faults": ["9x9 bfloat16: off by 1"]}
    # A lack of memory, or a job that ended before its first row, leaves it as it was.
    absent = replace(wrong, status="absent", reason="out of memory")
    again = gpu.EvidenceRecord(tmp_path, MACHINE, ROOT)
    again.add_results([absent])
    assert _read(again)["ops"]["layer_norm"]["triton"] == first
    again.add_results([replace(_result("layer_norm", "triton", 0.5), direction="fwd")])
    second = _read(again)["ops"]["layer_norm"]["triton"]
    assert second["outcomes"][gpu.JUDGED] == {"passed": 1, "faults": []}
    assert [(r["direction"], r["ms"]) for r in second["results"]] == [("full", 1.0), ("fwd", 0.5)]
    again.add_results([_result("layer_norm", "triton", 0.25)])
    results = _read(again)["ops"]["layer_norm"]["triton"]["results"]
    assert [(r["direction"], r["ms"]) for r in results] == [("fwd", 0.5), ("full", 0.25)]


# --- Faults -----------------------------------------------------------------------------------

# After a planted fault every later test of its process fails, as after a kernel's fault on a GPU.
_TESTS = """# in place of mark.targets
import os, time
import pytest

broken = False
FAULTS = {
    "layer_norm-gpu-triton": "assert False",
    "rms_norm-gpu-triton": "broken = True",
    "normalize_act-gpu-triton": "os.abort()",
    "bias_act-gpu-triton": "time.sleep(1000)",
}
IDS = [f"{name}-{test}" for name in FAULTS for test in "ab"]
IDS += ["softmax_dropout-gpu-triton", "layer_norm-cpu", "dropout_add_layer_norm-gpu-triton"]


@pytest.mark.parametrize("target", IDS, ids=IDS)
def test_it(target):
    if target.endswith("-a"):
        exec(FAULTS[target[:-2]], globals())
    assert not broken
"""
_RULES = """
import pytest

@pytest.mark.parametrize("x", [1, 2], ids=["gpu-cuda-Adam", "gpu-cuda-Lion"])
def test_named(x):
    assert x == 2

@pytest.mark.parametrize("x", [1, 2], ids=["0-gpu-cuda", "0-emulator"])
def test_all(x):
    pass
"""
# Passes and faults by op: it fails, breaks the GPU, crashes, hangs until the time is up, is right.
OUTCOMES = {
    ("layer_norm", "triton"): (1, 1),
    ("rms_norm", "triton"): (0, 2),
    ("normalize_act", "triton"): (0, 1),
    ("bias_act", "triton"): None,
    ("softmax_dropout", "triton"): (1, 0),
    ("adam", "cuda"): (0, 1),
    ("lion", "cuda"): (1, 0),
    (gpu.OPTIMIZERS, "cuda"): (1, 0),
}


def test_a_fault_is_its_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real processes of pytest, on made-up tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis is slow to import
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 4)  # two at once: others run while one hangs
    rules = tmp_path / "tests" / "optim"
    rules.mkdir(parents=True)
    (tmp_path / "tests" / "test_it.py").write_text(_TESTS)
    (rules / "test_optim_cuda.py").write_text(_RULES)
    record = gpu.EvidenceRecord(tmp_path, MACHINE, tmp_path)
    hangs = [("bias_act", "triton"), ("softmax_dropout", "triton")]  # the second one runs meanwhile
    for targets, seconds in ([t for t in OUTCOMES if t not in hangs], 240), (hangs, 10):
        until = time.monotonic() + seconds
        assert gpu.run_contract(tmp_path, targets, record, until) == []
    for (name, backend), expected in OUTCOMES.items():
        proof = _read(record)["ops"].get(name, {}).get(backend)
        counts = proof and proof["outcomes"][gpu.TESTED]
        assert (counts and (counts["passed"], len(counts["faults"]))) == expected, name
    assert gpu.run_contract(tmp_path, [("mlp", "triton")], record, 0) == [("mlp", "triton")]


JOB = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0, (2, 3)), ("float32",), (SMALLEST,),
          overhead=True, device="cpu")  # fmt: skip
# Measures as it does, but does what a job's rivals say after the first direction.
_PLANTED = """
import os, time
from torchweld.bench.measure import runner
measure = runner.measure
def planted(case, plan, clock):
    found = measure(case, runner.Plan(plan.directions, plan.backends, (), 0.0, (2, 3)), clock)
    yield next(found)
    exec("".join(plan.rivals))
    yield from found
runner.measure = planted
"""


def test_a_jobs_process_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it told before counts, its fault is its backend's, and the next job is measured."""
    (tmp_path / "sitecustomize.py").write_text(_PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    planted = ["", "os.abort()", "os.kill(os.getpid(), 9)"]
    all_jobs = [replace(JOB, plan=replace(JOB.plan, rivals=(what,))) for what in planted]
    found: dict[str, list[tuple[str, str]]] = {what: [] for what in planted}
    reasons = list[str]()
    overheads = list[Overhead]()
    for job, results, more, _ in jobs.run_apart(all_jobs):
        found[job.plan.rivals[0]] += [
            (r.direction, r.status) for r in results if r.contender == "cpu"
        ]
        reasons += [r.reason for r in results if r.reason is not None]
        overheads += more
    forward = ("fwd", "timed")
    assert found == {
        "": [forward, ("full", "timed")],
        "os.abort()": [forward, ("", "refused")],
        "os.kill(os.getpid(), 9)": [forward, ("", "absent")],
    }
    assert reasons == [f"its process ended with status {status}" for status in (-6, -9)]
    assert {line.op for line in overheads} == {"layer_norm"}


def test_a_process_that_tells_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is refused after some time, but not at the end of all time. A script stands in."""
    told = json.dumps({"results": [asdict(_result("layer_norm", "cpu"))]})
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{told}'\nexec sleep 999\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "python"))

    def run(**limits: float) -> list[tuple[str, str | None, bool]]:
        every = list(jobs.run_apart([JOB], **limits))  # type: ignore[arg-type]
        return [(r.status, r.reason, ended) for _, results, _, ended in every for r in results]

    told_before = ("timed", None, False)
    assert run(patience=2) == [told_before, ("refused", "it told nothing for 2 s", True)]
    assert run(until=time.monotonic() + 2) == [told_before]
    assert run(until=time.monotonic()) == []
