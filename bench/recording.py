"""Evidence from a GPU: records the contract's outcomes and times, and marks stale ones."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torchweld.bench import blocks
from torchweld.bench.runner import Result
from torchweld.bench.sources import files_of, sources_hash
from torchweld.dispatch.engine import files
from torchweld.ops.optimizer.rule import RULES, Rule
from torchweld.registry import BACKENDS, EAGER, OPS, Op

Proven = Op | Rule
PROVEN: dict[str, Proven] = {**OPS, **RULES}
# The fields of a result that the evidence keeps.
_KEPT = ("shape", "variant", "dtype", "direction", "elements", "bytes", "flops", "peak_bytes")
# The fields that identify a case and direction.
_CASE = ("shape", "variant", "dtype", "direction")
_TIMES = ("ms", "p20", "p80", "eager_ms", "gbps", "limit_ms", "share")


# Tests of optimizers that name no rule are counted under this name.
OPTIMIZERS = "optimizers"
# How kernels are checked: by the benchmark before it times them, and by the contract's tests.
JUDGED, TESTED = "judged", "tested"


@functools.cache
def read_records() -> dict[str, dict[str, Any]]:
    """The evidence files in the package, by GPU name."""
    folder = resources.files("torchweld.bench") / "evidence"
    paths = [f for f in folder.iterdir() if f.name.endswith(".json")] if folder.is_dir() else []
    loaded = [json.loads(f.read_text()) for f in paths]
    return {record["gpu"]: record for record in loaded}


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def count_passed(proof: dict[str, Any]) -> int:
    """How many tests and cases a kernel passed."""
    return sum(counted["passed"] for counted in proof["outcomes"].values())


def list_faults(proof: dict[str, Any]) -> list[dict[str, Any]]:
    """A kernel's faults, each with the dtype that it concerns; None: all dtypes."""
    return [fault for counted in proof["outcomes"].values() for fault in counted["faults"]]


@dataclass(frozen=True)
class Fault:
    """A failure: the name of a test or a case, and the dtype if it concerns only one."""

    what: str
    dtype: str | None

    @classmethod
    def of(cls, result: Result) -> Fault:
        """The fault of a refused result."""
        return cls(f"{result.label}: {result.reason}".lstrip(": "), result.dtype or None)


class Record:
    """The evidence file of a GPU, written after every step, so that an interrupted run keeps its
    steps.

    Older entries remain until new ones replace them. `root` is the repository with the sources; an
    installed package has none.
    """

    def __init__(self, path: Path, machine: dict[str, Any], root: Path | None) -> None:
        self.path, self._root = path, root
        self._begun: set[tuple[str, str, str]] = set()
        # Raise for unreadable evidence: the first step would overwrite it.
        self._content: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"ops": {}}
        )
        self._content |= {
            "gpu": machine["name"],
            "capability": machine["capability"],
            "date": machine["date"],
            "versions": machine["versions"],
            "limits": {"copy_gbps": machine["copy_gbps"]},
        }

    def begin(self, op: str, backend: str, how: str) -> None:
        """Let the next outcome of this kind replace those of an earlier run."""
        self._begun.add((op, backend, how))

    def add_outcome(self, op: str, backend: str, how: str, fault: Fault | None) -> None:
        outcomes = self._proof(op, backend)["outcomes"]
        if (op, backend, how) in self._begun:
            self._begun.remove((op, backend, how))
            outcomes.pop(how, None)
        counted = outcomes.setdefault(how, {"passed": 0, "faults": []})
        if fault is None:
            counted["passed"] += 1
        else:
            counted["faults"].append(asdict(fault))
        files.write(self.path, self._content)

    def add_results(self, results: Iterable[Result]) -> None:
        """Record one case and direction: each backend's times, with its rivals' times."""
        timed = {result.contender: result for result in results if result.ms is not None}
        rivals = {name: r.ms for name, r in timed.items() if name not in BACKENDS}
        for backend, result in timed.items():
            if backend in rivals:
                continue
            entry = {name: getattr(result, name) for name in _KEPT + _TIMES}
            proof = self._proof(result.op, backend)
            others = [r for r in proof["results"] if any(r[n] != entry[n] for n in _CASE)]
            proof["results"] = [*others, entry | {"rivals_ms": rivals}]
        files.write(self.path, self._content)

    def _proof(self, op: str, backend: str) -> dict[str, Any]:
        """The entry for a backend's kernels with their present sources."""
        proofs: dict[str, Any] = self._content["ops"].setdefault(op, {})
        sources = None
        if self._root is not None and op in PROVEN:
            sources = sources_hash(PROVEN[op], backend, self._root)
        if backend not in proofs or proofs[backend]["sources"] != sources:
            proofs[backend] = {"sources": sources, "outcomes": {}, "results": []}
        return proofs[backend]


