"""Records evidence on a GPU that may be available for only minutes: `torchweld bench --record`.

Steps run in this order: the kernels' contract, rows that must be measured again, windows, whole
models and losses, all other rows. Each step has a share of the minutes, and its unused time goes to
the next. Every row is written at once, so that a killed run leaves what it has, and the next one
goes on: it measures neither rows nor models that the present sources have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchweld.bench.measure import steps
from torchweld.bench.measure.contenders import COMPILE, DENSE
from torchweld.bench.measure.evidence import (
    CASE,
    KEPT,
    PROVEN,
    gpu_backends,
    is_current,
    name_row,
    sources_hash,
)
from torchweld.bench.measure.jobs import Job, run_apart
from torchweld.bench.measure.runner import Plan, Result
from torchweld.bench.models.blocks import BLOCKS
from torchweld.files import write_json
from torchweld.ops.optimizer.rule import RULES
from torchweld.registry import BACKENDS, OPS

# What changed most, then what is most used.
_FIRST = (
    *("batch_norm_act", "linear_act", "rotary_embedding", "block_sparse_attention", "experts_mlp"),
    *("layer_norm", "rms_norm", "softmax_dropout", "mlp", "bias_act", "adam"),
)
_LAST = ("linear_batch_norm_act", "normalize_act")
# These have rivals that users would take.
RIVALS = {"block_sparse_attention": [*DENSE, "flex"], "linear_act": ["gemm"]}
# Tests of optimizers that name no rule are counted under this name.
OPTIMIZERS = "optimizers"
# How kernels are checked: by the benchmark before it times them, and by the contract's tests.
JUDGED, TESTED = "judged", "tested"
CONTRACT, COMPILING, SCRIPTS = "the contract", "compiling", "windows, whole models and losses"


@dataclass(frozen=True)
class Script:
    """A module of `torchweld.bench` that measures in a process of its own, and writes JSON."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()

    def run(self, path: Path, device: str, until: float, *, tiny: bool) -> bool:
        """Run it at most until then; what it writes in between is kept."""
        command = [sys.executable, "-m", f"torchweld.bench.{self.module}", *self.arguments]
        command += ["--device", device, "--json", str(path), *["--tiny"] * tiny]
        try:
            ended = subprocess.run(command, timeout=max(0.0, until - time.monotonic()), check=False)
        except subprocess.TimeoutExpired:
            return False
        return ended.returncode == 0


_MODELS = ("gpt2_355m", "llama_1b_script", "llama_1b", "qwen3_5_norms", "gpt_layer")
TO_RUN = (
    Script("windows", "measure.windows"),
    Script("losses", "measure.losses", ("--gpu",)),
    *(Script(name, "models.whole", (name, "--seconds", "4")) for name in _MODELS),
)
# Seconds after which a process that tells nothing is killed: a compiler's, and several times one's.
_HANGS = 60.0


# --- The record -----------------------------------------------------------------------------------


