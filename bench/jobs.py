"""Jobs: what to measure of an op, a rule or a block, in this process or in one of its own.

A kernel's fault breaks the GPU for its process only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchweld.bench import blocks, runner, steps
from torchweld.bench.blocks import BlockCase
from torchweld.bench.cases import Case
from torchweld.bench.cases import cases as list_op_cases
from torchweld.bench.overhead import Overhead, overhead
from torchweld.bench.runner import OUT_OF_MEMORY, Plan, Result
from torchweld.bench.steps import StepCase
from torchweld.bench.timing import Clock, clock_for
from torchweld.dispatch.engine.judge import is_out_of_memory
from torchweld.registry import OPS

AnyCase = Case | StepCase | BlockCase


def list_cases(
    names: Sequence[str],
    device: str,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[float] | None = None,
    *,
    quick: bool = False,
) -> list[AnyCase]:
    """The cases of the ops, optimizer rules and blocks with these names."""
    ops = [op for op in OPS.values() if op.name in names]
    return [
        *list_op_cases(ops, device, dtypes, sizes),
        *steps.cases([name for name in names if name not in OPS], device, quick),
        *blocks.cases(names, device, dtypes, quick=quick),
    ]


def measure_case(case: AnyCase, plan: Plan, clock: Clock) -> Iterator[list[Result]]:
    """Every contender's results, direction by direction."""
    if isinstance(case, StepCase):
        return steps.measure(case, plan, clock)
    if isinstance(case, BlockCase):
        return blocks.measure(case, plan, clock)
    return runner.measure(case, plan, clock)


# --- Jobs -----------------------------------------------------------------------------------------

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

    def cases(self) -> Sequence[AnyCase]:
        """The cases to measure."""
        if self.step is None:
            dtypes = [getattr(torch, name) for name in self.dtypes]
            return list_cases([self.op], self.device, dtypes, self.sizes, quick=self.quick)
        shape = tuple(self.step)
        return [steps.few(kind, self.device, shape) for kind in steps.KINDS if kind.rule == self.op]


@dataclass
class JobOutcome:
    """A job's results until its process ended, and the fault if it ended early.

    A process that the system killed for lack of memory is no fault of a kernel.
    """

    results: list[list[Result]]
    overheads: list[Overhead]
    fault: str | None
    is_shortage: bool = False


class Worker:
    """A process that runs jobs in turn, so that only the first one waits for its imports.

    After a fault, which may have broken the GPU for it, the next job gets a new process. Of several
    workers each takes its part of the cores.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._threads = max(1, (os.cpu_count() or 1) // at_once)
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Job, seconds: float = SECONDS) -> JobOutcome:
        """Run a job; the process is killed if it takes longer."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            log.touch()
            late = threading.Event()

            def kill() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(seconds, kill)
            timer.start()
            try:
                process.stdin.write(json.dumps([asdict(job), str(log)]) + "\n")
                process.stdin.flush()
                ended = process.stdout.readline() == ""
            except BrokenPipeError:  # it ended before it read the job
                ended = True
            timer.cancel()
            fault, killed = None, False
            if ended:
                status, self._process = _reap(process), None
                fault = f"its process ended with status {status}"
                # No kernel's fault sends this signal; the system does when memory runs out.
                killed = status == -signal.SIGKILL and not late.is_set()
            if late.is_set():
                fault = f"it took longer than {seconds:g} s"
            lines = [
                json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")
            ]
        results = [[Result(**r) for r in line["results"]] for line in lines if "results" in line]
        overheads = [Overhead(**o) for line in lines for o in line.get("overheads", [])]
        return JobOutcome(results, overheads, fault, killed)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _reap(process)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "torchweld.bench.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": str(self._threads)} | os.environ,
        )


def _reap(process: subprocess.Popen[str]) -> int:
    """Close a process's pipes and return its status."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()
    return process.wait()


def run_apart(job: Job, seconds: float = SECONDS) -> JobOutcome:
    """Run the job in its own process."""
    worker = Worker()
    try:
        return worker.run(job, seconds)
    finally:
        worker.close()


def refuse_all(job: Job, outcome: JobOutcome) -> list[Result]:
    """A result without times for each backend of a job whose process ended early."""
    return _without_times(job, "absent" if outcome.is_shortage else "refused", outcome.fault)


def _without_times(job: Job, status: str, reason: str | None) -> list[Result]:
    return [
        Result(job.op, [], "", "", backend, 0, 0, status=status, reason=reason)
        for backend in job.plan.backends
    ]


def serve() -> None:
    """Run the jobs on standard input; write a line of JSON after every case and direction."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    for line in sys.stdin:
        values, path = json.loads(line)
        job = Job(**values | {"plan": Plan(**values["plan"])})
        with Path(path).open("a") as file:
            for what, entries in measure_here(job):
                print(json.dumps({what: [asdict(e) for e in entries]}), file=file, flush=True)
        if job.device == "cuda":
            torch.cuda.synchronize()  # raises an error if a kernel broke the GPU for this process
            torch.cuda.empty_cache()
        print("ended", file=told, flush=True)


def measure_here(job: Job) -> Iterator[tuple[str, Sequence[Any]]]:
    """Measure in this process, and yield "results" and "overheads" as they are found."""
    clock = clock_for(job.device)
    for case in job.cases():
        try:
            for results in measure_case(case, job.plan, clock):
                yield "results", results
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield "results", _without_times(job, "absent", f"{case}: {OUT_OF_MEMORY}")
    if job.overhead and job.op in OPS:
        plan = job.plan
        yield "overheads", overhead(OPS[job.op], job.device, plan.backends, plan.seconds)


if __name__ == "__main__":
    serve()
