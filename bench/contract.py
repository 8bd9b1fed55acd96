"""Runs the contract tests on a GPU, each op and backend in its own process.

A fault in a kernel breaks the GPU for its process: all later tests in it fail too. A process that
hangs is killed.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from torchweld.bench.recording import OPTIMIZERS, Fault
from torchweld.registry import OPS

Target = tuple[str, str]  # the name of an op or a rule, and a backend

# A line of pytest's output: a test and its outcome. A test that killed the process has no outcome.
_LINE = re.compile(r"^(?P<test>\S+\.py::\S.*?) +(?:(?P<outcome>[A-Z]+)\b.*)?$")
_GPU = re.compile(r"\[(?:[^\]]*-)?gpu-[a-z]+\b")
_COUNTED = {"PASSED": True, "FAILED": False, "ERROR": False}
# Each of these tests covers code that all rules share, or the rule in its name or parameters.
_OF_RULES = "tests/optim/test_optim_cuda*.py"
_MOST_RESTARTS = 20


@dataclass(frozen=True)
class Outcome:
    """A test on the GPU that ended, or that killed its process."""

    test: str
    passed: bool

    def fault(self) -> Fault | None:
        """The fault that the test found; None if it passed."""
        return None if self.passed else Fault(self.test, None)


@dataclass(frozen=True)
class Verdict:
    """A test's outcome for an op or a rule, on a backend."""

    op: str
    backend: str
    fault: Fault | None


@dataclass(frozen=True)
class Limit:
    """When to kill a process: when it hangs, or when the whole run's time is up."""

    seconds: float = 600
    until: float = float("inf")  # on the monotonic clock

    def left(self) -> float:
        """The seconds that a process started now may take."""
        return min(self.seconds, self.until - time.monotonic())

    def is_over(self) -> bool:
        """Whether the whole run's time is up."""
        return time.monotonic() >= self.until


def run_contract(root: Path, targets: set[Target], limit: Limit | None = None) -> Iterator[Verdict]:
    """The outcomes for each op, rule and backend, as the tests end."""
    limit = limit or Limit()
    ops = sorted(target for target in targets if target[0] in OPS)
    rules = sorted(targets - set(ops))
    verdicts: queue.Queue[Verdict | None] = queue.Queue()

    def test_op(target: Target) -> None:
        name, backend = target
        # "layer_norm" also matches other ops, whose names end in it.
        others = [op for op in OPS if op != name and op.endswith(name)]
        words = " and not ".join(f"{op}-gpu-{backend}" for op in (name, *others))
        for outcome in _run_tests(root, ["-k", words, "tests"], limit):
            verdicts.put(Verdict(*target, outcome.fault()))

    def test_rules(file: Path) -> None:
        for outcome in _run_rules(root, file, limit):
            for rule, backend in _find_concerned(outcome, rules):
                verdicts.put(Verdict(rule, backend, outcome.fault()))

    def end_after(jobs: Sequence[Future[None]]) -> None:
        wait(jobs)
        verdicts.put(None)

    # Compilers on the CPU take most of the time.
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        jobs = [pool.submit(test_op, target) for target in ops]
        if rules:
            jobs += [pool.submit(test_rules, file) for file in sorted(root.glob(_OF_RULES))]
        threading.Thread(target=end_after, args=(jobs,)).start()
        yield from iter(verdicts.get, None)
    for job in jobs:
        job.result()


def _run_rules(root: Path, file: Path, limit: Limit) -> Iterator[Outcome]:
    """A file's tests, in a new process after each failure, which may make the next ones fail."""
    ended: list[str] = []
    for _ in range(_MOST_RESTARTS):
        selected = [a for test in ended for a in ("--deselect", test)]
        failed = False
        for outcome in _run_tests(root, ["-x", "-k", "gpu-cuda", str(file), *selected], limit):
            ended.append(outcome.test)
            failed |= not outcome.passed
            yield outcome
        if not failed:
            return


def _find_concerned(outcome: Outcome, rules: Sequence[Target]) -> Sequence[Target]:
    """The rules that a test names.

    If it names none, a pass counts for all rules, and a failure for the code that they share: each
    rule has its own tests.
    """
    named = [target for target in rules if target[0] in outcome.test.lower()]
    return named or (rules if outcome.passed else [(OPTIMIZERS, rules[0][1])])


def _run_tests(root: Path, selected: Sequence[str], limit: Limit) -> Iterator[Outcome]:
    """The outcomes of the selected tests on the GPU. Their other output goes to stderr."""
    if limit.is_over():
        return
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-vv", "--tb=short", *selected]
    # Keep Inductor from starting processes.
    serial = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "COLUMNS": "1000"}
    with subprocess.Popen(
        command, cwd=root, env=serial, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as tests:
        assert tests.stdout is not None
        end = threading.Timer(limit.left(), tests.kill)
        end.start()
        running = None
        for line in tests.stdout:
            match = _LINE.match(line.rstrip("\n"))
            if match is None or not _GPU.search(match["test"]):
                sys.stderr.write(line)
                continue
            running = match["test"] if match["outcome"] is None else None
            if match["outcome"] in _COUNTED:
                passed = _COUNTED[match["outcome"]]
                yield Outcome(match["test"], passed)
                if not passed:
                    sys.stderr.write(line)
        end.cancel()
    if running is not None and not limit.is_over():
        sys.stderr.write(f"{running} ended its process\n")
        yield Outcome(running, False)
