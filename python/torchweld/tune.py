"""`torchweld tune`: a minute on the user's own GPU that decides the automatic choice.

Every kernel's results are checked against the reference in float64, at a few shapes. The forward
without gradients and both directions together are timed beside eager. The user's cache keeps the
findings as evidence for this GPU, torch and torchweld. They override the package's evidence.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torchweld.bench import isolated, limits, recording, sources
from torchweld.bench.cases import DTYPES, MIDDLE, SMALLEST, name
from torchweld.bench.command import add_ops
from torchweld.bench.isolated import Job
from torchweld.bench.machine import machine
from torchweld.bench.refusal import Refusal
from torchweld.bench.report import show_machine
from torchweld.bench.runner import Plan, Result
from torchweld.bench.stages import keep
from torchweld.bench.timing import clock_for
from torchweld.dispatch import evidence
from torchweld.table import Table, progress

# Number and shape of a step's tensors: small enough for any GPU.
STEPS = (4, 1024, 1024)
SIZES = (SMALLEST, MIDDLE)
DTYPE_NAMES = [name(dtype) for dtype in DTYPES["cuda"]]
SECONDS_A_JOB = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `torchweld tune`."""
    add_ops(parser, list(recording.PROVEN))


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 if a kernel's result was wrong."""
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
    facts = machine("cuda") | {"copy_gbps": limits.copy_gbps(clock_for("cuda"), "cuda")}
    show_machine(facts)
    record = own_record(facts)
    jobs = [
        Job(name, Plan(["fwd", "full"], [backend], [], seconds=0.1), DTYPE_NAMES, SIZES, STEPS)
        for name in ops
        for backend in recording.gpu_backends(recording.PROVEN[name])
    ]
    print(f"{len(jobs)} processes of some {SECONDS_A_JOB} s each: about {minutes(jobs)} min")
    found = []
    for at in progress(jobs):
        found += keep(jobs[at], isolated.run(jobs[at]), record)
    print(f"kept in {record.path}")
    return found


def minutes(jobs: Sequence[Job]) -> int:
    """How long the jobs take; most of the time goes into starting processes."""
    return math.ceil(SECONDS_A_JOB * len(jobs) / 60)


def own_record(facts: dict[str, Any]) -> recording.Record:
    """The record for this GPU to add to; findings of another torch or torchweld are discarded."""
    path = evidence.own_path(facts["name"])
    if evidence.own(facts["name"]) is None:
        path.unlink(missing_ok=True)
    return recording.Record(path, facts, sources.root())


def show(results: list[Result]) -> None:
    """Print the findings, one line for each kernel, shape and dtype."""
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
