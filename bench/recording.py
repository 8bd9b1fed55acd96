"""Evidence from a GPU: record the contract's count and the times, and tell whether it is stale."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchweld.bench.runner import Result
from torchweld.bench.sources import sources_hash
from torchweld.dispatch import cache
from torchweld.ops.optimizer.rule import RULES, Rule
from torchweld.registry import BACKENDS, OPS, Op

Proven = Op | Rule
PROVEN: dict[str, Proven] = {**OPS, **RULES}
# The parts of a result that the evidence keeps.
_KEPT = ("shape", "variant", "dtype", "direction", "elements", "bytes", "flops", "peak_bytes")
_TIMES = ("ms", "p20", "p80", "eager_ms", "gbps", "limit_ms", "share")


class Record:
    """The evidence file of a GPU, written after every step, so that an interrupted run keeps its
    steps.

    `root` is the repository with the sources; an installed package has none.
    """

    def __init__(self, path: Path, machine: dict[str, Any], root: Path | None) -> None:
        self.path, self._root = path, root
        # Unreadable evidence is an error: the first step would overwrite it.
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

    def begin(self, op: Proven, backend: str) -> None:
        """Forget the evidence of older sources."""
        self._content["ops"].setdefault(op.name, {})[backend] = {
            "sources": sources_hash(op, backend, self._root) if self._root else None,
            "passed": 0,
            "failed": 0,
            "results": [],
        }
        cache.write(self.path, self._content)

    def add_outcome(self, op: str, backend: str, passed: bool) -> None:
        self._content["ops"][op][backend]["passed" if passed else "failed"] += 1
        cache.write(self.path, self._content)

    def add_results(self, results: Iterable[Result]) -> None:
        """Times of one case and direction: each backend's, with its rivals' beside them."""
        timed = {result.contender: result for result in results if result.ms is not None}
        rivals = {name: r.ms for name, r in timed.items() if name not in BACKENDS}
        for backend, result in timed.items():
            if backend in rivals or result.eager_ms is None:
                continue
            entry = {name: getattr(result, name) for name in _KEPT + _TIMES}
            proof = self._content["ops"][result.op][backend]
            proof["results"].append(entry | {"rivals_ms": rivals})
        cache.write(self.path, self._content)


def gpu_backends(op: Proven) -> list[str]:
    """The op's backends that need evidence."""
    return [b for b in op.sources if "cpu" not in BACKENDS[b].devices]


def standing(root: Path, records: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
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
            lines += [(op.name, backend, gpu, _worth(p, now)) for gpu, p in proofs.items()]
            if not proofs:
                lines.append((op.name, backend, "-", "never run on a GPU"))
    return lines


def results(record: dict[str, Any], root: Path | None) -> list[Result]:
    """The times of an evidence file, marked as stale if the sources here differ."""
    found = []
    for op, proofs in record["ops"].items():
        for backend, proof in proofs.items():
            stale = root is not None and proof["sources"] != sources_hash(PROVEN[op], backend, root)
            contender = f"{backend} (stale)" if stale else backend
            for kept in proof["results"]:
                figures = {name: kept[name] for name in _KEPT + _TIMES}
                speed_up = kept["eager_ms"] / kept["ms"]
                found.append(Result(op=op, contender=contender, speed_up=speed_up, **figures))
    for result in found:
        result.automatic = result.contender == _winner(found, result)
    return found


def _winner(results: Iterable[Result], like: Result) -> str | None:
    """The automatic choice at this shape: the backend that is fastest in both directions, if any.

    For a rule it is the rule's kernel, however fast torch's optimizer is.
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


def _worth(proof: dict[str, Any], sources_now: str) -> str:
    state = "current" if proof["sources"] == sources_now else "stale: its sources changed since"
    counts = f"{proof['passed']} passed, {proof['failed']} failed, {len(proof['results'])} times"
    return f"{state} ({counts})"