class EvidenceRecord:
    """The evidence file of a GPU, written after every outcome.

    Older entries remain until new ones replace them. `root` is the repository with the sources.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], root: Path) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", machine["name"].lower()).strip("-")
        self.path, self._root = folder / f"{name}.json", root
        self._begun: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()
        # Raise for unreadable evidence: the first step would overwrite it.
        content = json.loads(self.path.read_text()) if self.path.exists() else {"ops": {}}
        self._content: dict[str, Any] = content
        self._content |= {
            "gpu": machine["name"],
            "capability": machine["capability"],
            "date": machine["date"],
            "versions": machine["versions"],
            "limits": {"copy_gbps": machine["copy_gbps"]},
            "commit": _name_commit(root),
        }

    def add_outcome(self, op: str, backend: str, how: str, fault: str | None) -> None:
        """Count a pass or a fault. A run's first outcome replaces the outcomes of earlier runs."""
        with self._lock:
            outcomes = self._proof(op, backend)["outcomes"]
            if (op, backend, how) not in self._begun:
                self._begun.add((op, backend, how))
                outcomes[how] = {"passed": 0, "faults": []}
            if fault is None:
                outcomes[how]["passed"] += 1
            else:
                outcomes[how]["faults"].append(fault)
            write_json(self.path, self._content)

    def add_results(self, results: Sequence[Result]) -> None:
        """Record one case and direction: each backend's times, with its rivals' times."""
        timed = {r.contender: r for r in results if r.ms is not None}
        rivals = {name: r.ms for name, r in timed.items() if name not in BACKENDS}
        for result in results:
            if result.contender in BACKENDS and result.status != "absent":
                fault = f"{result.label} {result.dtype}: {result.reason}".strip()
                is_right = result.status == "timed"
                self.add_outcome(result.op, result.contender, JUDGED, None if is_right else fault)
        with self._lock:
            for name, result in timed.items():
                entry = {key: getattr(result, key) for key in KEPT}
                if result.op in BLOCKS:
                    rows = self._content.setdefault("models", [])
                    entry |= {"op": result.op, "contender": name, "commit": self._content["commit"]}
                    rows[:] = [r for r in rows if _is_other(r, entry, "op", "contender")]
                elif name in BACKENDS:
                    rows = self._proof(result.op, name)["results"]
                    rows[:] = [r for r in rows if _is_other(r, entry)]
                    entry |= {"rivals_ms": rivals}
                else:
                    continue
                rows.append(entry)
            write_json(self.path, self._content)

    def _proof(self, op: str, backend: str) -> dict[str, Any]:
        """The entry for a backend's kernels with their present sources.

        Rows of other sources stay if those compile to the same.
        """
        proofs: dict[str, Any] = self._content["ops"].setdefault(op, {})
        sources = sources_hash(PROVEN[op], backend, self._root) if op in PROVEN else ""
        if backend not in proofs or proofs[backend]["sources"] != sources:
            rows = _list_current(self._content, self._root, op, backend)
            proofs[backend] = {"sources": sources, "outcomes": {}, "results": rows}
        return proofs[backend]

    def list_known(self, op: str, backend: str) -> list[str]:
        """The rows that the present sources have, by name."""
        with self._lock:
            return list_known([self._content], self._root, op, backend)

    def has_script(self, name: str) -> bool:
        """Whether these sources have run it to its end."""
        found = self._content.get("scripts", {}).get(name, {})
        return bool(found.get("ended")) and found["commit"] == self._content["commit"]

    def add_script(self, name: str, found: dict[str, Any], *, ended: bool) -> None:
        with self._lock:
            kept = {"commit": self._content["commit"], "ended": ended, "found": found}
            self._content.setdefault("scripts", {})[name] = kept
            write_json(self.path, self._content)


def _list_current(
    content: dict[str, Any], root: Path, op: str, backend: str
) -> list[dict[str, Any]]:
    proof = content["ops"].get(op, {}).get(backend)
    if proof is None or op not in PROVEN:
        return []
    now = sources_hash(PROVEN[op], backend, root)
    return [row for row in proof["results"] if is_current(op, proof, row, now)]


def list_known(records: Iterable[dict[str, Any]], root: Path, op: str, backend: str) -> list[str]:
    """The rows of an op that records have of the present sources, by name."""
    return [name_row(row) for each in records for row in _list_current(each, root, op, backend)]


def _is_other(row: dict[str, Any], entry: dict[str, Any], *more: str) -> bool:
    return any(row[key] != entry[key] for key in (*CASE, *more))


def _name_commit(root: Path) -> str | None:
    """The commit of the sources, with a + if they differ from it; None outside of git."""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


# --- The contract's tests -------------------------------------------------------------------------

# A line of pytest's output: a test and its outcome. A test that killed the process has no outcome.
_LINE = re.compile(r"^(?P<test>\S+\.py::\S.*?) +(?:(?P<outcome>[A-Z]+)\b.*)?$")
_PASSED = {"PASSED": True, "FAILED": False, "ERROR": False}


