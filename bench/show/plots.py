"""Plots of a report: speed over eager, rates under the roofline, and time against size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchweld.bench.measure.machine import Refusal
from torchweld.bench.measure.runner import Result
from torchweld.bench.show.report import Report
from torchweld.files import replace_file
from torchweld.registry import BACKENDS, EAGER

COLOURS = ("#2f6db5", "#e08a2c", "#4d9e64", "#a55ca5", "#7f7f7f")
MARKS = tuple("os^DvPX*<>phd8H1234+x")
WIDTH = 19  # inches of panels side by side
NARROWEST = 8  # inches that the title and the legend need
Group = tuple[str, str]  # shape and variant, and direction


def draw_speeds(report: Report, path: Path) -> None:
    """Draw one panel per op and dtype, with a group of bars per shape and direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [r for r in report.results if r.speed_up is not None]
    if not timed:
        raise Refusal("--plot needs results of a kernel: none was timed")
    ops = list(dict.fromkeys(r.op for r in timed))
    dtypes = list(dict.fromkeys(r.dtype for r in timed))
    names = list(dict.fromkeys(r.contender for r in timed if r.contender != EAGER))
    every = {(op, dtype): _groups(timed, op, dtype) for op in ops for dtype in dtypes}
    groups = {name: group for name, group in every.items() if group}
    width = max(4.5, max(map(_width, groups.values())) + 1.2)
    # Keep an op's dtypes side by side, if all ops have them all.
    each = len(dtypes) if len(groups) == len(every) else 1
    across = min(len(groups) // each, max(1, int(WIDTH / (width * each))))
    columns = across * each
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(max(width * columns, NARROWEST), 3.1 * rows + 1.2),
        squeeze=False,
        layout="constrained",
    )
    for panel, ((op, dtype), group) in zip(axes.flat, groups.items(), strict=False):
        _panel(panel, group, names)
        panel.set_title(f"{op}, {dtype}", fontsize=11, loc="left", fontweight="bold")
    for panel in axes.flat[len(groups) :]:
        panel.set_axis_off()
    for panel in axes[:, 0]:
        panel.set_ylabel("speed over eager")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    made_of = report.machine["versions"]
    figure.suptitle(
        f"torchweld {made_of['torchweld']} against eager torch {made_of['torch']}\n"
        f"{report.machine['name']}, {report.machine['date']}; pale: left to eager by default",
        fontsize=12,
    )
    replace_file(path, partial(figure.savefig, dpi=130))
    pyplot.close(figure)


def _groups(results: Sequence[Result], op: str, dtype: str) -> dict[Group, dict[str, Result]]:
    groups: dict[Group, dict[str, Result]] = {}
    for result in results:
        if (result.op, result.dtype) == (op, dtype):
            group = groups.setdefault((result.label, result.direction), {})
            group[result.contender] = result
    return groups


def _width(groups: dict[Group, dict[str, Result]]) -> float:
    """The width in inches of the bars and the shapes' names below them."""
    labels = [label for label, _ in groups]
    longest = {label: max(map(len, _lines(label).split("\n"))) for label in labels}
    return sum(max(0.62, 0.085 * longest[label] / labels.count(label)) for label in labels)


def _panel(panel: Any, groups: dict[Group, dict[str, Result]], names: Sequence[str]) -> None:
    width = 0.8 / max(len(names), 1)
    for at, name in enumerate(names):
        colour = COLOURS[at % len(COLOURS)]
        panel.bar(0, 0, color=colour, label=name)  # for the legend
        for place, group in enumerate(groups.values()):
            if name in group:
                middle = place + (at - (len(names) - 1) / 2) * width
                _bar(panel, group[name], middle, width * 0.92, colour, crowded=len(names) > 2)
    panel.axhline(1, color="black", linewidth=1, label="eager")
    stream = "a plain stream of as many bytes"
    panel.plot([], [], color="crimson", linestyle="dashed", linewidth=1.2, label=stream)
    tallest = panel.get_ylim()[1]
    for at, limit in enumerate(map(_limit, groups.values())):
        if limit is not None:
            _mark(panel, at, limit, 2 * tallest)
    panel.set_xticks(range(len(groups)), [direction for _, direction in groups], fontsize=9)
    _name_shapes(panel, [shape for shape, _ in groups])
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_ylim(0, panel.get_ylim()[1] * 1.08)
    panel.spines[["top", "right"]].set_visible(False)


def _mark(panel: Any, at: int, limit: float, top: float) -> None:
    """Mark a limit. A limit far above every bar becomes a number, so that the bars stay tall."""
    if limit > top:
        panel.annotate(
            f"stream {limit:.0f}",
            (at, 0.97),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=7,
            color="crimson",
        )
    else:
        panel.hlines(limit, at - 0.45, at + 0.45, "crimson", "dashed", linewidth=1.2)


def _bar(
    panel: Any, result: Result, middle: float, width: float, colour: str, *, crowded: bool
) -> None:
    """A bar, pale if the automatic choice leaves the case to eager."""
    height = result.speed_up or 0.0
    pale = result.contender in BACKENDS and not result.automatic
    panel.bar(middle, height, width, color=colour, alpha=0.3 if pale else 1.0)
    doubt = "" if result.reliable else "~"
    panel.annotate(
        doubt + (f"{height:.2f}" if height < 10 else f"{height:.0f}"),
        (middle, height),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=6 if crowded else 8,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        zorder=5,
    )


def _limit(group: dict[str, Result]) -> float | None:
    """The speed over eager of the stream that moves as many bytes."""
    result = next(iter(group.values()))
    if result.limit_ms is None or result.eager_ms is None:
        return None
    return result.eager_ms / result.limit_ms


def _lines(label: str) -> str:
    """A shape on one line, and its variant on further lines."""
    return label.replace(", ", "\n").replace(" ", "\n", 1)


def _name_shapes(panel: Any, labels: Sequence[str]) -> None:
    """Write each shape's name once, below its directions."""
    for label in dict.fromkeys(labels):
        places = [at for at, other in enumerate(labels) if other == label]
        panel.annotate(
            _lines(label),
            (sum(places) / len(places), 0),
            xytext=(0, -22),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
        )
        if places[-1] < len(labels) - 1:
            panel.axvline(places[-1] + 0.5, color="lightgrey", linewidth=0.8, zorder=0)


# --- Rates and times over sizes -----------------------------------------------------------------


def draw_roofline(report: Report, path: Path) -> None:
    """Rates against operations per byte, with a roof: copy bandwidth, then the fastest rate.

    A point above the slope found part of its bytes in the cache, or reads more than it writes.
    """
    timed = [r for r in report.results if r.ms and r.flops and r.bytes]
    if not timed:
        raise Refusal("--roofline needs results with a time: there are none")

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

    _save(report, path, draw)


def draw_scaling(report: Report, path: Path) -> None:
    """Draw time over the number of elements, a line per case timed at several sizes."""
    lines: dict[tuple[str, ...], list[Result]] = {}
    for result in report.results:
        if result.ms:
            key = (result.op, result.variant, result.dtype, result.direction, result.contender)
            lines.setdefault(key, []).append(result)
    lines = {key: line for key, line in lines.items() if len({r.elements for r in line}) > 1}
    if not lines:
        raise Refusal("--scaling needs results of several sizes: measure without --quick")
    timed = [result for line in lines.values() for result in line]

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

    _save(report, path, draw)


def _save(report: Report, path: Path, draw: Callable[[Any], None]) -> None:
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
    replace_file(path, partial(figure.savefig, dpi=130))
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
