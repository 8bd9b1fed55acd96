"""plan_for: the declaration for `parallelize` that fits and has the fastest predicted step."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchweld import checks
from torchweld.distributed.pipelines.timeline import Timeline
from torchweld.distributed.planner.costs import (
    PROFILES,
    STATES,
    Choice,
    Cost,
    Links,
    Model,
    Profile,
    cut_stages,
    simulate,
)
from torchweld.distributed.planner.work import Work, check_positive, measure_work
from torchweld.distributed.train.feasibility import check_matrices, check_microbatches
from torchweld.distributed.train.parallel import Parallel
from torchweld.errors import ArgumentError
from torchweld.table import Table

_SPACE: dict[str, tuple[Any, ...]] = {
    "mode": ("1d", "2d", "3d"),
    "sequence": (False, True),
    "schedule": ("1f1b", "gpipe", "zbv"),
    "data": ("ddp", "zero1", "zero2", "zero3"),
    "checkpoint": ("none", "selective", "full"),
    "optimizer": ("adamw",),
    "offload": ("none", "optimizer"),
}


@dataclass(frozen=True)
class Plan:
    """The planner's choice, and its predicted cost.

    Attributes:
        config: the declaration for `parallelize`.
        rows: sequences in a microbatch.
        microbatches: microbatches in a step, over all replicas.
        seconds: predicted seconds per step.
        memory: bytes on the fullest device, by kind.
        cuts: the units of each stage. Unit 0 is everything before the first layer.
        evaluations: how many choices the searcher asked the cost model about.
        source: where the rates of the devices come from.
    """

    config: dict[str, Any]
    rows: int
    microbatches: int
    seconds: float
    memory: dict[str, float]
    cuts: tuple[range, ...]
    evaluations: int
    source: str
    cost: Cost
    choice: Choice

    def show(self) -> None:
        """Print the declaration, the step and a table of the memory."""
        print(f"{self.config}; {self.microbatches} microbatches of {self.rows} sequences")
        print(f"{self.seconds:.4g} s a step, by rates {self.source}")
        table = Table(("of the fullest device", "GiB"), 1)
        for name, size in (*self.memory.items(), ("total", sum(self.memory.values()))):
            table.add(name, f"{size / 2**30:.2f}", group=name == "total")
        table.show()

    def simulate(self) -> Timeline:
        """Simulate a step of one replica; draw the result with `draw`."""
        each = self.microbatches // self.choice.replicas
        return simulate(self.cost, each, self.choice.schedule)


Ask = Callable[[Choice], float]
Searcher = Callable[["SearchSpace"], tuple[Choice, int]]


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
        self.axes: dict[str, tuple[Any, ...]] = sizes | _SPACE | axes
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


# --- Searchers ------------------------------------------------------------------------------------


def enumerate_all(problem: SearchSpace) -> Choice:
    """Find the fastest choice, by asking about each choice whose bound is below the best so far."""
    best, fastest = None, math.inf
    for bound, choice in sorted((problem.bound(c), c) for c in problem.list_choices()):
        if bound >= fastest:
            break
        if (seconds := problem.find_seconds(choice)) < fastest:
            best, fastest = choice, seconds
    return _check_found(best)


def walk(problem: SearchSpace, steps: int = 3000, seed: int = 0, heat: float = 0.05) -> Choice:
    """Find a fast choice by a Markov chain that changes one or two fields at a time (MCMC)."""
    generator = random.Random(seed)
    names = [*problem.axes]
    here = {name: values[0] for name, values in problem.axes.items()}
    seconds, best, fastest = math.inf, None, math.inf
    for _ in range(steps):
        there = dict(here)
        for name in generator.sample(names, generator.choice((1, 1, 2, 3))):
            there[name] = generator.choice(problem.axes[name])
        choice = problem.make(**there)
        new = problem.find_seconds(choice)
        # A choice that does not fit is left by any move.
        ratio = new / seconds if math.isfinite(seconds) else 1.0
        if ratio <= 1 or generator.random() < ratio ** (-1 / heat):
            here, seconds = there, new
        if new < fastest:
            best, fastest = choice, new
    return _check_found(best)


def reinforce(problem: SearchSpace, steps: int = 3000, seed: int = 0, rate: float = 0.3) -> Choice:
    """Find a fast choice by REINFORCE: a distribution for each field learns from samples."""
    generator = random.Random(seed)
    scores = {name: [0.0] * len(values) for name, values in problem.axes.items()}
    best, fastest, baseline = None, math.inf, None
    for _ in range(steps):
        drawn, shares = {}, {}
        for name, values in problem.axes.items():
            weights = [math.exp(score) for score in scores[name]]
            shares[name] = [weight / sum(weights) for weight in weights]
            drawn[name] = generator.choices(range(len(values)), weights)[0]
        choice = problem.make(**{name: problem.axes[name][at] for name, at in drawn.items()})
        seconds = problem.find_seconds(choice)
        if seconds < fastest:
            best, fastest = choice, seconds
        if not math.isfinite(fastest):
            continue
        reward = -math.log(seconds) if math.isfinite(seconds) else -math.log(fastest) - 2
        baseline = reward if baseline is None else 0.9 * baseline + 0.1 * reward
        for name, at in drawn.items():
            for k, share in enumerate(shares[name]):
                scores[name][k] += rate * (reward - baseline) * ((k == at) - share)
    return _check_found(best)


def _check_found(choice: Choice | None) -> Choice:
    if choice is None:
        accepted = "more devices or memory, checkpoint 'full', offload, or an 8-bit optimizer"
        raise ArgumentError("plan_for", "devices", "too few: no choice fits", accepted)
    return choice


SEARCHERS: dict[str, Callable[..., Choice]] = {
    "enumerate": enumerate_all,
    "mcmc": walk,
    "reinforce": reinforce,
}


# --- Plans ----------------------------------------------------------------------------------------


def plan_for(
    model: torch.nn.Module | Work,
    batch: int,
    devices: int,
    profile: Profile | str,
    *,
    memory: float | None = None,
    links: Links | None = None,
    example: tuple[torch.Tensor, ...] = (),
    autocast: torch.dtype | None = None,
    searcher: str = "enumerate",
    **axes: Any,
) -> Plan:
    """Choose how to train a model on other devices.

    Args:
        model: a whole model, which may be on the meta device; or a Work.
        batch: sequences of a step.
        devices: the number of devices.
        profile: rates and memory of a device: "h200", "h100", "a100" or "4090", with the vendor's
            figures, or a Profile.
        memory: bytes of a device that may be used; None: all of the profile's memory.
        links: the links between devices; None: eight devices in a node.
        example: the model's arguments for one sequence.
        autocast: the dtype of autocast; None: without.
        searcher: "enumerate" finds the best by the cost model, with cuts by dynamic programming;
            "mcmc" and "reinforce" sample.
        axes: the values that a field of a Choice may have, such as optimizer=("adamw8bit",). By
            default `mode` includes the grids for a Work, and is "1d" for a model.

    Returns:
        A Plan. Its figures are predictions from rates; see its `source`.
    """
    checks.count("plan_for", "batch", batch, 1)
    checks.count("plan_for", "devices", devices, 1)
    if memory is not None:
        check_positive("plan_for", memory=memory)
    if isinstance(profile, str):
        if profile not in PROFILES:
            accepted = f"a Profile, or one of {', '.join(PROFILES)}"
            raise ArgumentError("plan_for", "profile", repr(profile), accepted)
        profile = PROFILES[profile]
    if not isinstance(profile, Profile):
        accepted = f"a Profile, or one of {', '.join(PROFILES)}"
        raise ArgumentError("plan_for", "profile", repr(profile), accepted)
    if searcher not in SEARCHERS:
        accepted = f"one of {', '.join(SEARCHERS)}"
        raise ArgumentError("plan_for", "searcher", repr(searcher), accepted)
    for name, values in axes.items():
        if name not in Choice._fields or name == "replicas":
            accepted = f"one of {', '.join(n for n in Choice._fields if n != 'replicas')}"
            raise ArgumentError("plan_for", "axes", f"with {name}", accepted)
        _check_axis(name, values)
    work = model
    if not isinstance(work, Work):
        assert isinstance(model, torch.nn.Module)
        axes = {"mode": ("1d",)} | axes
        work = measure_work(model, example, partial(_fits, model, {}), autocast)
    costs = Model(
        work,
        profile if memory is None else replace(profile, memory=memory),
        links or Links(),
        batch,
    )
    problem = SearchSpace(costs, devices, axes)
    choice = SEARCHERS[searcher](problem)
    cost = problem.find_cost(choice)
    assert cost is not None
    return Plan(
        config=make_config(choice),
        rows=choice.rows,
        microbatches=batch // choice.rows,
        seconds=cost.seconds,
        memory=cost.memory,
        cuts=cost.cuts,
        evaluations=problem.evaluations,
        source=profile.source,
        cost=cost,
        choice=choice,
    )


def _check_axis(name: str, values: Any) -> None:
    """Check the values that a field of a choice may have."""
    if not isinstance(values, (tuple, list)) or not values:
        raise ArgumentError("plan_for", name, repr(values), "a tuple of values")
    known = STATES if name == "optimizer" else _SPACE.get(name)
    for value in values:
        if known is None:  # a size
            checks.count("plan_for", name, value, 1)
        elif not isinstance(value, (str, bool)) or value not in known:
            accepted = f"some of {', '.join(map(str, known))}"
            raise ArgumentError("plan_for", name, repr(value), accepted)


def _fits(model: torch.nn.Module, known: dict[int, bool], count: int) -> bool:
    """Whether `parallelize` would accept this many devices for each matrix."""
    if count not in known:
        try:
            check_matrices(model, count) if count > 1 else None
            known[count] = True
        except ArgumentError:
            known[count] = False
    return known[count]


def load_profile(path: str | Path) -> Profile:
    """Read a Profile from a JSON file with its fields."""
    accepted = f"a JSON object with {', '.join(field.name for field in fields(Profile))}"
    try:
        values = json.loads(Path(path).read_text())
        if not isinstance(values, dict):
            raise TypeError(f"the file's value is a {type(values).__name__}")
        return Profile(**values)
    except ArgumentError:  # of a field, which it names
        raise
    except (ValueError, TypeError) as error:
        raise ArgumentError("load_profile", "path", f"{path}: {error}", accepted) from None
