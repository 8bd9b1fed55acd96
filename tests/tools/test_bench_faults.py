"""What the benchmark counts as a kernel's fault: no lack of memory, and rows of long attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import conftest
from torchweld.bench import cases, jobs, runner
from torchweld.bench.cases import CASES, Case
from torchweld.bench.cases.attention import benchmark_window
from torchweld.bench.contenders import PEERS
from torchweld.bench.jobs import Job
from torchweld.bench.runner import Plan, Result
from torchweld.bench.timing import clock_for
from torchweld.dispatch.call import call
from torchweld.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
LAYER_NORM = OPS["layer_norm"]
SMALL = Case(LAYER_NORM, CASES[LAYER_NORM.name].tiny, torch.float32, "cpu")
ON_CPU = Job("layer_norm", Plan(("fwd", "full"), ("cpu",), (), 0.0, (1, 1)), device="cpu")


def _short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 GiB")


def _measure(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    monkeypatch.setattr(Job, "cases", lambda job: [SMALL])
    return [r for what, found in jobs.measure_here(ON_CPU) for r in found if what == "results"]


@pytest.mark.parametrize("where", ["inputs", "exact results", "kernel", "timed"])
def test_a_lack_of_memory_is_no_fault(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes up: the kernel has neither passed nor failed."""
    assert {r.status for r in _measure(monkeypatch)} == {"timed"}
    if where == "inputs":
        monkeypatch.setattr(Case, "draw", _short)
    elif where == "exact results":
        monkeypatch.setattr(runner.Judge, "__init__", _short)
    elif where == "kernel":
        monkeypatch.setitem(vars(LAYER_NORM), "kernels", {"cpu": _short})
    elif where == "timed":
        monkeypatch.setattr(runner, "_try_out", lambda *_: (None, runner.OUT_OF_MEMORY))
    ours = [r for r in _measure(monkeypatch) if r.contender == "cpu"]
    assert {r.status for r in ours} == {"absent"}
    assert all("memory" in str(r.reason) for r in ours)


def test_a_baseline_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is judged and timed nonetheless, and has no speed relative to eager."""

    def tried(problem: Any, direction: str, contender: Any) -> tuple[None, str | None]:
        return None, runner.OUT_OF_MEMORY if contender.name == "eager" else None

    monkeypatch.setattr(runner, "_try_out", tried)
    ours = [r for r in _measure(monkeypatch) if r.contender == "cpu"]
    assert [(r.direction, r.status, r.eager_ms) for r in ours] == [
        ("fwd", "timed", None),
        ("full", "timed", None),
    ]


def test_a_rival_without_a_kernel_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN serves no CPU, as it does not serve every GPU and shape."""
    op = OPS["block_sparse_attention"]
    rival = replace(PEERS["sdpa_cudnn"], devices=("cpu",))
    monkeypatch.setitem(PEERS, "sdpa_cudnn", rival)
    case = Case(op, CASES[op.name].tiny, torch.float32, "cpu")
    plan = Plan(("fwd",), ("cpu",), ("sdpa", "sdpa_cudnn"), 0.0, (1, 1))
    (results,) = runner.measure(case, plan, clock_for("cpu"))
    status = {r.contender: r.status for r in results}
    assert status == {"eager": "timed", "cpu": "timed", "sdpa": "timed", "sdpa_cudnn": "absent"}


def test_long_attention_is_judged_on_its_first_and_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scores decide, not the elements of q, and a wrong kernel is found there."""
    op = OPS["block_sparse_attention"]
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


def test_a_test_without_time_left_fails(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A skip would make a green run of what did not run."""
    monkeypatch.setattr(conftest, "LAST_MOMENT", 0.0)
    with pytest.raises(pytest.fail.Exception, match="no time was left"):
        conftest.pytest_runtest_setup(request.node)
