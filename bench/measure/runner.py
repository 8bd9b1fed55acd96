"""Measures a case: checks every contender's results, then times them in turn.

A contender whose results are wrong by the float64 reference is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchweld
from torchweld.bench.cases import Case, Problem, name_dtype
from torchweld.bench.measure import limits, memory
from torchweld.bench.measure.contenders import COMPILE, Contender, contenders
from torchweld.bench.measure.timing import Clock, CudaClock, Run, Sample, interleaved
from torchweld.dispatch.call import choose_automatically
from torchweld.dispatch.proof import Judge, in_a_line, is_out_of_memory
from torchweld.registry import EAGER, cost
from torchweld.registry.cost import Traffic

OUT_OF_MEMORY = "out of memory"


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

    Its status is "timed"; "refused", after a wrong result or an error; or "absent", also for lack
    of memory. The last two carry a reason and no times.
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
    mhz: int | None = None  # the GPU's clock meanwhile
    peak_tflops: float | None = None  # of its tensor cores, for 16 bits, at that clock
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
    check = _Check(problem)
    faults = dict[str, str]()
    for contender in taking_part:
        reason, shortage = _find_fault(check, contender) if contender.judged else (None, None)
        faults |= {contender.name: reason} if reason else {}
        absent |= {contender.name: shortage} if shortage else {}
    is_part = check.is_part
    del check
    if is_part:
        torch.compiler.reset()  # compile for the whole problem, as if it came first
    with torchweld.use_backend(None):
        chosen = choose_automatically(case.op, problem.inputs)
    for direction in plan.directions:
        traffic = cost.traffic(case.op, problem.inputs, direction)
        operations = cost.flops(case.op, problem.inputs, direction)
        sound, refused, left_out = list[Contender](), dict(faults), dict(absent)
        for contender in taking_part:
            if contender.name in faults or contender.name in absent:
                continue
            reason, shortage = _try_out(problem, direction, contender)
            refused |= {contender.name: reason} if reason else {}
            left_out |= {contender.name: shortage} if shortage else {}
            sound += [contender] if reason is None and shortage is None else []
        results = _timed(case, problem, direction, traffic, sound, plan, clock)
        for result in results:
            result.automatic = result.contender == chosen
        for status, reasons in (("refused", refused), ("absent", left_out)):
            for name, reason in reasons.items():
                result = _result(case, direction, name, traffic)
                result.status, result.reason = status, reason
                results.append(result)
        for result in results:
            result.flops = operations
        yield results


class _Check:
    """The exact results of a problem, and the error bounds for contenders.

    A problem of more than MOST_JUDGED elements may not fit a GPU in float64. Of such a problem it
    checks some of the rows, and that no element of the whole is NaN.
    """

    def __init__(self, problem: Problem) -> None:
        self._whole, self._part = problem, problem.part()
        self.is_part = self._part is not problem
        exact = _results(self._part.double(), problem.op.reference)
        self._judge = Judge(exact, _results(self._part, problem.op.reference))

    def find_fault(self, function: Callable[..., Any]) -> str | None:
        """The fault in the function's results, or None."""
        fault = self._judge.find_fault(_results(self._part, function))
        if fault is None and self.is_part:
            results = _results(self._whole, function)
            unsound = [name for name, value in results.items() if _has_nan(value)]
            fault = f"wrong result: NaN in {', '.join(unsound)}" if unsound else None
        return fault


def _results(problem: Problem, function: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The function's results and gradients by name."""
    outputs = problem.forward(function)
    gradients = problem.backward(outputs)
    by_name = dict(zip(problem.op.public, [o.detach() for o in outputs], strict=True))
    named = zip(problem.leaves(), gradients, strict=True)
    return by_name | {f"grad_{name}": gradient for name, gradient in named}


def _has_nan(value: torch.Tensor) -> bool:
    """Check the sum, which needs no temporary of the tensor's size."""
    return bool(value.sum(dtype=torch.float32).isnan())


def _find_fault(check: _Check, contender: Contender) -> tuple[str | None, str | None]:
    """The fault in the contender's results, and whether memory was lacking for them, in words."""
    try:
        with torchweld.use_backend(contender.backend):
            return check.find_fault(contender.function), None
    except Exception as error:  # one contender's failure must not end the run of the others
        return _blame(error)


def _try_out(
    problem: Problem, direction: str, contender: Contender
) -> tuple[str | None, str | None]:
    """Run a contender once on the whole problem; return its fault, and why it is left out.

    The dense baseline of a long attention may not fit, and a peer may have no kernel for a shape.
    """
    try:
        _run(problem, direction, contender, _untimed)
    except Exception as error:
        fault, shortage = _blame(error)
        is_ours = contender.judged or contender.backend is not None
        return (fault, shortage) if is_ours else (None, shortage or fault)
    return None, None


def _blame(error: Exception) -> tuple[str | None, str | None]:
    """The error as a fault, or as a lack of memory, which is nobody's fault."""
    if not is_out_of_memory(error):
        return in_a_line(error), None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None, OUT_OF_MEMORY


def _untimed(call: Callable[[], Any]) -> Sample:
    call()
    return Sample(0.0)


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
    if not runs:
        return []
    timed = list(runs.values())
    stream = limits.stream(traffic, device)
    if stream is not None:
        timed.append(lambda clock: clock(stream))
    at_least, at_most = plan.rounds
    seconds = plan.seconds * len(timed)
    begun = time.monotonic()
    times = interleaved(timed, clock, seconds=seconds, at_least=at_least, at_most=at_most)
    mhz = clock.rate.find_mhz(begun) if isinstance(clock, CudaClock) else None
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
        result.mhz, result.peak_tflops = mhz, mhz and limits.tensor_tflops(mhz)
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
        dtype=name_dtype(case.dtype),
        direction=direction,
        contender=contender,
        elements=torch.Size(case.shape).numel(),
        bytes=traffic.total,
        variant=case.variant,
    )
