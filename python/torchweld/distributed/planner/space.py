"""SearchSpace: the choices among which a search finds the fastest, and their cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from torchweld.distributed.planner.costs import Choice, Cost, Model, cut_stages
from torchweld.distributed.train.feasibility import check_microbatches
from torchweld.distributed.train.parallel import Parallel
from torchweld.errors import ArgumentError

SPACE: dict[str, tuple[Any, ...]] = {
    "mode": ("1d", "2d", "3d"),
    "sequence": (False, True),
    "schedule": ("1f1b", "gpipe", "zbv"),
    "data": ("ddp", "zero1", "zero2", "zero3"),
    "checkpoint": ("none", "selective", "full"),
    "optimizer": ("adamw",),
    "offload": ("none", "optimizer"),
}


class SearchSpace:
    """The choices of a model on a number of devices, and their cost.

    Attributes:
        axes: the values of each field of a Choice; "replicas" follows from the others.
        evaluations: how many costs were computed.
    """

    def __init__(self, model: Model, devices: int, axes: dict[str, tuple[Any, ...]]) -> None:
        self.model, self.devices, self.evaluations = model, devices, 0
        tensors = [n for n in _divisors(devices) if model.work.fits(n)]
        pipelines = [n for n in _divisors(devices) if n <= max(len(model.work.units) - 2, 1)]
        rows = [n for n in _divisors(model.batch) if n & (n - 1) == 0 and n <= 64]
        sizes = {"tensor": tuple(tensors), "pipeline": tuple(pipelines), "rows": tuple(rows)}
        self.axes: dict[str, tuple[Any, ...]] = sizes | SPACE | axes
        self._known: dict[Choice, Cost | None] = {}

    def make(self, **values: Any) -> Choice | None:
        """Make a choice; None if `Parallel` refuses it or the batch does not fit."""
        inner = values["tensor"] * values["pipeline"]
        if self.devices % inner:
            return None
        c = Choice(replicas=self.devices // inner, **values)
        side = {"1d": 1, "2d": c.tensor ** (1 / 2), "3d": c.tensor ** (2 / 3)}[c.mode]
        if c.rows % max(round(side), 1):  # a grid divides the sequences of a microbatch
            return None
        if self.model.batch % c.rows or _repeats_another(c):
            return None
        stages = c.pipeline * (2 if c.schedule == "zbv" and c.pipeline > 1 else 1)
        if stages > max(len(self.model.work.units) - 2, 1):
            return None
        try:
            parallel = Parallel.from_config(make_config(c), self.devices)
            check_microbatches(parallel, self.model.batch // c.rows)
        except ArgumentError:
            return None
        return c

    def list_choices(self) -> Iterator[Choice]:
        """List all choices that `Parallel` accepts."""
        for values in itertools.product(*self.axes.values()):
            choice = self.make(**dict(zip(self.axes, values, strict=True)))
            if choice is not None:
                yield choice

    def find_cost(self, choice: Choice) -> Cost | None:
        """Return the cost with the best cuts; None: it does not fit."""
        if choice not in self._known:
            self.evaluations += 1
            cuts = cut_stages(self.model, choice)
            self._known[choice] = None if cuts is None else self.model.estimate(choice, cuts)
        return self._known[choice]

    def find_seconds(self, choice: Choice | None) -> float:
        """Return the seconds per step; infinity if the choice is None or does not fit."""
        cost = None if choice is None else self.find_cost(choice)
        return math.inf if cost is None else cost.seconds

    def bound(self, choice: Choice) -> float:
        """Return a lower bound of the seconds per step over all cuts of a choice."""
        times = [sum(self.model.time_unit(unit, choice)) for unit in self.model.work.units]
        slowest = max(max(times), sum(times) / choice.pipeline)
        return self.model.count_microbatches(choice) * slowest


def _repeats_another(c: Choice) -> bool:
    """Whether a field has no effect here, so that another choice is the same."""
    return (
        (c.tensor == 1 and (c.mode != "1d" or c.sequence))
        or (c.pipeline == 1 and c.schedule != "1f1b")
        or (c.pipeline > 1 and c.data == "zero3")
        or (c.replicas == 1 and c.data != "ddp")
        or (c.data == "zero1" and c.offload != "none")
    )


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def make_config(c: Choice) -> dict[str, Any]:
    """Return a choice as `parallelize` reads it."""
    config: dict[str, Any] = {"data": c.data, "optimizer": c.optimizer}
    if c.tensor > 1:
        config["tensor"] = {"mode": c.mode, "size": c.tensor, "sequence": c.sequence}
    if c.pipeline > 1:
        config["pipeline"] = {"size": c.pipeline, "schedule": c.schedule}
    config |= {"checkpoint": c.checkpoint} if c.checkpoint != "none" else {}
    return config | ({"offload": c.offload} if c.offload != "none" else {})
