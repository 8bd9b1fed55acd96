"""The results of a run as a table for the terminal, as JSON, and as Markdown for the README."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torchweld.bench.measure import overhead
from torchweld.bench.measure.overhead import Overhead
from torchweld.bench.measure.runner import Result
from torchweld.files import write_json
from torchweld.registry import EAGER, OPS
from torchweld.table import Table


@dataclass
class Report:
    """All results of a run, and where it ran."""

    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    sources: dict[str, str] = field(
        default_factory=dict
    )  # hashes of the CPU kernels' sources, by op

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))


def load(path: Path) -> Report:
    """Read a file that `save` wrote."""
    saved = json.loads(path.read_text())
    return Report(
        saved["machine"],
        [Result(**result) for result in saved["results"]],
        [Overhead(**line) for line in saved["overheads"]],
        saved.get("sources", {}),
    )


# --- The terminal -----------------------------------------------------------------------------


def show_machine(where: dict[str, Any]) -> None:
    """Print the versions, the machine and the conditions."""
    made_of = where["versions"]
    device = where["name"]
    if where["device"] == "cpu":
        device += f", {where['threads']} thread(s), {where['isa'] or 'no torchweld kernels'}"
    cuda = f" (CUDA {made_of['cuda']})" if made_of["cuda"] else ""
    print(f"torchweld {made_of['torchweld']}, torch {made_of['torch']}{cuda}, on {device}")
    if where["device"] == "cpu":
        print(f"for every contender: {where['conditions']}, caches cold")
    print(f"large copy: {where['copy_gbps']:.1f} GB/s")


def show(report: Report) -> None:
    """Print the table of results, the overheads, and remarks about them."""
    headers = [
        "op",
        "shape",
        "dtype",
        "dir",
        "contender",
        "ms",
        "p20-p80",
        "x eager",
        "GB/s",
        "of stream",
        "peak MB",
    ]
    table = Table(headers, numbers_from=5)
    previous: tuple[str, ...] = ()
    for result in report.results:
        if result.status == "absent":
            continue
        keys = (result.op, result.label, result.dtype, result.direction)
        group = keys[:3] != previous[:3]
        names = ("",) * 4 if keys == previous else keys if group else ("", "", "", result.direction)
        cells = [*names, result.contender + (" *" if result.automatic else ""), *_figures(result)]
        cells.append("" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}")
        table.add(*cells, style=_style(result), group=group)
        previous = keys
    if table.rows:
        table.show()
        print("\n".join(_remarks(report.results)))
    if report.overheads:
        print()
        _overhead_table(report.overheads).show()


def _figures(result: Result) -> list[str]:
    """ms, p20-p80, x eager, GB/s, % of a plain stream's speed."""
    if result.ms is None or result.p20 is None or result.p80 is None:
        return ["refused", "", "", "", ""]
    doubt = "" if result.reliable else "~"
    return [
        doubt + _ms(result.ms),
        f"{_ms(result.p20)}-{_ms(result.p80)}",
        "" if result.speed_up is None else f"{doubt}{result.speed_up:.2f}",
        *_bandwidth(result, 1),
    ]


def _bandwidth(result: Result, digits: int) -> list[str]:
    """GB/s and the share of a plain stream's; of GEMMs, which memory does not limit, TFLOP/s and
    the share of the tensor cores' peak at the clock of the run, if that was sampled.
    """
    if result.op in OPS and OPS[result.op].weights_at:
        if not (result.peak_tflops and result.ms and result.flops):
            return ["", ""]
        tflops = result.flops / result.ms / 1e9
        at = f"{tflops / result.peak_tflops:.0%} of the peak at {result.mhz} MHz"
        return [f"{tflops:.0f} TFLOP/s", at]
    return [
        "" if result.gbps is None else f"{result.gbps:.{digits}f}",
        "" if result.share is None else f"{result.share:.0%}",
    ]


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _style(result: Result) -> str:
    if result.status == "refused":
        return "bold red"
    if result.contender == EAGER or not result.reliable:
        return "dim"
    return "green" if (result.speed_up or 0) >= 1 else "yellow"


def _remarks(results: Sequence[Result]) -> list[str]:
    """Explain how to read the table, and list the absent contenders."""
    lines = ["* the automatic choice"]
    if any(result.share for result in results):
        lines.append(
            "of stream: the share of a plain stream's speed, with the same reads and writes"
        )
    disturbed, calls = sum(r.disturbed for r in results), sum(r.calls for r in results)
    if disturbed:
        lines.append(f"{disturbed} of {calls} calls met other processes on their cores")
    if any(not result.reliable for result in results):
        lines.append(
            "~ too many to leave out, so they count: measure again on a quiet machine, or with"
            " OMP_NUM_THREADS=1"
        )
    where: dict[tuple[str, str, str | None], list[str]] = defaultdict(list)
    for result in results:
        if result.status != "timed":
            case = f"{result.op} {result.label} {result.dtype}"
            where[result.status, result.contender, result.reason].append(case)
    for (status, contender, reason), cases in where.items():
        place = f" ({', '.join(dict.fromkeys(cases))})" if status == "refused" else ""
        lines.append(f"{status}: {contender}{place}: {reason}")
    return lines


def _overhead_table(overheads: Iterable[Overhead]) -> Table:
    """Microseconds, and multiples of torch.nn.functional's time."""
    overheads = list(overheads)
    backends = list(dict.fromkeys(name for line in overheads for name in line.backend_us))
    forced = [f"{name} by name" for name in backends]
    table = Table(["us a call", "", "torch", "automatic", *forced], numbers_from=2)
    for line in overheads:
        named = [line.backend_us.get(name) for name in backends]
        ratios = [
            "" if us is None else f"{us:.1f} ({us / line.torch_us:.2f}x)"
            for us in (line.automatic_us, *named)
        ]
        first = line.direction == overhead.DIRECTIONS[0]
        shape = "x".join(map(str, line.shape))
        name = f"{line.op} {shape}" if first else ""
        table.add(name, line.direction, f"{line.torch_us:.1f}", *ratios, group=first)
    return table


def table_csv(results: Iterable[Result]) -> str:
    """One line per result, with every measurement."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [entry.name for entry in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    return text.getvalue()


# --- Markdown ---------------------------------------------------------------------------------


def compare(results: Iterable[Result]) -> Iterator[tuple[Result, float, float]]:
    """The automatic choice's results, each with its time and that of torch's fastest way.

    Leaves out cases measured on a busy machine, which flatters the faster contender.
    """
    results = list(results)
    dense = {_case(r): r.ms for r in results if r.contender == "sdpa" and r.ms}
    for result in results:
        if result.automatic and result.reliable and result.ms and result.eager_ms:
            torchs = min(result.eager_ms, dense.get(_case(result), result.eager_ms))
            yield result, result.ms, torchs


def markdown(results: Iterable[Result]) -> str:
    """A table for the docs: the automatic choice against torch's fastest way."""
    lines = [
        "| op | shape | dtype | direction | torch | torchweld | on | speed-up | GB/s | of stream |",
        "|---|---|---|---|--:|--:|---|--:|--:|--:|",
    ]
    for result, ours, torchs in compare(results):
        cells = [
            f"`{result.op}`",
            result.label.replace("x", " x ", len(result.shape) - 1),
            result.dtype,
            result.direction,
            f"{_ms(torchs)} ms",
            f"{_ms(ours)} ms",
            result.contender,
            f"{torchs / ours:.2f}x",
            *_bandwidth(result, 0),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _case(result: Result) -> tuple[Any, ...]:
    return result.op, tuple(result.shape), result.variant, result.dtype, result.direction