def run_contract(
    root: Path, targets: Sequence[tuple[str, str]], record: EvidenceRecord, until: float
) -> list[tuple[str, str]]:
    """Run each target's tests in a process of its own; return the targets that did not begin.

    A fault in a kernel breaks the GPU for its process: all later tests in it fail too.
    """
    # Compilers on the CPU take most of the time.
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        begun = pool.map(lambda target: _run_tests(root, target, record, until), targets)
        return [target for target, did in zip(targets, begun, strict=True) if not did]


def _select(root: Path, name: str, backend: str) -> list[str]:
    """pytest's selection of the tests of an op, a rule, or what all rules share."""
    if name in OPS:  # "layer_norm" also matches other ops, whose names end in it
        others = [op for op in OPS if op != name and op.endswith(name)]
        words = " and not ".join(f"{op}-gpu-{backend}" for op in (name, *others))
        every = sorted((root / "tests").rglob("test_*.py"))
        return ["-k", words, *(str(p) for p in every if "mark.targets" in p.read_text())]
    which = name if name in RULES else f"not ({' or '.join(RULES)})"
    paths = sorted(root.glob("tests/optim/test_optim_cuda*.py"))
    return ["-k", f"gpu-{backend} and {which}", *map(str, paths)]


def _run_tests(root: Path, target: tuple[str, str], record: EvidenceRecord, until: float) -> bool:
    """Record the outcomes of a target's tests as they end. Other output goes to stderr."""
    if time.monotonic() >= until:
        return False
    name, backend = target
    selected = _select(root, name, backend)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-vv", "--tb=short", *selected]
    # Keep Inductor from starting processes.
    serial = os.environ | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "COLUMNS": "1000",
        "OMP_NUM_THREADS": "2",
    }
    with subprocess.Popen(
        command, cwd=root, env=serial, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as tests:
        assert tests.stdout is not None
        end = threading.Timer(until - time.monotonic(), tests.kill)
        end.start()
        running = None
        for line in tests.stdout:
            match = _LINE.match(line.rstrip("\n"))
            if match is None or f"gpu-{backend}" not in match["test"]:
                sys.stderr.write(line)
                continue
            running = match["test"] if match["outcome"] is None else None
            passed = _PASSED.get(match["outcome"])
            if passed is not None:
                record.add_outcome(name, backend, TESTED, None if passed else match["test"])
            if passed is False:
                sys.stderr.write(line)
        end.cancel()
    if running is not None and time.monotonic() < until:
        record.add_outcome(name, backend, TESTED, f"{running} ended its process")
    return True


# --- Steps ----------------------------------------------------------------------------------------


def sort_names(names: Iterable[str]) -> list[str]:
    """Ops and rules, most used first."""
    rank = {name: at - len(_FIRST) for at, name in enumerate(_FIRST)} | dict.fromkeys(_LAST, 1)
    return sorted(names, key=lambda name: rank.get(name, 0))


def list_targets(names: Iterable[str]) -> list[tuple[str, str]]:
    """The ops and rules, each with a backend that needs evidence."""
    return [(n, b) for n in names if n in PROVEN for b in gpu_backends(PROVEN[n])]


def list_steps(
    names: Sequence[str],
    device: str = "cuda",
    rivals: Sequence[str] = (),
    known: Callable[[str, str], Sequence[str]] = lambda op, backend: (),
) -> list[tuple[str, float, list[Job]]]:
    """The steps by name, with the part of the time by which each ends, and its jobs.

    The contract's tests and scripts are no jobs. Float32 has what the other steps leave.
    `known`: the rows of an op and a backend that need not be measured.
    """

    def list_jobs(
        names: Iterable[str], plan: Plan, dtype: str = "bfloat16", quick: bool = False
    ) -> list[Job]:
        return [
            Job(
                *(n, replace(plan, backends=[b]), [dtype]),
                quick=quick,
                device=device,
                known=known(n, b),
            )
            for n, b in list_targets(names)
        ]

    plan = Plan(["fwd", "full"], [], rivals, seconds=0.1, rounds=(5, 51))
    once = replace(plan, directions=["full"], rivals=["flex"], seconds=0.0, rounds=(1, 1))
    step = replace(plan, directions=["full"], rivals=list(steps.PEERS), seconds=0.5)
    ops, rules = [n for n in names if n in OPS], [n for n in names if n in RULES]
    beside = [
        job
        for n in ops
        for job in list_jobs([n], replace(plan, rivals=[*RIVALS.get(n, ()), *rivals]))
        if n in RIVALS
    ]
    model = replace(plan, rivals=[COMPILE])
    models = [Job(n, model, ["bfloat16"], device=device) for n in names if n in BLOCKS]
    return [
        (CONTRACT, 0.2, []),
        (COMPILING, 0.35, list_jobs(ops, once)),
        ("attention and GEMMs against rivals", 0.45, beside),
        ("ops against eager", 0.6, list_jobs([n for n in ops if n not in RIVALS], plan)),
        (SCRIPTS, 0.9, []),
        ("optimizers", 1.0, list_jobs(rules, step, "float32", quick=True)),
        ("blocks", 1.0, models),
        ("ops in float32", 1.0, list_jobs(ops, plan, "float32")),
    ]


def run(
    names: Sequence[str],
    record: EvidenceRecord,
    root: Path,
    minutes: float,
    *,
    device: str = "cuda",
    rivals: Sequence[str] = (),
    tiny: bool = False,
) -> list[Result]:
    """Run the steps, print what each left out, and return the results.

    `tiny`: scripts take small sizes, in a rehearsal.
    """
    start, names = time.monotonic(), sort_names(names)
    found = list[Result]()
    for name, part, jobs in list_steps(names, device, rivals, record.list_known):
        until = start + 60 * minutes * part
        now = time.monotonic()
        print(f"{now - start:5.0f} s  {name}, until {until - start:.0f} s", flush=True)
        if name == CONTRACT:
            targets = list_targets(names)
            if any(n in RULES for n in names):
                targets.append((OPTIMIZERS, "cuda"))
            left = [" on ".join(t) for t in run_contract(root, targets, record, until)]
        elif name == SCRIPTS:
            left = run_scripts(record, device, until, tiny=tiny)
        elif name == COMPILING:  # fills caches for the next steps, and records nothing
            lanes = [jobs[at :: os.cpu_count()] for at in range(os.cpu_count() or 1)]
            with ThreadPoolExecutor(len(lanes)) as pool:
                ran = list(pool.map(partial(_measure, until=until, at_once=len(lanes)), lanes))
            left = [job for lane in ran for job in lane]
        else:
            left = _measure(jobs, until, record, found)
        if left:
            print(f"         no time was left for {', '.join(left)}", flush=True)
    print(f"{time.monotonic() - start:5.0f} s  the end: {record.path}", flush=True)
    return found


def run_scripts(
    record: EvidenceRecord, device: str, until: float, *, tiny: bool = False
) -> list[str]:
    """Run the scripts that have not ended yet, each for its part of the time; name those left."""
    waiting = [script for script in TO_RUN if not record.has_script(script.name)]
    left = list[str]()
    for at, script in enumerate(waiting):
        now = time.monotonic()
        path = record.path.with_suffix(f".{script.name}.json")
        path.unlink(missing_ok=True)
        its_end = now + 2 * (until - now) / (len(waiting) - at + 1)  # the first ones matter most
        ended = now < until and script.run(path, device, its_end, tiny=tiny)
        if path.exists():
            record.add_script(script.name, json.loads(path.read_text()), ended=ended)
            path.unlink()
        left += [] if ended else [script.name]
    return left


def _measure(
    jobs: Sequence[Job],
    until: float,
    record: EvidenceRecord | None = None,
    found: list[Result] | None = None,
    at_once: int = 1,
) -> list[str]:
    """Run jobs in turn and record their results; return the jobs that did not end in time."""
    left = [str(job) for job in jobs]
    for job, results, _, has_ended in run_apart(
        jobs, until=until, patience=_HANGS, at_once=at_once
    ):
        if has_ended:
            left.remove(str(job))
        if record is not None and results:
            record.add_results(results)
        if found is not None:
            found += results
    return left
