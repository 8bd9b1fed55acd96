"""Two more plots of a report: every contender under the roofline, and time over the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchweld.bench.plot import COLOURS
from torchweld.bench.refusal import Refusal
from torchweld.bench.report import Report
from torchweld.bench.runner import Result

MARKS = tuple("os^DvPX*<>phd8H1234+x")


def roofline(report: Report, path: Path) -> None:
    """Rates over operations a byte; the roof is the copy bandwidth, then the fastest rate met.

    A point above the slope found a part of its bytes in the cache, or reads more than it writes.
    """
    timed = [r for r in report.results if r.ms and r.flops and r.bytes]

    def draw(axes: Any) -> None:
        points = {id(r): (r.flops / r.bytes, r.flops / (r.ms or 1) / 1e6) for r in timed}
        _scatter(axes, timed, points)
        peak = max(rate for _, rate in points.values())
        bandwidth = report.machine["copy_gbps"]
        left, right = min(x for x, _ in points.values()) / 2, max(x for x, _ in points.values()) * 2
        across = [left, *([peak / bandwidth] if left < peak / bandwidth < right else []), right]
        roof = [min(peak, bandwidth * x) for x in across]
        roof_is = f"copy at {bandwidth:.0f} GB/s,\nthen the fastest rate here"
        axes.plot(across, roof, color="black", linewidth=1, label=roof_is)
        axes.set_xlabel("operations a byte")
        axes.set_ylabel("GFLOP/s")

    _drawn(report, path, draw)


def scaling(report: Report, path: Path) -> None:
    """Draw time over the number of elements, a line per case timed at several sizes."""
    lines: dict[tuple[str, ...], list[Result]] = {}
    for result in report.results:
        if result.ms:
            key = (result.op, result.variant, result.dtype, result.direction, result.contender)
            lines.setdefault(key, []).append(result)
    lines = {key: found for key, found in lines.items() if len({r.elements for r in found}) > 1}
    if not lines:
        raise Refusal("--scaling needs results of several sizes: measure without --quick")
    timed = [result for found in lines.values() for result in found]

    def draw(axes: Any) -> None:
        contenders = _colours(timed)
        ops = _marks(timed)
        for (op, *_, contender), results in lines.items():
            ordered = sorted(results, key=lambda r: r.elements)
            sizes = [r.elements for r in ordered]
            times = [r.ms for r in ordered]
            axes.plot(
                sizes, times, color=contenders[contender], marker=ops[op], markersize=5, linewidth=1
            )
        _legend(axes, contenders, ops)
        axes.set_xlabel("elements")
        axes.set_ylabel("ms")

    _drawn(report, path, draw)


def _drawn(report: Report, path: Path, draw: Callable[[Any], None]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
    draw(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(which="major", color="lightgrey", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside the axes, so that it hides no point.
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    axes.set_title(f"{report.machine['name']}, {report.machine['date']}", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _scatter(axes: Any, results: Sequence[Result], points: dict[int, tuple[float, float]]) -> None:
    contenders, ops = _colours(results), _marks(results)
    for result in results:
        colour, mark = contenders[result.contender], ops[result.op]
        axes.scatter(*points[id(result)], color=colour, marker=mark, s=36)
    _legend(axes, contenders, ops)


def _legend(axes: Any, contenders: dict[str, str], ops: dict[str, str]) -> None:
    """A legend: colours are contenders, marks are ops."""
    for name, colour in contenders.items():
        axes.plot([], [], color=colour, linewidth=4, label=name)
    for name, mark in ops.items():
        axes.plot([], [], color="grey", marker=mark, linestyle="none", label=name)


def _colours(results: Sequence[Result]) -> dict[str, str]:
    names = dict.fromkeys(r.contender for r in results)
    return {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}


def _marks(results: Sequence[Result]) -> dict[str, str]:
    """A mark for each op; marks repeat if there are more ops."""
    names = dict.fromkeys(r.op for r in results)
    return {name: MARKS[at % len(MARKS)] for at, name in enumerate(names)}
