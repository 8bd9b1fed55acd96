"""The overhead of a call, measured on tensors so small that the work itself takes no time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchweld
from torchweld.bench.cases import CASES, Case, Problem
from torchweld.bench.measure.timing import Clock, Run, Sample, interleaved, wall_time
from torchweld.dispatch.call import call
from torchweld.registry import Composite, Op

DIRECTIONS = ("no gradients", "with gradients", "and backward")
CALLS = 50  # timed together, as one sample


@dataclass(frozen=True)
class Overhead:
    """Microseconds per call: plain torch, the automatic choice, and each backend."""

    op: str
    shape: list[int]
    dtype: str
    direction: str
    torch_us: float
    automatic_us: float
    backend_us: dict[str, float]


def overhead(op: Op, device: str, backends: Sequence[str], seconds: float) -> list[Overhead]:
    """Measure on the host's clock, with warm caches, on one thread."""
    problem = Case(op, CASES[op.name].tiny, torch.float32, device).draw()
    ours = _as_users_call(op)
    calls: list[tuple[Callable[..., Any], str | None]] = [
        (getattr(torch.nn.functional, op.name, CASES[op.name].plain or op.reference), None),
        (ours, None),
    ]
    asked = [b for b in op.sources if b in backends and op.why_not(b, problem.inputs) is None]
    calls += [(ours, backend) for backend in asked]
    overheads = []
    with _one_thread():
        for direction in DIRECTIONS:
            runs: list[Run] = [partial(_block, problem, direction, *how) for how in calls]
            times = interleaved(runs, wall_time, seconds=seconds, at_least=11, at_most=201)
            theirs, automatic, *named = [t.quantile(0.5) * 1e3 / CALLS for t in times]
            by_name = dict(zip(asked, named, strict=True))
            shape = list(problem.inputs[0].shape)
            overheads.append(
                Overhead(op.name, shape, "float32", direction, theirs, automatic, by_name)
            )
    return overheads


def _as_users_call(op: Op) -> Callable[..., Any]:
    """The public function on the forward's arguments. It draws a seed at every call."""
    if op.inputs is None and not isinstance(op, Composite):
        return _by_name(getattr(torchweld.functional, op.name), op.forward_signature.arguments)

    def function(*inputs: Any) -> Any:
        arguments = list(inputs)
        if op.seed_at is not None and op.draws(inputs):
            arguments[op.seed_at] = torchweld.random.seed(inputs[0].device)
        return call(op, *arguments)

    return function


def _by_name(public: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function, with arguments by name from the first that it takes only so."""
    kinds = [p.kind for p in inspect.signature(public).parameters.values()]
    positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if positional >= len(names):
        return public
    named = names[positional:]

    def function(*inputs: Any) -> Any:
        return public(*inputs[:positional], **dict(zip(named, inputs[positional:], strict=True)))

    return function


def _block(
    problem: Problem,
    direction: str,
    function: Callable[..., Any],
    backend: str | None,
    clock: Clock,
) -> Sample:
    inputs, tensors = problem.inputs, list(problem.leaves().values())

    def block() -> None:
        for _ in range(CALLS):
            results = function(*inputs)
            if direction == "and backward":
                torch.autograd.grad(results, tensors, problem.grads)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    with torchweld.use_backend(backend), torch.set_grad_enabled(direction != "no gradients"):
        return clock(block)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the time to wake a second one varies by more than a call takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
