"""Runs the contract tests on a GPU, each op and backend in a process of its own.

A fault in a kernel breaks the GPU for its process: whatever comes after it there fails as well. A
process that hangs is ended.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchweld.registry import OPS

Target = tuple[str, str]  # the name of an op or a rule, and a backend

# A line of pytest's as it runs a test, and what comes of it; a test that killed the process has
# only the first part.
_LINE = re.compile(r"^(?P<test>\S+\.py::\S.*?) +(?:(?P<outcome>[A-Z]+)\b.*)?$")
_GPU = re.compile(r"\[(?:[^\]]*-)?gpu-[a-z]+\b")
_COUNTED = {"PASSED": True, "FAILED": False, "ERROR": False}
# Each of these tests covers every rule, or the rule that its name or parameters have.
_OF_RULES = "tests/optim/test_optim_cuda*.py"
_MOST_RESTARTS = 20


@dataclass(frozen=True)
class Outcome:
    """A test on the GPU that ended, or that ended its process."""

    test: str
    passed: bool


def contract(
    root: Path, targets: set[Target], seconds: float = 600
) -> Iterator[tuple[str, str, bool]]:
    """Op, backend and whether it passed, test by test as they end."""
    ops = sorted(target for target in targets if target[0] in OPS)
    rules = sorted(targets - set(ops))
    found: queue.Queue[tuple[str, str, bool] | None] = queue.Queue()

    def of_op(target: Target) -> None:
        name, backend = target
        # "layer_norm" is part of the name of another op.
        others = [op for op in OPS if op != name and op.endswith(name)]
        words = " and not ".join(f"{op}-gpu-{backend}" for op in (name, *others))
        for outcome in _tests(root, ["-k", words, "tests"], seconds):
            found.put((*target, outcome.passed))

    def of_rules(file: Path) -> None:
        for outcome in _one_failure_at_a_time(root, file, seconds):
            for rule, backend in _concerned(outcome.test, rules):
                found.put((rule, backend, outcome.passed))

    jobs = [(of_op, target) for target in ops]
    jobs += [(of_rules, file) for file in sorted(root.glob(_OF_RULES)) if rules]
    # Most of the time goes to compilers on the CPU.
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        done = [pool.submit(*job) for job in jobs]
        threading.Thread(target=lambda: ([d.exception() for d in done], found.put(None))).start()
        yield from iter(found.get, None)
    for job in done:
        job.result()


def _one_failure_at_a_time(root: Path, file: Path, seconds: float) -> Iterator[Outcome]:
    """A file's tests, in a new process after each failure, which may make the next ones fail."""
    ended: list[str] = []
    for _ in range(_MOST_RESTARTS):
        selected = [a for test in ended for a in ("--deselect", test)]
        failed = False
        for outcome in _tests(root, ["-x", "-k", "gpu-cuda", str(file), *selected], seconds):
            ended.append(outcome.test)
            failed |= not outcome.passed
            yield outcome
        if not failed:
            return


def _concerned(test: str, rules: Sequence[Target]) -> Sequence[Target]:
    """The rules that a test names, or else all."""
    named = [target for target in rules if target[0] in test.lower()]
    return named or rules


def _tests(root: Path, selected: Sequence[str], seconds: float) -> Iterator[Outcome]:
    """The outcomes of the selected tests on the GPU. What else they print goes to stderr."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-vv", "--tb=short", *selected]
    # Inductor would start processes of its own.
    serial = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "COLUMNS": "1000"}
    with subprocess.Popen(
        command, cwd=root, env=serial, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as tests:
        assert tests.stdout is not None
        limit = threading.Timer(seconds, tests.kill)
        limit.start()
        running = None
        for line in tests.stdout:
            found = _LINE.match(line.rstrip("\n"))
            if found is None or not _GPU.search(found["test"]):
                sys.stderr.write(line)
                continue
            running = found["test"] if found["outcome"] is None else None
            if found["outcome"] in _COUNTED:
                passed = _COUNTED[found["outcome"]]
                yield Outcome(found["test"], passed)
                if not passed:
                    sys.stderr.write(line)
        limit.cancel()
    if running is not None:
        sys.stderr.write(f"{running} ended its process\n")
        yield Outcome(running, False)