def gpu_backends(op: Proven) -> list[str]:
    """The op's backends that need evidence."""
    return [b for b in op.sources if "cpu" not in BACKENDS[b].devices]


def list_states(root: Path, records: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Op, GPU backend, GPU, and the state of its evidence."""
    lines = []
    for op in PROVEN.values():
        for backend in gpu_backends(op):
            proofs = {
                gpu: record["ops"][op.name][backend]
                for gpu, record in records.items()
                if backend in record["ops"].get(op.name, {})
            }
            now = sources_hash(op, backend, root) if proofs else ""
            lines += [(op.name, backend, gpu, _describe_state(p, now)) for gpu, p in proofs.items()]
            if not proofs:
                lines.append((op.name, backend, "-", "never run on a GPU"))
    for gpu, record in records.items():
        for backend, proof in record["ops"].get(OPTIMIZERS, {}).items():
            lines.append((OPTIMIZERS, backend, gpu, _describe_counts(proof)))
    return lines


def list_results(record: dict[str, Any], root: Path | None) -> list[Result]:
    """The times in an evidence file, marked as stale if the present sources differ."""
    results = []
    for op, proofs in record["ops"].items():
        for backend, proof in proofs.items() if op in PROVEN else ():
            if backend not in files_of(PROVEN[op]):  # a kernel that left
                continue
            stale = root is not None and proof["sources"] != sources_hash(PROVEN[op], backend, root)
            contender = f"{backend} (stale)" if stale else backend
            for kept in proof["results"]:
                figures = {name: kept[name] for name in _KEPT + _TIMES}
                eager = kept["eager_ms"]  # None: eager did not fit
                speed_up = None if eager is None else eager / kept["ms"]
                results.append(Result(op=op, contender=contender, speed_up=speed_up, **figures))
    for result in results:
        result.automatic = result.contender == _find_winner(results, result)
    return results


def list_rivals(record: dict[str, Any]) -> list[Result]:
    """The times of other packages, and of torch's other ways, in an evidence file."""
    results = []
    for op, proofs in record["ops"].items():
        for proof in proofs.values() if op in PROVEN else ():
            for kept in proof["results"]:
                about = {name: kept[name] for name in (*_CASE, "elements", "bytes", "flops")}
                for name, ms in kept["rivals_ms"].items():
                    if name != EAGER:
                        results.append(Result(op=op, contender=name, ms=ms, **about))
    return results


def hash_cpu_sources(names: Iterable[str], root: Path) -> dict[str, str]:
    """The hash of the CPU kernels' sources by op; a block depends on those of every op."""
    hashes = {
        name: sources_hash(op, "cpu", root) for name, op in PROVEN.items() if "cpu" in files_of(op)
    }
    every = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
    digests = {name: hashes.get(name, "" if name in PROVEN else every) for name in names}
    return {name: digest for name, digest in digests.items() if digest}


def mark_stale(results: Iterable[Result], then: dict[str, str], root: Path) -> list[Result]:
    """Results on a CPU, marked as stale unless `then` has the present sources' hashes."""
    results = list(results)
    now = hash_cpu_sources({result.op for result in results}, root)
    for result in results:
        if result.contender in ("cpu", *blocks.FUSED_WAYS) and then.get(result.op) != now.get(
            result.op
        ):
            result.contender += " (stale)"
    return results


def _find_winner(results: Iterable[Result], like: Result) -> str | None:
    """The automatic choice at this shape: the backend that is fastest in both directions, if any.

    For a rule it is always the rule's kernel.
    """
    if like.op in RULES:
        return like.contender
    full = {
        r.contender: r.speed_up or 0
        for r in results
        if (r.op, r.shape, r.variant, r.dtype) == (like.op, like.shape, like.variant, like.dtype)
        and r.direction == "full"
    }
    best = max(full, key=lambda name: full[name], default=None)
    return best if best is not None and full[best] >= 1 else None


def _describe_state(proof: dict[str, Any], sources_now: str) -> str:
    state = "current" if proof["sources"] == sources_now else "stale: its sources changed since"
    return f"{state} ({_describe_counts(proof)})"


def _describe_counts(proof: dict[str, Any]) -> str:
    passed, failed = count_passed(proof), len(list_faults(proof))
    return f"{passed} passed, {failed} failed, {len(proof['results'])} times"
