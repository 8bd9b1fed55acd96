"""Jobs: ops, rules or blocks on a GPU, measured in a process that a kernel's fault may break."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torchweld.bench.cases import Case, name_dtype
from torchweld.bench.cases import cases as list_op_cases
from torchweld.bench.measure import evidence, runner, steps
from torchweld.bench.measure.overhead import Overhead, overhead
from torchweld.bench.measure.runner import OUT_OF_MEMORY, Plan, Result
from torchweld.bench.measure.steps import StepCase
from torchweld.bench.measure.timing import Clock, clock_for
from torchweld.bench.models import blocks
from torchweld.bench.models.blocks import BlockCase
from torchweld.dispatch.proof import is_out_of_memory
from torchweld.registry import OPS
from torchweld.registry.cost import DIRECTIONS

AnyCase = Case | StepCase | BlockCase
# A process that tells nothing for so long is killed. torch.compile takes minutes for large ops.
PATIENCE = 300.0


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


@dataclass(frozen=True)
class Job:
    """An op, a rule or a block, and how to measure it."""

    op: str
    plan: Plan
    dtypes: Sequence[str] = ()
    sizes: Sequence[float] | None = None
    quick: bool = False
    overhead: bool = False
    known: Sequence[str] = ()  # rows, by name, that need not be measured
    device: str = "cuda"

    def __str__(self) -> str:
        return " on ".join(filter(None, [self.op, ", ".join(self.plan.backends)]))

    def cases(self) -> Sequence[AnyCase]:
        """The cases to measure."""
        dtypes = [getattr(torch, name) for name in self.dtypes]
        return list_cases([self.op], self.device, dtypes, self.sizes, quick=self.quick)

    def directions_of(self, case: AnyCase) -> list[str]:
        """The directions of a case whose rows are not known."""
        if not isinstance(case, Case):
            return list(self.plan.directions)
        about = {"shape": case.shape, "variant": case.variant, "dtype": name_dtype(case.dtype)}
        names = {each: evidence.name_row(about | {"direction": each}) for each in DIRECTIONS}
        return [each for each in self.plan.directions if names[each] not in self.known]

    def list_without_times(self, status: str, reason: str) -> list[Result]:
        """A result without times for each backend."""
        return [
            Result(self.op, [], "", "", backend, 0, 0, status=status, reason=reason)
            for backend in self.plan.backends or blocks.FUSED_WAYS[:1]
        ]


# What a process tells about a job: some results, some overheads, or that the job has ended.
News = tuple[Job, list[Result], list[Overhead], bool]


def run_apart(
    jobs: Sequence[Job],
    *,
    until: float = float("inf"),
    patience: float = PATIENCE,
    at_once: int = 1,
) -> Iterator[News]:
    """Measure in another process; after a fault, which may have broken the GPU, in a new one.

    Ends at `until` on the monotonic clock: jobs that had not ended by then tell no end. Of several
    processes at once each takes its part of the cores.
    """
    threads = max(1, (os.cpu_count() or 1) // at_once)
    waiting = [*jobs]
    while waiting and time.monotonic() < until:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchweld.bench.measure.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": str(threads)} | os.environ,
        )
        with process:  # closes its pipes and waits for it
            try:
                fault = yield from _follow(process, waiting, until, patience)
            finally:
                process.kill()
        if fault is not None:
            job = waiting.pop(0)
            # No kernel's fault sends this signal; the system does when memory runs out.
            status = "absent" if str(-signal.SIGKILL) in fault else "refused"
            yield job, job.list_without_times(status, fault), [], True


def _follow(
    process: subprocess.Popen[str], waiting: list[Job], until: float, patience: float
) -> Generator[News, None, str | None]:
    """Yield what a process tells, and take ended jobs from the list; return its fault, if any."""
    assert process.stdin is not None
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()

    def read(output: Any) -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    try:
        with process.stdin as given:
            given.writelines(json.dumps(asdict(job)) + "\n" for job in waiting)
    except BrokenPipeError:  # it ended before it read its jobs; its status tells
        pass
    while waiting:
        left = until - time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(patience, left)))
        except queue.Empty:
            return None if left <= patience else f"it told nothing for {patience:g} s"
        if not line.endswith("\n"):  # the end, or half a line before it
            return f"its process ended with status {process.wait()}"
        told = json.loads(line)
        results = [Result(**entry) for entry in told.get("results", [])]
        overheads = [Overhead(**entry) for entry in told.get("overheads", [])]
        job = waiting.pop(0) if "ended" in told else waiting[0]
        yield job, results, overheads, "ended" in told
    return None


def serve() -> None:
    """Run the jobs on standard input; write a line of JSON after every case and direction."""
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed
    for line in sys.stdin.read().splitlines():
        values = json.loads(line)
        job = Job(**values | {"plan": Plan(**values["plan"])})
        for what, entries in measure_here(job):
            print(json.dumps({what: [asdict(e) for e in entries]}), file=tell, flush=True)
        if job.device == "cuda":
            torch.cuda.synchronize()  # raises an error if a kernel broke the GPU for this process
            torch.cuda.empty_cache()
        print(json.dumps({"ended": job.op}), file=tell, flush=True)


def measure_here(job: Job) -> Iterator[tuple[str, Sequence[Any]]]:
    """Measure in this process, and yield "results" and "overheads" as they are found."""
    clock = clock_for(job.device)
    for case in job.cases():
        plan = replace(job.plan, directions=job.directions_of(case))
        if not plan.directions:
            continue
        try:
            for results in measure_case(case, plan, clock):
                yield "results", results
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            yield "results", job.list_without_times("absent", f"{case}: {OUT_OF_MEMORY}")
    if job.overhead and job.op in OPS:
        plan = job.plan
        yield "overheads", overhead(OPS[job.op], job.device, plan.backends, plan.seconds)


if __name__ == "__main__":
    serve()
