"""`torchweld tune`: a minute on the user's own GPU, which the automatic choice then goes by.

Every kernel's results are checked against the reference in float64, at a few shapes, and the
forward without gradients and both directions together are timed beside eager. What is found is kept
in the user's cache, as evidence of this GPU, torch and torchweld, and counts for more than what the
package brings along.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from torchweld.bench import limits, recording, sources, steps
from torchweld.bench.cases import DTYPES, MIDDLE, SMALLEST, Case, cases
from torchweld.bench.command import Refusal, add_ops
from torchweld.bench.machine import machine
from torchweld.bench.report import show_machine
from torchweld.bench.runner import Plan, Result
from torchweld.bench.timing import Clock, clock_for
from torchweld.dispatch import evidence
from torchweld.registry import OPS
from torchweld.table import Table, progress

# Tensors of a step, and their shape: few enough for any GPU.
STEPS = (4, 1024, 1024)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `torchweld tune`."""
    add_ops(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; its exit status is 1 where a kernel's result was wrong."""
    try:
        results = _tune(options.ops or list(recording.PROVEN))
    except Refusal as refusal:
        print(f"torchweld tune: {refusal}", file=sys.stderr)
        return 2
    show(results)
    return 1 if any(result.status == "refused" for result in results) else 0


def _tune(ops: list[str]) -> list[Result]:
    if not torch.cuda.is_available():
        raise Refusal("torch sees no GPU here, and on the CPU nothing is left to choose")
    clock = clock_for("cuda")
    facts = machine("cuda") | {"copy_gbps": limits.copy_gbps(clock, "cuda")}
    show_machine(facts)
    record = own_record(facts)
    backends = {name: recording.gpu_backends(recording.PROVEN[name]) for name in ops}
    for name, served in backends.items():
        for backend in served:
            record.begin(recording.PROVEN[name], backend)
    of_ops = [OPS[name] for name in ops if name in OPS]
    wanted = [
        *cases(of_ops, "cuda", DTYPES["cuda"], (SMALLEST, MIDDLE)),
        *[steps.few(kind, "cuda", STEPS) for kind in steps.KINDS if kind.rule in ops],
    ]
    every = sorted({backend for served in backends.values() for backend in served})
    found = []
    for at in progress(wanted):
        found += check_and_time(wanted[at], every, record, clock)
    print(f"kept in {record.path}")
    return found


def own_record(facts: dict[str, Any]) -> recording.Record:
    """What is kept of this GPU, to be gone on with; not what another torch or torchweld found."""
    path = evidence.own_path(facts["name"])
    if evidence.own(facts["name"]) is None:
        path.unlink(missing_ok=True)
    return recording.Record(path, facts, sources.root())


def check_and_time(
    case: Case | steps.StepCase, backends: list[str], record: recording.Record, clock: Clock
) -> list[Result]:
    """A case's results, which the record keeps."""
    plan = Plan(["fwd", "full"], backends, [], seconds=0.1)
    found = [result for results in steps.measure_either(case, plan, clock) for result in results]
    record.add_results(found)
    # A fault is found once, and told of every direction.
    outcomes = {r.contender: r for r in found if r.contender in backends and r.status != "absent"}
    for result in outcomes.values():
        record.add_outcome(result.op, result.contender, result.status == "timed")
    return found


def show(results: list[Result]) -> None:
    """What was found, a line for each kernel, shape and dtype."""
    table = Table(["op", "shape", "dtype", "backend", "ms", "eager ms", "vs eager"], 4)
    for result in results:
        if result.contender == "eager":
            continue
        cells = [result.op, result.label, result.dtype, result.contender]
        if result.ms is None or result.eager_ms is None:
            table.add(*cells, result.status, "", result.reason or "")
        else:
            speed_up = f"{result.eager_ms / result.ms:.2f}x"
            table.add(*cells, f"{result.ms:.3f}", f"{result.eager_ms:.3f}", speed_up)
    table.show()
