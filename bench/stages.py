"""Records evidence on a GPU that may be available for only minutes, most valuable facts first.

A stage is a list of steps, each with a share of the stage's seconds. Time that a step does not use
goes to the next steps. Jobs for which no time is left are skipped and printed. Jobs run in workers'
processes, which are replaced after a fault, and the record is complete after each.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torchweld.bench import jobs, recording, steps, targets
from torchweld.bench.cases import SMALLEST
from torchweld.bench.contenders import COMPILE, DENSE
from torchweld.bench.contract import Limit, Verdict, run_contract
from torchweld.bench.jobs import Job, JobOutcome, Worker
from torchweld.bench.runner import Plan, Result
from torchweld.ops.optimizer.rule import RULES
from torchweld.registry import OPS

# Most used first.
_FIRST = ("layer_norm", "rms_norm", "softmax_dropout", "linear_act", "mlp", "bias_act")
_LAST = ("linear_batch_norm_act", "batch_norm_act", "normalize_act")
# Seconds that a process takes to start and draw its inputs, and seconds per job of each kind.
STARTS = 7.0
CHECKS, COMPILES = STARTS + 3, STARTS + 20
# Without and with the compiler: an op at all sizes, and attention beside its compiled rivals.
TIMES, COMPILED_TIMES = 5.0, STARTS + 5
ALL_COMPILES, ATTENTION_TIMES = STARTS + 60, STARTS + 55
STEPS = STARTS + 28
_ATTENTION = "block_sparse_attention"
# A job that takes longer than this many times its expected time counts as hanging.
_PATIENCE = 4


@dataclass(frozen=True)
class Step:
    """Jobs of one kind, with their total time and the number that run at once.

    `at_once` is None for one job per core, if compilers take most of the time. Jobs that measure
    run one at a time. Without jobs the step runs the contract's tests.
    """

    name: str
    seconds: float
    jobs: tuple[Job, ...] = ()
    at_once: int | None = 1
    each: float = TIMES
    is_kept: bool = True  # False: it only fills the caches of compiled code

    def predict(self, cores: int) -> float:
        """The expected seconds."""
        if not self.jobs:
            return self.seconds
        return math.ceil(len(self.jobs) / (self.at_once or cores)) * self.each


class Lab(Protocol):
    """Where jobs run: a machine with a GPU, or a test's imitation of one."""

    cores: int

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    def run(self, step: Step, until: float) -> Iterator[tuple[Job, JobOutcome | None]]:
        """Yield each job and its results as it ends, or None if it had not started by `until`."""

    def contract(self, targets: set[tuple[str, str]], seconds: float) -> Iterable[Verdict]:
        """The outcomes of the contract's tests that end in time."""


class Machine:
    """This machine's GPU."""

    def __init__(self, root: Path) -> None:
        self._root, self.cores = root, os.cpu_count() or 1

    def now(self) -> float:
        return time.monotonic()

    def run(self, step: Step, until: float) -> Iterator[tuple[Job, JobOutcome | None]]:
        at_once = min(step.at_once or self.cores, max(1, len(step.jobs)))
        waiting, running = list(step.jobs), dict[Future[JobOutcome], tuple[Job, Worker]]()
        workers = [Worker(at_once) for _ in range(at_once)]
        idle = [*workers]
        try:
            with ThreadPoolExecutor(at_once) as pool:
                while waiting or running:
                    while waiting and idle:
                        job = waiting.pop(0)
                        if self.now() >= until:
                            yield job, None
                        else:
                            worker = idle.pop()
                            future = pool.submit(worker.run, job, _PATIENCE * step.each)
                            running[future] = job, worker
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        job, worker = running.pop(done)
                        idle.append(worker)
                        yield job, done.result()
        finally:
            for worker in workers:
                worker.close()

    def contract(self, targets: set[tuple[str, str]], seconds: float) -> Iterable[Verdict]:
        return run_contract(self._root, targets, Limit(until=self.now() + seconds))


