"""The benchmark: what it counts, how it times, what it rejects, what it writes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld.bench import cases as bench_cases
from torchweld.bench import command
from torchweld.bench.cases import MIDDLE, Case, cases
from torchweld.bench.measure import jobs, limits, machine, runner
from torchweld.bench.measure.contenders import Contender
from torchweld.bench.measure.overhead import overhead
from torchweld.bench.measure.runner import Plan, Result
from torchweld.bench.measure.timing import Sample, interleaved, wall_time
from torchweld.bench.show import plots, report
from torchweld.bench.show.report import Report
from torchweld.commands import cli
from torchweld.registry import OPS, Op, activation, parameter
from torchweld.registry.cost import DIRECTIONS, Traffic, traffic
from torchweld.table import Table

LAYER_NORM = OPS["layer_norm"]
SMALL = (activation(8, 16), [16], parameter(16), parameter(16), 1e-5)
CASE = Case(LAYER_NORM, SMALL, torch.float32, "cpu")
PLAN = Plan(DIRECTIONS, ["cpu"], [], seconds=0.0, rounds=(2, 3))


# --- What is counted --------------------------------------------------------------------------


def test_traffic_follows_from_the_schemas() -> None:
    x, row, statistic = 8 * 16 * 4, 16 * 4, 8 * 4
    problem = CASE.draw()
    forward = Traffic(x + 2 * row, x + 2 * statistic)
    backward = Traffic(2 * x + 2 * row + 2 * statistic, x + 2 * row)
    assert traffic(problem.op, problem.inputs, "fwd") == forward
    assert traffic(problem.op, problem.inputs, "bwd") == backward
    assert traffic(problem.op, problem.inputs, "full").total == forward.total + backward.total


@pytest.mark.parametrize(
    ("reads", "writes"), [(1, 1), (2, 1), (3, 2), (7, 2), (1, 3), (5, 0), (0, 4)]
)
def test_stream_has_the_mix_of_reads_and_writes(reads: int, writes: int) -> None:
    added, copied, summed, filled = limits.mix(reads, writes)
    assert min(added, copied, summed, filled) >= 0
    assert 2 * added + copied + summed == reads
    assert added + copied + filled == writes
    assert not (summed and filled)


def test_stream_runs_and_is_left_out_where_it_would_measure_calls() -> None:
    stream = limits.stream(Traffic(3 * 2**20, 2**20), "cpu")
    stream()
    assert limits.stream(Traffic(1000, 1000), "cpu") is None
    in_place = limits.stream(Traffic(3 * 2**20, 2**20, in_place=True), "cpu")
    changed, summed = in_place()
    assert (changed.numel(), float(changed[0]), float(summed)) == (2**18, 2, 2 * 2**18)


def test_quick_has_the_shape_of_the_acceptance() -> None:
    for op in OPS.values():
        (case,) = cases([op], "cpu", [torch.float32], [MIDDLE])
        assert case.shape in {
            *((8192, 1024), (2048, 3072), (2048, 768), (512, 2048)),
            *((4, 8, 512, 512), (1, 8, 4096, 64), (4, 16, 1024, 128), (4, 256, 1152)),
        }


# --- How it times -----------------------------------------------------------------------------


def _scripted(samples: list[Sample]) -> Callable[[Any], Sample]:
    """A run whose warm-up and rounds take scripted times."""
    left = iter([Sample(99), *samples])
    return lambda clock: next(left)


def test_disturbed_calls_are_left_out() -> None:
    quiet, disturbed = Sample(1.0), Sample(9.0, waited=8.0)
    runs = [_scripted([quiet, disturbed] * 5), _scripted([Sample(2.0)] * 10)]
    first, second = interleaved(runs, wall_time, seconds=60, at_least=5, at_most=10)
    assert (first.ms, first.disturbed, first.reliable) == ([1.0] * 5, 5, True)
    assert (second.ms, second.disturbed, second.reliable) == ([2.0] * 10, 0, True)


def test_disturbed_calls_count_for_all_where_one_has_no_others() -> None:
    """A disturbed contender must not be compared with an undisturbed one."""
    mixed = [Sample(1.0)] * 9 + [Sample(9.0, waited=8.0)]
    runs = [_scripted([Sample(9.0, waited=8.0)] * 10), _scripted(mixed)]
    first, second = interleaved(runs, wall_time, seconds=60, at_least=5, at_most=10)
    assert not first.reliable
    assert not second.reliable
    assert len(first.ms) == len(second.ms) == 10


def test_nobody_always_follows_the_same_contender() -> None:
    order: list[int] = []

    def run(at: int) -> Callable[[Any], Sample]:
        return lambda clock: order.append(at) or Sample(1.0)  # type: ignore[func-returns-value]

    interleaved([run(0), run(1), run(2)], wall_time, seconds=60, at_least=3, at_most=3)
    assert order == [0, 1, 2, 0, 1, 2, 1, 2, 0, 2, 0, 1]  # the first three warm up


def test_a_case_is_measured_in_every_direction() -> None:
    found = [result for results in runner.measure(CASE, PLAN, wall_time) for result in results]
    assert {(r.contender, r.direction) for r in found} == {
        (contender, direction) for contender in ("eager", "cpu") for direction in DIRECTIONS
    }
    for result in found:
        assert result.status == "timed", result.reason
        assert result.ms
        assert result.ms > 0
        assert result.automatic == (result.contender == "eager")  # the tensor is this small


def test_overhead_of_a_call() -> None:
    lines = overhead(LAYER_NORM, "cpu", ["cpu"], seconds=0.0)
    assert [line.shape for line in lines] == [[1, 64]] * 3
    for line in lines:
        assert min(line.torch_us, line.automatic_us, line.backend_us["cpu"]) > 0


# --- What it refuses --------------------------------------------------------------------------


EXACTLY: Any = LAYER_NORM.reference
ONE = torch.zeros(8, 16).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1e-3))


def _last_row_unwritten(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """A row outside of the part that is judged in float64."""
    y = EXACTLY(x, *given)
    return y.index_fill(0, torch.tensor(7), torch.nan) if len(x) == 8 else y


def _broken(x: torch.Tensor, *given: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image\nand more")


WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "off by a percent": (lambda *given: EXACTLY(*given) * 1.01, ("wrong result: y",)),
    "one element": (lambda x, *given: EXACTLY(x, *given) + ONE[: len(x)], ("wrong result: y",)),
    "unwritten": (_last_row_unwritten, ("wrong result: y", "wrong result: NaN in y")),
    "gradient": (
        lambda x, *given: EXACTLY(x, *given) + (x - x.detach()),
        ("wrong result: grad_input",),
    ),
    "shape": (lambda *given: EXACTLY(*given)[None], ("RuntimeError",)),
    "broken": (_broken, ("RuntimeError: no kernel image",)),
}


@pytest.mark.parametrize("most", [bench_cases.MOST_JUDGED, 80], ids=["whole", "part"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_not_timed(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong rows of a part are found, and so are unwritten elements of the whole."""
    function, reasons = WRONG[name]
    planted = [Contender("eager", EXACTLY), Contender("planted", function)]
    monkeypatch.setattr(bench_cases, "MOST_JUDGED", most)
    monkeypatch.setattr(runner, "contenders", lambda *_: (planted, {}))
    assert CASE.part().shape == ((4, 16) if most == 80 else (8, 16))
    for results in runner.measure(CASE, PLAN, wall_time):
        eager, wrong = results
        assert (eager.contender, eager.status) == ("eager", "timed")
        assert (wrong.contender, wrong.status) == ("planted", "refused")
        assert wrong.ms is None
        assert wrong.speed_up is None
        assert str(wrong.reason).startswith(reasons)


