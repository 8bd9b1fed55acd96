"""Measures an op in its own process: a kernel's fault breaks the GPU for that process only."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchweld.bench import kinds, steps
from torchweld.bench.overhead import Overhead, overhead
from torchweld.bench.runner import Plan, Result
from torchweld.bench.timing import clock_for
from torchweld.registry import OPS

# A process that takes longer is killed. torch.compile takes minutes for the largest ops.
SECONDS = 300.0


@dataclass(frozen=True)
class Job:
    """An op, a rule or a block, and how to measure it."""

    op: str
    plan: Plan
    dtypes: Sequence[str] = ()
    sizes: Sequence[float] | None = None
    step: Sequence[int] | None = None  # the shape of a rule's tensors; None: the benchmark's
    quick: bool = False
    overhead: bool = False
    device: str = "cuda"

    def __str__(self) -> str:
        return f"{self.op} on {', '.join(self.plan.backends)}"

    def cases(self) -> Sequence[kinds.AnyCase]:
        """The cases to measure."""
        if self.step is None:
            dtypes = [getattr(torch, name) for name in self.dtypes]
            return kinds.cases([self.op], self.device, dtypes, self.sizes, quick=self.quick)
        shape = tuple(self.step)
        return [steps.few(kind, self.device, shape) for kind in steps.KINDS if kind.rule == self.op]


@dataclass
class Found:
    """A job's results until its process ended, and the fault if it ended early."""

    results: list[list[Result]]
    overheads: list[Overhead]
    fault: str | None


def run(job: Job, seconds: float = SECONDS) -> Found:
    """Run the job in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        told.touch()
        command = [sys.executable, "-m", "torchweld.bench.isolated", json.dumps(asdict(job))]
        fault = None
        try:
            status = subprocess.run([*command, str(told)], timeout=seconds, check=False).returncode
            if status:
                fault = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            fault = f"it took longer than {seconds:g} s"
        lines = [json.loads(line) for line in told.read_text().splitlines() if line.endswith("}")]
    results = [[Result(**r) for r in line["results"]] for line in lines if "results" in line]
    overheads = [Overhead(**o) for line in lines for o in line.get("overheads", [])]
    return Found(results, overheads, fault)


def refused(job: Job, found: Found) -> list[Result]:
    """A refused result for each backend of a job whose process ended early."""
    return [
        Result(job.op, [], "", "", backend, 0, 0, status="refused", reason=found.fault)
        for backend in job.plan.backends
    ]


def main(given: str, told: str) -> None:
    """Run a job in this process, and write a line of JSON after every case and direction."""
    values: dict[str, Any] = json.loads(given)
    job = Job(**values | {"plan": Plan(**values["plan"])})
    with Path(told).open("a") as file:
        for what, entries in measured(job):
            print(json.dumps({what: [asdict(e) for e in entries]}), file=file, flush=True)


def measured(job: Job) -> Iterator[tuple[str, Sequence[Any]]]:
    """Measure in this process, and yield "results" and "overheads" as they are found."""
    clock = clock_for(job.device)
    for case in job.cases():
        for results in kinds.measure(case, job.plan, clock):
            yield "results", results
    if job.overhead and job.op in OPS:
        plan = job.plan
        yield "overheads", overhead(OPS[job.op], job.device, plan.backends, plan.seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