def first(names: Sequence[str]) -> list[Step]:
    """Ten minutes: every kernel once, the most important times, then the tests."""
    attention, others = [n for n in names if n == _ATTENTION], [n for n in names if n != _ATTENTION]
    compiled = _list_attention_sizes(attention) + _list_compiles(others)
    timed = _list_attention(attention)
    return [
        Step("CUDA kernels, smallest shapes", 50, _list_checks(names, "cuda"), 4, CHECKS),
        Step("Triton kernels, smallest shapes", 65, _list_checks(names, "triton"), None, COMPILES),
        Step("all sizes, compiled", 135, compiled, None, ALL_COMPILES, is_kept=False),
        Step("attention beside its rivals", 65, timed, each=ATTENTION_TIMES),
        Step("bfloat16 times", 125, _list_times(others, ("bfloat16",), ("fwd", "full"))),
        Step("AdamW on a billion elements", 40, _list_steps(names, ["adam"]), each=STEPS),
        Step("the contract", 115),
    ]


def second(names: Sequence[str]) -> list[Step]:
    """Ten more minutes: the other dtype and rules, and the rest of the tests."""
    others = [rule for rule in RULES if rule != "adam"]
    return [
        Step("optimizers", 120, _list_steps(names, others), each=STARTS + 10),
        Step(
            "float32 times",
            255,
            _list_times(names, ("float32",), ("fwd", "full")),
            each=COMPILED_TIMES,
        ),
        Step("the contract", 225),
    ]


def third(names: Sequence[str]) -> list[Step]:
    """No time limit: times of torch.compile, and the overhead of calls."""
    jobs = []
    for job in _list_times(names, ("bfloat16", "float32"), ("fwd", "bwd", "full")):
        plan = replace(job.plan, rivals=_list_rivals(job.op), seconds=0.3)
        jobs.append(replace(job, plan=plan, overhead=True))
    return [Step("beside torch.compile", 1800, tuple(jobs), each=75.0)]


STAGES = {"first": first, "second": second, "third": third}


def run(
    stage: str, names: Sequence[str], lab: Lab, record: recording.Record, since: float | None = None
) -> list[Result]:
    """Run a stage's steps and record the results. `since` is when its time began."""
    start = lab.now() if since is None else since
    until, results = start, dict[tuple[str, ...], Result]()
    for step in STAGES[stage](names):
        until += step.seconds
        took = lab.now()
        predicted = step.predict(lab.cores)
        print(f"{took - start:5.0f} s  {step.name}: some {predicted:.0f} s", flush=True)
        if step.jobs:
            left_out = []
            for job, outcome in lab.run(step, until):
                if outcome is None:
                    left_out.append(str(job))
                elif step.is_kept:  # eager is measured with each backend
                    for r in record_job(job, outcome, record):
                        results.setdefault((r.op, r.label, r.dtype, r.direction, r.contender), r)
            if left_out:
                print(f"         no time was left for {', '.join(left_out)}", flush=True)
        else:
            _record_tests(names, lab, record, until)
    print(f"{lab.now() - start:5.0f} s  the {stage} stage has ended: {record.path}", flush=True)
    targets.show(results.values())
    return list(results.values())


def _record_tests(names: Sequence[str], lab: Lab, record: recording.Record, until: float) -> None:
    targets = {(n, b) for n in names for b in recording.gpu_backends(recording.PROVEN[n])}
    for name, backend in sorted(targets):
        record.begin(name, backend, recording.TESTED)
    record.begin(recording.OPTIMIZERS, "cuda", recording.TESTED)
    for tested in lab.contract(targets, max(until - lab.now(), 0.0)):
        record.add_outcome(tested.op, tested.backend, recording.TESTED, tested.fault)


