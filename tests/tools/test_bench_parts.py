"""The benchmark: its clock, its comparisons, what is a kernel's fault, its rivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

import conftest
import torchweld
from torchweld import numerics
from torchweld.bench import cases
from torchweld.bench.cases import CASES, Case
from torchweld.bench.cases.attention import benchmark_window
from torchweld.bench.measure import clock, jobs, losses, runner
from torchweld.bench.measure.attention import _NAMES, block_mask, dense, dense_by
from torchweld.bench.measure.clock import DeviceClock
from torchweld.bench.measure.contenders import PEERS
from torchweld.bench.measure.jobs import Job
from torchweld.bench.measure.runner import Plan, Result
from torchweld.bench.measure.timing import clock_for
from torchweld.bench.models import compiled
from torchweld.bench.models import huggingface as models
from torchweld.bench.show.report import Report
from torchweld.commands import cli
from torchweld.dispatch.call import call
from torchweld.ops.attention.block_sparse import OP
from torchweld.registry import OPS
from torchweld.sparse import BlockLayout

MS = st.floats(0.001, 10.0)
CYCLES_A_MS = 1_500_000


class FakeGpu:
    """Clocks, in milliseconds, of a host and of a GPU that runs the work it queues."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def launch(self, ms: float, host_ms: float = 0.005) -> None:
        """Queue a kernel of `ms` milliseconds, which takes the host `host_ms`."""
        self.host += host_ms
        self.busy_until = max(self.busy_until, self.host) + ms

    def call(self, ms: float, host_ms: float = 0.005) -> Callable[[], None]:
        return lambda: self.launch(ms, host_ms)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace torch's GPU by this one, and the host's clock by its own."""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.busy_until = max(gpu.busy_until, gpu.host)

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / CYCLES_A_MS))
        host = SimpleNamespace(perf_counter=lambda: self.host / 1e3)
        monkeypatch.setattr(clock, "time", host)


@given(device=MS, host=MS)
def test_the_gpus_time_is_its_own(device: float, host: float) -> None:
    """Many launches from a slow host: once the clock knows the host, the GPU never waits."""
    gpu = FakeGpu()

    def call() -> None:
        for _ in range(10):
            gpu.launch(device / 10, host / 10)

    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch)
        timer = DeviceClock()
        for _ in range(2):
            timer(call)
        taken = timer(call)
    assert taken.device == pytest.approx(device)
    assert taken.host == pytest.approx(host)
    assert taken.exposed == 0


def test_a_host_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is, since it compiles."""
    gpu = FakeGpu()
    gpu.patch(monkeypatch)
    timer = DeviceClock()
    taken = timer(gpu.call(1.0, host_ms=500.0))
    assert taken.exposed == pytest.approx(499, abs=1)
    assert timer(gpu.call(1.0)).exposed == 0


@given(st.lists(st.tuples(MS, MS), min_size=2, max_size=4), st.floats(0, 200))
def test_medians_are_of_the_larger(times: list[tuple[float, float]], budget: float) -> None:
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.patch(monkeypatch)
        found = clock.take_medians([gpu.call(*of) for of in times], DeviceClock(), budget)
    assert found == pytest.approx([max(of) for of in times], rel=1e-6)
    # The shortest trial is five turns behind one; the GPU waits 1.5 times as long as the host.
    turn = sum(device + 2.6 * max(1.0, host) for device, host in times) + 1
    assert gpu.host <= 3 * 1.0 + 7 * turn + budget


# --- `torchweld bench compare` ---


def _saved(path: Path, speeds: dict[str, float], *, spread: float = 0.0) -> str:
    """A run in which each contender has this speed-up over eager's 2 ms."""
    results = [
        Result(
            op="layer_norm",
            shape=[8, 16],
            dtype="float32",
            direction="fwd",
            contender=contender,
            elements=128,
            bytes=1024,
            ms=2 / speed,
            p20=(1 - spread) * 2 / speed,
            p80=(1 + spread) * 2 / speed,
            eager_ms=2.0,
            speed_up=speed,
        )
        for contender, speed in {"eager": 1.0, **speeds}.items()
    ]
    Report({"name": "a CPU"}, results).save(path)
    return str(path)


