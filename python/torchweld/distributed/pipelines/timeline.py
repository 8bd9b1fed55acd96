"""A record of when each rank of a pipeline works, is idle, or has overhead.

with record(pipe.schedule) as timeline:
    pipe.schedule.step(...)
timeline.show()
timeline.draw("pipeline.png")
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchweld.table import Table

# The label and colour of each kind of action in a picture.
_SHOWN = {
    "forward": ("forward", "#4c78a8"),
    "full": ("backward", "#f58518"),
    "input": ("backward, input", "#e8b44c"),
    "weight": ("backward, weights", "#54a24b"),
}
_IDLE, _OVERHEAD = "#eeeeee", "#c44e52"


class Action(NamedTuple):
    """One forward or backward call of a stage's module.

    `kind` is "forward", "full" for a whole backward pass, or "input" or "weight" for a half of one.
    Times are seconds of the host's clock.
    """

    rank: int
    stage: int
    microbatch: int
    kind: str
    begin: float
    end: float


class RankTime(NamedTuple):
    """Seconds of a step that a rank works, waits for another rank's result, or has overhead.

    Overhead is the time when a stage could run and does not, because of transfers, the schedule's
    own work, or other processes on the same cores.
    """

    busy: float
    idle: float
    overhead: float


@dataclass
class Timeline:
    """The actions of one step on all ranks, from the first begin to the last end.

    Attributes:
        actions: the actions of all ranks, sorted by begin; empty until `record` ends.
    """

    actions: list[Action] = field(default_factory=list)

    @property
    def span(self) -> tuple[float, float]:
        """The begin and the end of the step."""
        return min(a.begin for a in self.actions), max(a.end for a in self.actions)

    def sum_times(self) -> dict[int, RankTime]:
        """Sum each rank's busy time, idle time and overhead; the three add up to the step."""
        begin, end = self.span
        times = {}
        for rank, actions in self._group_by_rank().items():
            gaps = self._find_gaps(actions)
            idle = sum(could - last for last, could, _ in gaps) + end - actions[-1].end
            overhead = sum(start - could for _, could, start in gaps)
            times[rank] = RankTime(end - begin - idle - overhead, idle, overhead)
        return times

    def _find_gaps(self, actions: list[Action]) -> list[tuple[float, float, float]]:
        """Return for each action the previous one's end, and its earliest and its actual begin."""
        ready, last, gaps = self._ready_times, self.span[0], []
        for action in actions:
            gaps.append((last, min(max(last, ready[action]), action.begin), action.begin))
            last = action.end
        return gaps

    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        return self._sum_shares("idle")

    def overhead(self) -> float:
        """The share of all ranks' time that is overhead."""
        return self._sum_shares("overhead")

    def _sum_shares(self, kind: str) -> float:
        begin, end = self.span
        spent = self.sum_times()
        return sum(getattr(s, kind) for s in spent.values()) / (len(spent) * (end - begin))

    def _group_by_rank(self) -> dict[int, list[Action]]:
        by_rank = defaultdict(list)
        for action in sorted(self.actions, key=lambda a: a.begin):
            by_rank[action.rank].append(action)
        return dict(sorted(by_rank.items()))

    @functools.cached_property
    def _ready_times(self) -> dict[Action, float]:
        """The time when each action's input from another stage is ready."""
        forwards = {(a.stage, a.microbatch): a.end for a in self.actions if a.kind == "forward"}
        backwards = {
            (a.stage, a.microbatch): a.end for a in self.actions if a.kind in ("full", "input")
        }
        ready = {}
        for action in self.actions:
            stage, microbatch = action.stage, action.microbatch
            if action.kind == "forward":
                ready[action] = forwards.get((stage - 1, microbatch), 0.0)
            else:
                ready[action] = backwards.get((stage + 1, microbatch), 0.0)
        return ready

    def show(self) -> None:
        """Print each rank's times, and the bubble next to the formula for 1F1B."""
        begin, end = self.span
        table = Table(("rank", "busy ms", "idle ms", "overhead ms", "idle", "overhead"), 1)
        for rank, spent in self.sum_times().items():
            shares = [f"{part / (end - begin):.1%}" for part in (spent.idle, spent.overhead)]
            table.add(str(rank), *(f"{1e3 * part:.2f}" for part in spent), *shares)
        table.show()
        ranks = len(self._group_by_rank())
        microbatches = 1 + max(a.microbatch for a in self.actions)
        each = 1e3 * self.overhead() * ranks * (end - begin) / len(self.actions)
        print(
            f"a step of {1e3 * (end - begin):.2f} ms; idle {self.bubble():.1%},"
            f" by (p-1)/(m+p-1) {estimate_bubble(ranks, microbatches):.1%}; overhead"
            f" {self.overhead():.1%}, {each:.3f} ms before each action"
        )

    def draw(self, path: str | Path) -> None:
        """Draw the step, with a row for each rank; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        begin, end = self.span
        rows = self._group_by_rank()
        figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.6 * len(rows)), layout="constrained")

        def bar(row: int, start: float, stop: float, colour: str, **how: Any) -> None:
            axes.barh(row, 1e3 * (stop - start), 0.8, 1e3 * (start - begin), color=colour, **how)

        for row, actions in enumerate(rows.values()):
            bar(row, begin, end, _IDLE)
            for _, could, start in self._find_gaps(actions):
                bar(row, could, start, _OVERHEAD)
            for action in actions:
                pale = 0.5 if action.stage >= len(rows) else 1.0  # a rank's later stages
                bar(row, action.begin, action.end, "white")
                colour = _SHOWN[action.kind][1]
                bar(row, action.begin, action.end, colour, alpha=pale, edgecolor="white", lw=0.5)
                if action.end - action.begin > 8e-3 * (end - begin):
                    x = 1e3 * ((action.begin + action.end) / 2 - begin)
                    axes.text(x, row, str(action.microbatch), ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * (end - begin))
        axes.set_xlabel("ms; the numbers are microbatches; a rank's later stages are paler")
        axes.set_title(f"idle {self.bubble():.1%}, overhead {self.overhead():.1%}", fontsize=10)
        kinds = {a.kind for a in self.actions}
        shown = [names for kind, names in _SHOWN.items() if kind in kinds]
        shown += [("idle", _IDLE), ("overhead", _OVERHEAD)]
        patches = [Patch(color=colour, label=name) for name, colour in shown]
        figure.legend(handles=patches, loc="outside right upper", fontsize=8, frameon=False)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def estimate_bubble(ranks: int, microbatches: int) -> float:
    """Return the idle share of GPipe and 1F1B if all stages cost the same: (p-1)/(m+p-1)."""
    return (ranks - 1) / (microbatches + ranks - 1)


@contextmanager
def record(schedule: Any, group: dist.ProcessGroup | None = None) -> Iterator[Timeline]:
    """Record one step of a torch schedule, on every rank of its group.

    The first step of a schedule allocates its buffers: record a later one. On a GPU each action
    waits for its kernels, so that its time includes them; this prevents overlap.

    Yields:
        A Timeline that gets the actions of all ranks when the context ends.
    """
    timeline, mine = Timeline(), list[Action]()
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        _watch(stage, dist.get_rank(group), mine.append)
    try:
        yield timeline
    finally:
        for stage in stages:
            for name in _WATCHED:
                delattr(stage, name)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    timeline.actions += sorted((a for actions in gathered for a in actions), key=lambda a: a.begin)


_CHUNKS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
# The methods of torch that run only the module or its backward pass.
_MODULE = ("forward_maybe_with_nosync", "backward_maybe_with_nosync")
_WATCHED = (*_CHUNKS, *_MODULE)


def _watch(stage: Any, rank: int, note: Callable[[Action], None]) -> None:
    """Replace methods of the stage; deleting them restores the methods of its class."""
    microbatch = 0

    def note_microbatch(method: Callable[..., Any], at: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal microbatch
        microbatch = at
        return method(at, *args, **kwargs)

    def time_action(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kind = "forward" if method.__name__ == _MODULE[0] else args[0]
        _wait(stage.device)
        begin = time.time()
        result = method(*args, **kwargs)
        _wait(stage.device)
        note(Action(rank, stage.stage_index, microbatch, kind, begin, time.time()))
        return result

    for names, wrapper in ((_CHUNKS, note_microbatch), (_MODULE, time_action)):
        for name in names:
            setattr(stage, name, functools.partial(wrapper, getattr(stage, name)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