@pytest.mark.targets(composites=True)
def test_a_large_case_is_judged_by_a_part(op: Op) -> None:
    """A part is small enough for float64, and its arguments fit each other."""
    for case in cases([op], "cuda", [torch.bfloat16]):
        part = case.part()
        assert torch.Size(part.shape).numel() <= bench_cases.MOST_JUDGED
        assert part.shape[-1] == case.shape[-1]
        for now, was in zip(part.arguments, case.arguments, strict=True):
            if now == was:
                continue
            if op.name == "rotary_embedding" and now.shape[1:] == was.shape[1:] != case.shape[1:]:
                # Keys keep their heads; each serves several query heads.
                assert now.shape[0] == part.shape[0]
                assert part.shape[1] % now.shape[1] == 0
                continue
            assert torch.broadcast_shapes(now.shape, part.shape) == part.shape
            assert torch.broadcast_shapes(was.shape, case.shape) == case.shape


# --- The command ------------------------------------------------------------------------------


def _undisturbed(call: Callable[[], Any]) -> Sample:
    """Otherwise other load on the machine would decide which rows a table omits."""
    return wall_time(call)._replace(waited=0.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchweld bench` in this process, on one tiny case."""
    monkeypatch.setattr(machine, "settle", lambda **_: None)
    monkeypatch.setattr(jobs, "list_op_cases", lambda *_, **__: [CASE])
    monkeypatch.setattr(command, "clock_for", lambda device: _undisturbed)
    monkeypatch.setattr(limits, "copy_gbps", lambda clock, device: 10.0)
    monkeypatch.setattr(command, "overhead", lambda op, *_: overhead(op, "cpu", ["cpu"], 0.0))


@pytest.mark.usefixtures("quick")
def test_bench_prints_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, table = tmp_path / "new" / "results.json", tmp_path / "table.md"
    arguments = ["bench", "layer_norm", "--quick", "--device", "cpu"]
    arguments += ["--json", str(saved), "--markdown", str(table)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("torch " + torch.__version__, "8x16", "full", "eager *", "us a call", str(saved)):
        assert words in printed
    content = json.loads(saved.read_text())
    assert {"date", "name", "threads", "isa", "conditions", "copy_gbps"} <= set(content["machine"])
    assert content["machine"]["versions"]["torchweld"] == torchweld.__version__
    assert len(content["results"]) == 4
    assert table.read_text().count("\n| `layer_norm` | 8 x 16 | float32 |") == 2

    assert report.load(saved).results[0].shape == [8, 16]
    assert cli.main(["bench", "--from", str(saved)]) == 0
    assert capsys.readouterr().out.strip() in printed


_A_CPU = {
    **{"name": "a CPU", "date": "today", "device": "cpu", "threads": 2, "isa": "avx2"},
    **{"conditions": "", "copy_gbps": 10.0},
    "versions": {"torch": "2", "cuda": None, "torchweld": "0"},
}


def _write_half(figure: Any, path: Path, **settings: Any) -> None:
    """An interrupt while a picture is written."""
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def test_the_csv_and_the_plots_have_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each result; lines over sizes only if there are several.

    An interrupt leaves the picture of before.
    """
    from matplotlib.figure import Figure

    small, large = _result("cpu", 1.0), _result("cpu", 2.0)
    small.flops = large.flops = 100
    saved, lines = tmp_path / "r.json", tmp_path / "r.csv"
    Report(_A_CPU, [small, large]).save(saved)
    given = ["bench", "--from", str(saved), "--csv", str(lines)]
    assert cli.main([*given, "--roofline", str(tmp_path / "roof.png")]) == 0
    rows = list(csv.DictReader(lines.read_text().splitlines()))
    assert [float(row["ms"]) for row in rows] == [small.ms, large.ms]
    assert (tmp_path / "roof.png").stat().st_size > 10_000
    scaling = ["--scaling", str(tmp_path / "scaling.png")]
    assert cli.main([*given, *scaling]) == 2
    assert "several sizes" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _write_half)
        with pytest.raises(KeyboardInterrupt):
            cli.main([*given, "--roofline", str(tmp_path / "roof.png")])
    assert (tmp_path / "roof.png").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "r.csv", "roof.png"}
    large.elements *= 4
    Report(_A_CPU, [small, large]).save(saved)
    assert cli.main([*given, *scaling]) == 0
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_the_readme_has_no_doubtful_figures() -> None:
    sound, doubtful = _result("cpu", 1.0), _result("cpu", 0.01)
    sound.automatic = doubtful.automatic = True
    doubtful.reliable = False
    assert report.markdown([sound, doubtful]).count("`layer_norm`") == 1
    # Attention is compared with torch's own, which is faster than the reference.
    assert "| 0.50x |" in report.markdown([sound, _result("sdpa", 0.5)])


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_shows_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = [
        Contender("eager", LAYER_NORM.reference),
        Contender("cpu", WRONG["off by a percent"][0]),
    ]
    monkeypatch.setattr(runner, "contenders", lambda *_: (planted, {"liger": "not installed"}))
    assert cli.main(["bench", "layer_norm", "--device", "cpu", "--direction", "fwd"]) == 1
    printed = capsys.readouterr().out
    assert "refused: cpu (layer_norm 8x16 float32): wrong result: y is off by" in printed
    assert "absent: liger: not installed" in printed


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    results = [
        _result(contender=contender, ms=ms, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for contender, ms in (("eager", 2.0), ("cuda", 1.0))
    ]
    path = tmp_path / "new" / "speed.png"
    versions = {"torchweld": "1", "torch": "2"}
    plots.draw_speeds(Report({"name": "a GPU", "date": "", "versions": versions}, results), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--record"],
        ["--device", "cuda"],
        ["--from", "nowhere.json"],
        ["--from", "not-ours.json"],
        ["--from", "no-json.txt"],
        ["--from", "."],
        ["layer_norm", "--plot", "speed.txt"],
        ["layer_norm", "--roofline", "speed"],
        ["layer_norm", "--json", "a-file/b.json"],
        ["layer_norm", "--csv", "."],
        ["layer_norm", "--backend", "cuda"],
        ["bias_act", "--backend", "triton"],
        ["layer_norm", "--vs", "apex"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_refused_in_a_line(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Before anything is measured; the line names the option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-ours.json").write_text('{"machine": 3}')
    (tmp_path / "no-json.txt").write_text("words")
    (tmp_path / "a-file").write_text("")
    assert cli.main(["bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("torchweld bench: " + next(a for a in arguments if a[:2] == "--"))
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("picture", ["--plot", "--roofline", "--scaling"])
def test_no_results_have_no_picture(
    picture: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As an interrupt before the first result leaves them; tables are written nonetheless."""
    source, table, drawn = (tmp_path / name for name in ("r.json", "r.csv", "r.png"))
    Report(_A_CPU, []).save(source)
    given = ["--from", str(source), "--csv", str(table), picture, str(drawn)]
    assert cli.main(["bench", *given]) == 2
    assert capsys.readouterr().err.startswith(f"torchweld bench: {picture} needs results")
    assert table.exists()
    assert not drawn.exists()


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", "speed.png"]) == 2
    assert "pip install torchweld[bench]" in capsys.readouterr().err


def test_the_process_starts_again_under_fair_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(
        os, "execve", lambda path, arguments, environment: started.append(environment)
    )
    monkeypatch.setenv("TORCHWELD_POISON", "1")
    machine.settle(default_allocator=False)
    (environment,) = started
    assert "TORCHWELD_POISON" not in environment
    assert {**machine.RESIDENT, **machine.BOUND}.items() <= environment.items()

    monkeypatch.setattr(os, "environ", environment)
    machine.settle(default_allocator=False)
    assert len(started) == 1


def test_plain_table() -> None:
    table = Table(["op", "ms"], numbers_from=1)
    table.add("a", "1.0", group=True)
    table.add("bcd", "10.0", group=True)
    assert table.plain() == "op     ms\n---  ----\na     1.0\n\nbcd  10.0"


def _result(contender: str, ms: float, dtype: str = "bfloat16", direction: str = "full") -> Result:
    result = Result("layer_norm", [8192, 1024], dtype, direction, contender, 2**23, 2**26)
    result.ms, result.eager_ms, result.speed_up, result.limit_ms = ms, 2.0, 2.0 / ms, 0.9
    return result
