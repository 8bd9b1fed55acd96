"""`torchweld bench compare A.json B.json`: list the cases that became slower between two runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchweld.bench.measure.runner import Result
from torchweld.bench.show.report import load
from torchweld.registry import EAGER
from torchweld.table import Table

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class TimeChange:
    """A contender's speed over eager in one case, in both runs.

    Two runs differ in machine or in the load of one machine. Eager is timed with every contender,
    so its time is the unit.
    """

    key: Key
    before: float
    after: float
    noise: float  # half of p80 - p20, in the noisier run

    @property
    def ratio(self) -> float:
        """The new speed over the old one; above 1 is faster."""
        return self.after / self.before

    def slower(self, tolerance: float) -> bool:
        """Whether it lost more than the tolerance and more than the noise."""
        return self.ratio < 1 - max(tolerance, self.noise)


def run(arguments: Sequence[str]) -> int:
    """Run the command. Its exit status is 1 if anything became slower."""
    parser = argparse.ArgumentParser(prog="torchweld bench compare", description=__doc__)
    parser.add_argument(
        "before", type=Path, metavar="A.json", help="written by --json, before the change"
    )
    parser.add_argument(
        "after", type=Path, metavar="B.json", help="written by --json, after the change"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="the loss to ignore; default: 0.05"
    )
    parser.add_argument("--all", action="store_true", help="also show cases that did not change")
    options = parser.parse_args(arguments)
    try:
        before, after = load(options.before), load(options.after)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        print(f"torchweld bench compare: not a file that --json wrote: {error}", file=sys.stderr)
        return 2
    cases = list(changes(before.results, after.results))
    if not cases:
        print("torchweld bench compare: the runs have no case in common", file=sys.stderr)
        return 2
    table = Table(["op", "case", "dtype", "dir", "contender", "before", "after", "change", ""], 5)
    lost = [c for c in cases if c.slower(options.tolerance)]
    for change in sorted(cases, key=lambda c: c.ratio):
        slower = change in lost
        verdict = "slower" if slower else "faster" if _has_gained(change, options.tolerance) else ""
        if verdict or options.all:
            figures = f"{change.before:.2f}x", f"{change.after:.2f}x", f"{change.ratio - 1:+.0%}"
            style = {"slower": "yellow", "faster": "green", "": "dim"}[verdict]
            table.add(*change.key, *figures, verdict, style=style)
    if table.rows:
        table.show()
    only = [f"{len(a - b)} only {when}" for a, b, when in _alone(before.results, after.results)]
    print(f"{len(cases)} cases in both, {', '.join(only)}; {len(lost)} became slower")
    print("before and after: speed over eager, which was timed in the same run")
    return 1 if lost else 0


def changes(before: Iterable[Result], after: Iterable[Result]) -> Iterator[TimeChange]:
    """Every contender except eager that was timed in both runs."""
    earlier = _timed(before)
    for key, result in _timed(after).items():
        if key in earlier:
            was = earlier[key]
            noise = max(_scatter(was), _scatter(result))
            yield TimeChange(key, was.speed_up or 0.0, result.speed_up or 0.0, noise)


def _has_gained(change: TimeChange, tolerance: float) -> bool:
    return change.ratio > 1 + max(tolerance, change.noise)


def _timed(results: Iterable[Result]) -> dict[Key, Result]:
    return {
        (r.op, r.label, r.dtype, r.direction, r.contender): r
        for r in results
        if r.speed_up and r.reliable and r.contender != EAGER
    }


def _scatter(result: Result) -> float:
    if result.ms is None or result.p20 is None or result.p80 is None:
        return 0.0
    return (result.p80 - result.p20) / (2 * result.ms)


def _alone(
    before: Iterable[Result], after: Iterable[Result]
) -> list[tuple[set[Key], set[Key], str]]:
    first, second = set(_timed(before)), set(_timed(after))
    return [(first, second, "before"), (second, first, "after")]
