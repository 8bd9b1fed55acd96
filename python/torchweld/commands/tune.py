"""`torchweld tune`: finds the answers that first uses on this GPU would need, beforehand.

Every op is called at a few of its declared shapes, and every optimizer takes a step, so that their
kernels are checked as at a first use, and their tiles are timed. The answers go into the user's
cache, and on request into a file for other machines with this GPU: containers with an empty cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchweld.bench.cases import DTYPES, MIDDLE, SMALLEST, Case
from torchweld.bench.cases import cases as op_cases
from torchweld.bench.command import add_ops
from torchweld.bench.measure import steps
from torchweld.bench.measure.clock import DeviceClock, take_medians
from torchweld.bench.measure.evidence import PROVEN
from torchweld.bench.measure.machine import Refusal, check_outputs
from torchweld.dispatch import proof, store
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.dispatch.choice import choose
from torchweld.dispatch.proof import in_a_line
from torchweld.dispatch.store import Entry, describe
from torchweld.ops.optimizer.rule import RULES
from torchweld.registry import EAGER, OPS, Op, materialize
from torchweld.table import Table, progress

# Number and shape of a step's tensors: small enough for any GPU.
STEPS = (4, 1024, 1024)
SIZES = (SMALLEST, MIDDLE)
# A process that takes longer is killed.
SECONDS = 300.0
# Milliseconds of device time that the tiles of a kernel may take at each size.
BUDGET = 30.0
# The factor by which a tile must beat the fallback: more than two runs of one call differ.
LEAD = 1.02


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `torchweld tune`."""
    add_ops(parser, list(PROVEN))
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="also write all answers for this GPU to a file, which other machines read if"
        f" {store.SHIPPED_VARIABLE} names it",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 if a kernel was wrong or its process failed."""
    try:
        if not torch.cuda.is_available():
            raise Refusal("torch sees no GPU here, and on the CPU nothing is left to choose")
        check_outputs(options, pictures=())
        failed = _tune(options.ops or list(PROVEN))
    except Refusal as refusal:
        print(f"torchweld tune: {refusal}", file=sys.stderr)
        return 2
    checker = proof.checker_for(torch.device("cuda"))
    entries = checker.entries()
    show(entries)
    print(f"kept in {checker.file}")
    if options.write:
        store.write(options.write, entries)
        print(f"written: {options.write}")
    return 1 if failed or any(entry.answer.faults for entry in entries) else 0


def _tune(names: Sequence[str]) -> list[str]:
    """Ask about each op and rule in its own process, so that a kernel's fault ends only that one.

    Returns the names whose process failed.
    """
    failed = []
    for at in progress(names):
        command = [sys.executable, "-m", "torchweld.commands.tune", names[at]]
        try:
            checked = os.environ | {proof.VARIABLE: "check"}
            status = subprocess.run(command, timeout=SECONDS, check=False, env=checked).returncode
            reason = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            reason = f"it took longer than {SECONDS:g} s"
        if reason is not None:
            failed.append(names[at])
            print(f"{names[at]}: {reason}", file=sys.stderr)
    return failed


def ask(name: str, device: str = "cuda") -> None:
    """Ask about an op at some of its shapes, with and without gradients, or about a rule's step."""
    if name in RULES:
        for kind in steps.KINDS:
            if kind.rule == name:
                steps.take_step(steps.few(kind, device, STEPS))
        return
    for case in op_cases([OPS[name]], device, DTYPES["cuda"], SIZES):
        for train in (False, True):
            _call(case.op, case, train)


def choose_fastest(calls: proof.Calls) -> tuple[str, dict[str, float]]:
    """The name of the fastest call and the times of all; the first one is the fallback."""
    fallback, ms = next(iter(calls)), take_times(calls)
    best = min(ms, key=lambda name: ms[name] * (1 if name == fallback else LEAD), default=fallback)
    return best, ms


def take_times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each call on the current stream; a call that fails has none."""
    right = {}
    for name, run in calls.items():
        try:
            run()  # it compiles, and answers the questions that the call asks itself
            right[name] = run
        except Exception as error:
            print(f"{name}: {in_a_line(error)}", file=sys.stderr)
    return dict(zip(right, take_medians([*right.values()], DeviceClock(), BUDGET), strict=True))


def _call(op: Op, case: Case, train: bool) -> None:
    inputs = materialize(case.arguments, case.dtype, case.device, requires_grad=train)
    with torch.set_grad_enabled(train):
        if choose(op, inputs) != EAGER:  # a kernel's call asks about its tiles
            results = as_tuple(call(op, *inputs))
            if train:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def show(entries: Sequence[Entry]) -> None:
    """Print the answers, one line for each."""
    table = Table(["calls", "serves", "ms"], numbers_from=2)
    for entry in entries:
        answer = entry.answer
        times = ", ".join(f"{name} {ms:.3f}" for name, ms in answer.ms.items())
        table.add(describe(entry.kind, entry.size), answer.backend, times)
    table.show()


if __name__ == "__main__":
    proof.choose_fastest = choose_fastest
    ask(sys.argv[1])