def _compare(tmp_path: Path, after: dict[str, float], *flags: str, spread: float = 0.0) -> int:
    before = _saved(tmp_path / "before.json", {"cpu": 2.0, "triton": 1.0})
    later = _saved(tmp_path / "after.json", after, spread=spread)
    return cli.main(["bench", "compare", before, later, *flags])


def test_a_loss_is_shown_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(tmp_path, {"cpu": 1.5, "triton": 1.5}) == 1
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["2.00x", "1.50x", "-25%", "slower"] in [line[-4:] for line in lines]
    assert ["1.00x", "1.50x", "+50%", "faster"] in [line[-4:] for line in lines]
    assert "2 cases in both, 0 only before, 0 only after; 1 became slower" in printed


@pytest.mark.parametrize(
    ("speed", "spread", "flags", "status"),
    [
        (1.92, 0.0, (), 0),  # within the tolerance
        (1.92, 0.0, ("--tolerance", "0.01"), 1),
        (1.5, 0.3, (), 0),  # the times scatter by more
        (1.5, 0.2, (), 1),
    ],
)
def test_what_counts(
    tmp_path: Path, speed: float, spread: float, flags: tuple[str, ...], status: int
) -> None:
    assert _compare(tmp_path, {"cpu": speed, "triton": 1.0}, *flags, spread=spread) == status


def test_cases_of_one_run_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(tmp_path, {"cpu": 2.0, "cuda": 9.0}, "--all") == 0
    assert "1 cases in both, 1 only before, 1 only after" in capsys.readouterr().out
    assert _compare(tmp_path, {"cuda": 9.0}) == 2
    assert "no case in common" in capsys.readouterr().err


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text('{"machine": 1}')
    for name in ("odd.json", "missing.json"):
        path = str(tmp_path / name)
        assert cli.main(["bench", "compare", path, path]) == 2
        assert "not a file that --json wrote" in capsys.readouterr().err


# --- What the benchmark counts as a kernel's fault ---

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


# --- The benchmarks of losses and of whole models, on small ones ---


def test_losses_take_turns_and_have_a_peak() -> None:
    """All contenders compute the same gradients; eager's peak has the logits."""
    given = losses.make(700, 40, 16, torch.float32)
    ways = losses.contenders(*given)
    grads = [way() for way in ways.values()]
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0], **numerics.SUMMED_SMALL)
    rows = losses.measure(ways, 2)
    assert [name for name, _, _ in rows] == [*ways]
    assert all(seconds > 0 for _, seconds, _ in rows)
    assert rows[0][2] >= 40 * 700 * 4


def test_contenders_of_given_logits_compute_the_same() -> None:
    for ways in losses.of_logits(700, 40, torch.float32):
        expected, found = (way() for way in ways.values())
        flat = [[each.flatten() for each in made] for made in (expected, found)]
        torch.testing.assert_close(*flat, **numerics.SUMMED_SMALL)


def test_the_page_of_models_has_what_was_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    report = torchweld.explain_fusion(model, torch.ones(2, 8))
    timed = [
        {"contender": name, "total": total, "peak_bytes": peak, "speed_up": 100 / total}
        for name, total, peak in (
            ("eager", 100.0, 5e6),
            ("compiled", 80.0, None),
            ("fused", 50.0, 2e6),
        )
    ]
    untimed = [{"contender": "eager", "peak_bytes": 5e6}, {"contender": "fused", "peak_bytes": 2e6}]
    page = models.write_page(
        [models.Row("A", timed, report), models.Row("B", untimed, report)], "5.0"
    )
    assert "| A | 100 | 80 | 50 | 2.00x | 5 | 2 |" in page
    assert "| B |  |  |  |  | 5 | 2 |" in page
    page = models.write_page([models.Row("B", untimed, report)], "5.0")
    assert "| B | 5 | 2 |" in page
    assert "This run took no times." in page
    assert "compiled" not in page.partition("|")[0].replace("compiled code", "")
    eager_and_fused = [timed[0], timed[2]]
    assert "| A | 100 | 50 | 2.00x | 5 | 2 |" in models.write_page(
        [models.Row("A", eager_and_fused, report)], "5.0"
    )
    page = models.write_page([models.Row("A", timed, report)], "5.0")
    assert "**A**: 1 linear_act, 1 layer_norm." in page
    assert "transformers 5.0" in " ".join(page.split())
    assert len(models.MODELS) == 16


