"""plan_for: the declaration for `parallelize` that fits and has the fastest predicted step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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
    simulate,
)
from torchweld.distributed.planner.space import SPACE, SearchSpace, make_config
from torchweld.distributed.planner.work import Work, check_positive, measure_work
from torchweld.distributed.train.feasibility import check_matrices
from torchweld.errors import ArgumentError
from torchweld.table import Table

SEARCHERS = ("enumerate", "mcmc", "reinforce")


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


def enumerate_all(problem: SearchSpace) -> Choice | None:
    """Find the fastest choice, by asking about each choice whose bound is below the best so far."""
    best, fastest = None, math.inf
    for bound, choice in sorted((problem.bound(c), c) for c in problem.list_choices()):
        if bound >= fastest:
            break
        if (seconds := problem.find_seconds(choice)) < fastest:
            best, fastest = choice, seconds
    return best


def find_choice(problem: SearchSpace, searcher: str = "enumerate") -> Choice:
    """Find the fastest choice that fits, or raise an error if none does."""
    find: Callable[[SearchSpace], Choice | None] = enumerate_all
    if searcher != "enumerate":
        # An annex: only its searchers load it.
        from torchweld.distributed.planner.searchers import sampling

        find = sampling.walk if searcher == "mcmc" else sampling.reinforce
    choice = find(problem)
    if choice is None:
        accepted = "more devices or memory, checkpoint 'full', offload, or an 8-bit optimizer"
        raise ArgumentError("plan_for", "devices", "too few: no choice fits", accepted)
    return choice


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
    choice = find_choice(problem, searcher)
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
    known = STATES if name == "optimizer" else SPACE.get(name)
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
