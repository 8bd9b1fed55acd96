"""Measures a case: checks every contender's results, then times them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchweld
from torchweld.bench import limits, memory
from torchweld.bench.cases import Case, Problem, name
from torchweld.bench.check import Judge
from torchweld.bench.contenders import COMPILE, Contender, contenders
from torchweld.bench.timing import Clock, Run, Sample, interleaved
from torchweld.dispatch.call import automatic
from torchweld.dispatch.proof import in_a_line
from torchweld.registry import EAGER, cost
from torchweld.registry.backends import parts
from torchweld.registry.cost import Traffic


@dataclass(frozen=True)
class Plan:
    """How a run measures: who takes part, in which directions, and for how long."""

    directions: Sequence[str]
    backends: Sequence[str]
    rivals: Sequence[str]
    seconds: float
    rounds: tuple[int, int] = (11, 201)  # minimum and maximum


@dataclass
class Result:
    """One contender in one case and direction.

    Its status is "timed"; "refused", after a wrong result or an error; or "absent". The last two
    carry a reason and no times.
    """

    op: str
    shape: list[int]
    dtype: str
    direction: str
    contender: str
    elements: int
    bytes: int
    flops: int = 0
    variant: str = ""  # how it differs from other cases of its shape
    status: str = "timed"
    reason: str | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    calls: int = 0  # timed calls
    disturbed: int = 0  # timed calls during which other processes held a core
    reliable: bool = True  # False if disturbed calls had to be counted in
    eager_ms: float | None = None
    speed_up: float | None = None
    gbps: float | None = None
    limit_ms: float | None = None  # the time of a stream with the same reads and writes
    share: float | None = None
    peak_bytes: int | None = None  # beyond the inputs
    automatic: bool = False  # whether it is the automatic choice

    @property
    def label(self) -> str:
        """Shape and variant in words."""
        return " ".join(filter(None, ["x".join(map(str, self.shape)), self.variant]))


def measure(case: Case, plan: Plan, clock: Clock) -> Iterator[list[Result]]:
    """Every contender's results, direction by direction."""
    problem = case.draw()
    taking_part, absent = contenders(case.op, problem.inputs, plan.backends, plan.rivals)
    judge = Judge(problem)
    faults = {c.name: _fault(judge, c) if c.judged else None for c in taking_part}
    del judge
    if case.part() is not case:
        torch.compiler.reset()  # compile for the whole problem, as if it came first
    with torchweld.use_backend(None):
        chosen = automatic(case.op, problem.inputs)
    for direction in plan.directions:
        traffic = cost.traffic(case.op, problem.inputs, direction)
        operations = cost.flops(case.op, problem.inputs, direction)
        sound = [c for c in taking_part if faults[c.name] is None]
        results = _timed(case, problem, direction, traffic, sound, plan, clock)
        for result in results:
            result.automatic = result.contender == _of_direction(chosen, direction)
        for status, reasons in (("refused", faults), ("absent", absent)):
            for contender, reason in reasons.items():
                if reason is not None:
                    result = _result(case, direction, contender, traffic)
                    result.status, result.reason = status, reason
                    results.append(result)
        for result in results:
            result.flops = operations
        yield results


def _of_direction(chosen: str, direction: str) -> str:
    """The contender that the choice takes there; for "full", "cuda/triton" takes neither."""
    both = parts(chosen)
    return {"fwd": both[0], "bwd": both[-1]}.get(direction, chosen)


def _fault(judge: Judge, contender: Contender) -> str | None:
    """Why the contender is not timed: its results are wrong or missing."""
    try:
        with torchweld.use_backend(contender.backend):
            return judge.fault(contender.function)
    except Exception as error:  # a contender's failure must not end the others' run
        return in_a_line(error)


def _timed(
    case: Case,
    problem: Problem,
    direction: str,
    traffic: Traffic,
    sound: Sequence[Contender],
    plan: Plan,
    clock: Clock,
) -> list[Result]:
    """Time all contenders, together with the stream that is their limit."""
    runs: dict[str, Run] = {c.name: partial(_run, problem, direction, c) for c in sound}
    blank = partial(_result, case, direction, traffic=traffic)
    return compare(runs, traffic, case.device, plan, clock, blank)


def compare(
    runs: Mapping[str, Run],
    traffic: Traffic,
    device: str,
    plan: Plan,
    clock: Clock,
    blank: Callable[[str], Result],
) -> list[Result]:
    """Time contenders and the stream. `blank` makes a contender's result without times."""
    timed = list(runs.values())
    stream = limits.stream(traffic, device)
    if stream is not None:
        timed.append(lambda clock: clock(stream))
    at_least, at_most = plan.rounds
    seconds = plan.seconds * len(timed)
    times = interleaved(timed, clock, seconds=seconds, at_least=at_least, at_most=at_most)
    medians = [t.quantile(0.5) for t in times]
    limit = medians[-1] if stream is not None else None
    results = []
    for (contender, run), taken, median in zip(runs.items(), times, medians, strict=False):
        result = blank(contender)
        result.ms, result.p20, result.p80 = median, taken.quantile(0.2), taken.quantile(0.8)
        result.calls, result.disturbed = len(taken.ms), taken.disturbed
        result.reliable = taken.reliable
        if EAGER in runs:
            eager_ms = medians[list(runs).index(EAGER)]
            result.eager_ms, result.speed_up = eager_ms, eager_ms / median
        result.gbps = traffic.total / median / 1e6 or None
        if limit is not None:
            result.limit_ms, result.share = limit, limit / median
        result.peak_bytes = _peak_bytes(run, device, contender)
        results.append(result)
    return results


def _run(problem: Problem, direction: str, contender: Contender, clock: Clock) -> Sample:
    with torchweld.use_backend(contender.backend):
        if direction == "fwd":
            with torch.no_grad():
                return clock(lambda: problem.forward(contender.function))
        if direction == "bwd":
            outputs = problem.forward(contender.function)
            return clock(lambda: problem.backward(outputs))
        return clock(lambda: problem.backward(problem.forward(contender.function)))


def _peak_bytes(run: Run, device: str, contender: str) -> int | None:
    """The peak of allocated memory. What a compiled graph makes on the CPU cannot be counted."""
    if device != "cuda" and contender == COMPILE:
        return None
    peaks: list[int] = []

    def observe(call: Callable[[], Any]) -> Sample:
        peaks.append(memory.peak_bytes(call, device))
        return Sample(0.0)

    try:
        run(observe)
    except RuntimeError:  # code that compiles inside itself cannot be counted either
        if device == "cuda":
            raise
        return None
    return peaks[-1]


def _result(case: Case, direction: str, contender: str, traffic: Traffic) -> Result:
    return Result(
        op=case.op.name,
        shape=list(case.shape),
        dtype=name(case.dtype),
        direction=direction,
        contender=contender,
        elements=torch.Size(case.shape).numel(),
        bytes=traffic.total,
        variant=case.variant,
    )