def test_a_page_keeps_the_rows_of_models_that_are_not_measured() -> None:
    norm = torch.nn.Sequential(torch.nn.LayerNorm(8))
    report = torchweld.explain_fusion(norm, torch.ones(2, 8))

    def make(name: str, peak: float) -> models.Row:
        steps = [{"contender": way, "peak_bytes": peak} for way in ("eager", "fused")]
        return models.Row(name, steps, report)

    before = models.write_page([make("ViT", 1e6), make("Llama", 2e6)], "5.0")
    page = models.write_page([make("Llama", 3e6), make("OLMoE", 4e6)], "5.0", before)
    rows = [line for line in page.splitlines() if line.endswith(" |")][1:]
    assert rows == ["| Llama | 3 | 3 |", "| ViT | 1 | 1 |", "| OLMoE | 4 | 4 |"]
    assert page.count("1 layer_norm") == 3
    with pytest.raises(ValueError, match="other versions"):
        models.write_page([make("Llama", 3e6)], "5.1", before)


def test_compiled_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(loss=(x * self.weight).sum())

    monkeypatch.setattr(models, "build", lambda *_: (Model(), {"x": torch.ones(1 << 20, 8)}))
    monkeypatch.setattr(compiled, "WAYS", {way: lambda m: m for way in ("compiled", "fused")})
    found = compiled.measure("any", 3)
    assert found["compiled"]["ratio"] == 1
    # The product has 32 MiB; its gradient is expanded, or as large.
    assert all(2**24 <= row["peak_bytes"] <= 2**27 for row in found.values())
    lines = compiled.show({"any": found}).plain().splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["compiled", "fused"]


# --- The benchmark's rivals of block_sparse_attention compute the right result ---


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_has_the_layouts_blocks(causal: bool) -> None:
    """Its lists of blocks of 128, and its token mask, are the layout's, head by head."""
    layout = BlockLayout.random(
        544, 2, block=32, num_heads=2, different_layout_per_head=True, seed=1
    )
    x = torch.randn(1, 2, 544, 16)
    arguments = OP.inputs(x, x, x, layout, causal=causal)
    mask = block_mask(flex_attention, dict(zip(_NAMES, arguments, strict=True)))
    y = flex_attention.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
    seen = layout.to_mask() & (torch.ones(544, 544).tril().bool() if causal else True)
    padded = torch.nn.functional.pad(seen, (0, 96, 0, 96)).view(1, 2, 5, 128, 5, 128)
    assert torch.equal(mask.to_dense().bool(), padded.any(5).any(3))
    # A full block runs without the mask function: all of its pairs that exist are seen.
    there = torch.nn.functional.pad(seen, (0, 96, 0, 96), value=True).view(1, 2, 5, 128, 5, 128)
    full = torch.zeros(1, 2, 5, 6, dtype=torch.bool)
    listed = torch.arange(5) < mask.full_kv_num_blocks[..., None]
    full.scatter_(3, torch.where(listed, mask.full_kv_indices, 5).long(), value=True)
    assert not (full[..., :5] & ~there.all(5).all(3)).any()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
def test_sdpa_by_a_backend(backend: str) -> None:
    """The CPU has these two; one that cannot serve raises an error."""
    x = torch.randn(1, 2, 64, 16)
    arguments = OP.inputs(x, x, x, BlockLayout.dense(64), scale=0.2)
    y, _ = dense_by(backend)(torch.nn.attention)(*arguments)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
    with pytest.raises(RuntimeError):
        dense_by("CUDNN_ATTENTION")(torch.nn.attention)(*arguments)


def test_sdpa_is_dense() -> None:
    x = torch.randn(1, 2, 64, 16)
    arguments = OP.inputs(x, x, x, BlockLayout.dense(64), causal=True, scale=0.2)
    y, _ = dense(torch.nn.functional)(*arguments)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