def record_job(job: Job, outcome: JobOutcome, record: recording.Record) -> list[Result]:
    """Record a job's results: which were correct, and their times."""
    (backend,) = job.plan.backends
    results = [result for results in outcome.results for result in results]
    if outcome.fault:
        results += jobs.refuse_all(job, outcome)
    mine = [r for r in results if r.contender == backend and r.status != "absent"]
    if not mine:
        return results
    record.begin(job.op, backend, recording.JUDGED)
    for of_one_direction in outcome.results:
        record.add_results(of_one_direction)
    for result in {(r.label, r.dtype): r for r in mine}.values():
        fault = None if result.status == "timed" else recording.Fault.of(result)
        record.add_outcome(job.op, backend, recording.JUDGED, fault)
    return results


def sort_names(names: Iterable[str]) -> list[str]:
    """Ops and rules, most used first."""
    rank = {name: at - len(_FIRST) for at, name in enumerate(_FIRST)} | dict.fromkeys(_LAST, 1)
    return sorted(names, key=lambda name: rank.get(name, 0))


def _list_jobs(names: Iterable[str], plan: Plan, backends: Iterable[str]) -> list[Job]:
    """One job for each op and GPU backend."""
    pairs = [(n, b) for n in names for b in recording.gpu_backends(recording.PROVEN[n])]
    return [Job(n, replace(plan, backends=[b])) for n, b in pairs if b in backends]


def _list_checks(names: Iterable[str], backend: str) -> tuple[Job, ...]:
    """Jobs that check every kernel at its smallest shape, in both directions, and time it once."""
    once = Plan(["full"], [], [], seconds=0.0, rounds=(1, 1))
    dtypes = ["bfloat16", "float32", "float16"]
    jobs = _list_jobs(names, once, [backend])
    return tuple(replace(job, dtypes=dtypes, sizes=[SMALLEST], step=[2, 64, 64]) for job in jobs)


def _list_times(
    names: Iterable[str], dtypes: Sequence[str], directions: Sequence[str]
) -> tuple[Job, ...]:
    plan = Plan(directions, [], [], seconds=0.1, rounds=(5, 51))
    ops = [name for name in names if name not in RULES]
    all_jobs = [replace(job, dtypes=dtypes) for job in _list_jobs(ops, plan, ("cuda", "triton"))]
    return tuple(
        replace(job, plan=replace(job.plan, rivals=["gemm"])) if job.op == "linear_act" else job
        for job in all_jobs
    )


def _list_attention(names: Iterable[str]) -> tuple[Job, ...]:
    """Attention at all sizes beside torch's dense kernels and FlexAttention."""
    rivals = [*DENSE, "flex"]
    jobs = _list_times(names, ("bfloat16",), ("fwd", "full"))
    return tuple(replace(job, plan=replace(job.plan, rivals=rivals)) for job in jobs)


def _list_attention_sizes(names: Iterable[str]) -> tuple[Job, ...]:
    """A job for each size that compiles attention and FlexAttention, and times nothing."""
    once = Plan(["full"], [], ["flex"], seconds=0.0, rounds=(1, 1))
    all_jobs = []
    for job in _list_jobs(names, once, ["triton"]):
        count = len(OPS[job.op].benchmarks_on_gpu)
        sizes = [(at + 0.5) / count for at in range(count)]
        all_jobs += [replace(job, dtypes=["bfloat16"], sizes=[size]) for size in sizes]
    return tuple(all_jobs)


def _list_compiles(names: Iterable[str]) -> tuple[Job, ...]:
    """A job for each op that compiles its Triton kernels for all sizes, and times nothing."""
    once = Plan(["full"], [], [], seconds=0.0, rounds=(1, 1))
    ops = [name for name in names if name not in RULES]
    return tuple(replace(job, dtypes=["bfloat16"]) for job in _list_jobs(ops, once, ["triton"]))


def _list_rivals(op: str) -> list[str]:
    return [COMPILE, *DENSE, "flex"] if op == _ATTENTION else [COMPILE]


def _list_steps(names: Iterable[str], rules: Iterable[str]) -> tuple[Job, ...]:
    plan = Plan(["full"], [], [*steps.PEERS], seconds=0.5, rounds=(5, 51))
    asked = set(names)
    return tuple(_list_jobs([r for r in rules if r in asked], plan, ("cuda",)))
