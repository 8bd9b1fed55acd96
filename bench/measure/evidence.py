"""Evidence from GPUs, which `bench/measure/gpu.py` records: times, and whether they are still so.

A row is current if its op's sources are what was measured, or if they compile to what was measured:
`launched.py` has how. `--check-evidence` compiles, and keeps the present sources' code in
evidence/compiled.tsv, so that nobody else need.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from torchweld.bench.measure.runner import Result
from torchweld.bench.models import blocks
from torchweld.ops.optimizer.rule import RULES, Rule
from torchweld.registry import BACKENDS, EAGER, OPS, Op

Proven = Op | Rule
PROVEN: dict[str, Proven] = {**OPS, **RULES}
# The fields of a result that identify a case and direction, and those that the evidence keeps.
CASE = ("shape", "variant", "dtype", "direction")
_ABOUT = (*CASE, "elements", "bytes", "flops")
_TIMES = ("peak_bytes", "ms", "p20", "p80", "eager_ms", "gbps", "limit_ms", "share")
KEPT = (*_ABOUT, *_TIMES, "mhz", "peak_tflops")  # older rows lack the last two

# Strings and character literals are matched too: they may contain what looks like a comment.
_C_TOKEN = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
# Begins a block that CUDA's compilers never see.
_CPU_ONLY = "#if !defined(TW_CUDA)"


# --- Sources and their hashes ---------------------------------------------------------------------


def root() -> Path | None:
    """The repository that this package runs from; an installed wheel has no sources."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "csrc").is_dir() and (folder / "tests").is_dir() else None


def files_of(op: Proven) -> dict[str, tuple[str, ...]]:
    """Kernel files by backend. A rule declares only backends that need evidence."""
    if isinstance(op, Rule):
        cpu = (*op.kernel_files("cpu", "cpp"), "csrc/cpu/sum_of_squares.cpp")
        return {"cpu": cpu, **op.sources}
    return {backend: tuple(files) for backend, files in op.sources.items()}


def gpu_backends(op: Proven) -> list[str]:
    """The op's backends that need evidence."""
    return [b for b in op.sources if "cpu" not in BACKENDS[b].devices]


def find_sources(op: Proven, backend: str, folder: Path) -> list[Path]:
    """All files that affect the backend's kernels, derived from includes and imports.

    Native kernels add the binding with the same name as the kernel's file, and the compiler flags.
    """
    roots = [folder / name for name in files_of(op)[backend]]
    native = [path for path in roots if path.suffix != ".py"]
    roots += [folder / "csrc" / "bind" / f"{path.stem}.cpp" for path in native]
    roots += [folder / "csrc" / "flags.py"] if native else []
    return find_used(roots, folder)


def find_used(roots: Iterable[Path], folder: Path) -> list[Path]:
    """These files, and this repository's files that they include or import."""
    paths: set[Path] = set()
    open_ends = [*roots]
    while open_ends:
        path = open_ends.pop()
        if path not in paths and path.exists():
            paths.add(path)
            if path.suffix == ".py":
                named = [f"{path.parent}/{name}.py" for name in _list_imports(path.read_text())]
                open_ends += [Path(os.path.normpath(each)) for each in named]
            else:
                open_ends += [folder / "csrc" / n for n in _INCLUDE.findall(stripped(path))]
    return sorted(paths)


@functools.cache
def _list_imports(text: str) -> list[str]:
    """What a module imports by a relative import, as paths from its folder.

    `from . import one` names a module too: the kernels that it had were in no hash.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [[each.name] for each in node.names]
            at = [*[".."] * (node.level - 1), *(node.module or "").split(".")]
            found += ["/".join([*filter(None, at), *name]) for name in ([], *names)]
    return found


def sources_hash(op: Proven, backend: str, folder: Path) -> str:
    """SHA-256 of the backend's sources, without what compilers ignore."""
    return hash_of(find_sources(op, backend, folder), folder, on_cuda=backend == "cuda")


def hash_of(paths: Iterable[Path], folder: Path, on_cuda: bool = False) -> str:
    """SHA-256 of files, without comments, docstrings and blank lines.

    With `on_cuda` also without the blocks that are left out of CUDA's build.
    """
    digest = hashlib.sha256()
    for path in paths:
        text = _drop_cpu_blocks(stripped(path)) if on_cuda else stripped(path)
        digest.update(f"{path.relative_to(folder)}\n{text}\n".encode())
    return digest.hexdigest()


def find_device_code(op: Proven, folder: Path) -> str:
    """The hash of what nvcc compiles: an op's CUDA files with their includes in place, and flags.

    Files' names, comments, bindings and blocks of the CPU's build do not count.
    """
    seen: set[Path] = set()

    def expand(path: Path) -> str:
        if path in seen or not path.exists():
            return ""
        seen.add(path)
        text = _drop_cpu_blocks(stripped(path))
        return _INCLUDE.sub(lambda found: expand(folder / "csrc" / found[1]), text)

    roots = [folder / name for name in files_of(op)["cuda"]]
    flags = stripped(folder / "csrc" / "flags.py").splitlines()
    told = [line.strip() for line in flags if "nvcc" in line.lower()]
    lines = "\n".join([*map(expand, roots), *told]).splitlines()
    text = "\n".join(line for line in lines if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _drop_cpu_blocks(text: str) -> str:
    """The text without the blocks of `#if !defined(TW_CUDA)` that have no other branch."""
    kept: list[str] = []
    depth = 0
    for line in text.splitlines():
        word = line.replace(" ", "")
        if depth == 0 and line != _CPU_ONLY:
            kept.append(line)
            continue
        depth += word.startswith("#if") - word.startswith("#endif")
        if depth == 1 and word.startswith("#el"):
            raise ValueError(f"{_CPU_ONLY} has another branch: begin it with CUDA's")
    return "\n".join(kept)


def stripped(path: Path) -> str:
    """The file's text without comments, docstrings and blank lines."""
    return _strip(path.read_text(), path.suffix == ".py")


@functools.cache
def _strip(text: str, is_python: bool) -> str:
    if is_python:
        text = _drop_python_comments(text)
    else:
        text = _C_TOKEN.sub(lambda token: token[1] or " ", text)
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _drop_python_comments(text: str) -> str:
    """The text without comments and docstrings."""
    spans, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        starts_a_statement = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts_a_statement):
            spans.append((token.start, token.end))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    lines = text.splitlines()
    for (first, column), (last, end) in reversed(spans):
        lines[first - 1 : last] = [lines[first - 1][:column] + lines[last - 1][end:]]
    return "\n".join(lines)


# --- Records --------------------------------------------------------------------------------------


@functools.cache
def read_records() -> dict[str, dict[str, Any]]:
    """The evidence files in the package, by GPU name."""
    folder = resources.files("torchweld.bench") / "evidence"
    paths = [f for f in folder.iterdir() if f.name.endswith(".json")] if folder.is_dir() else []
    loaded = [json.loads(f.read_text()) for f in paths]
    return {record["gpu"]: record for record in loaded}


# The code of present sources: op, sources, case, version of Triton, hash.
COMPILED = "compiled.tsv"
_HEAD = ("op", "sources", "case", "triton", "code")
Codes = dict[tuple[str, str, str], dict[str, str]]  # by op, sources and case: by version of Triton


@functools.cache
def read_codes() -> Codes:
    """What the sources of COMPILED compile to."""
    path = resources.files("torchweld.bench") / "evidence" / COMPILED
    found: Codes = {}
    for line in path.read_text().splitlines()[1:] if path.is_file() else ():
        op, sources, case, version, code = line.split("\t")
        found.setdefault((op, sources, case), {})[version] = code
    return found


def write_codes(path: Path, codes: Codes) -> None:
    """Write COMPILED."""
    lines = [(*at, *one) for at, by in sorted(codes.items()) for one in sorted(by.items())]
    path.write_text("".join("\t".join(line) + "\n" for line in [_HEAD, *lines]))
    read_codes.cache_clear()


def name_row(row: dict[str, Any]) -> str:
    """The case and direction of a row, in words."""
    return " ".join(filter(None, ("x".join(map(str, row["shape"])), *(row[k] for k in CASE[1:]))))


def is_current(op: str, proof: dict[str, Any], row: dict[str, Any], now: str) -> bool:
    """Whether sources with the hash `now` launch what a row measured.

    It is so if a version of Triton compiles both to the same.
    """
    codes = read_codes().get((op, now, name_row(row)), {})
    return proof["sources"] == now or bool(row.get("code", {}).items() & codes.items())


def list_states(folder: Path, records: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Op, GPU backend, GPU, and the state of its evidence."""
    lines = list[tuple[str, ...]]()
    for op in PROVEN.values():
        for backend in gpu_backends(op):
            now, found = sources_hash(op, backend, folder), False
            for gpu, record in records.items():
                if proof := record["ops"].get(op.name, {}).get(backend):
                    state = f"{_describe_state(op.name, proof, now)} ({describe_counts(proof)})"
                    lines.append((op.name, backend, gpu, state))
                    found = True
            if not found:
                lines.append((op.name, backend, "-", "never run on a GPU"))
    return lines


def _describe_state(op: str, proof: dict[str, Any], now: str) -> str:
    if proof["sources"] == now:
        return "current"
    stale = [name_row(row) for row in proof["results"] if not is_current(op, proof, row, now)]
    count = len(proof["results"])
    if count and not stale:
        return "current: its sources changed since, and compile to the same"
    if len(stale) == count:
        return "stale: its sources changed since"
    return f"stale in {len(stale)} of {count} cases: {'; '.join(stale)}"


def describe_counts(proof: dict[str, Any]) -> str:
    """How many tests and cases a kernel passed and failed, and how many times it has."""
    counted = proof["outcomes"].values()
    passed, failed = sum(c["passed"] for c in counted), sum(len(c["faults"]) for c in counted)
    return f"{passed} passed, {failed} failed, {len(proof['results'])} times"


def list_results(record: dict[str, Any], folder: Path | None) -> list[Result]:
    """The times in an evidence file, marked as stale if the present sources differ."""
    results = []
    for op, proofs in record["ops"].items():
        for backend, proof in proofs.items() if op in PROVEN else ():
            if backend not in files_of(PROVEN[op]):  # a kernel that left
                continue
            now = "" if folder is None else sources_hash(PROVEN[op], backend, folder)
            for kept in proof["results"]:
                is_so = not now or is_current(op, proof, kept, now)
                contender = backend if is_so else f"{backend} (stale)"
                eager = kept["eager_ms"]  # None: eager did not fit
                speed_up = None if eager is None else eager / kept["ms"]
                figures = {name: kept.get(name) for name in KEPT}
                results.append(Result(op=op, contender=contender, speed_up=speed_up, **figures))
    for result in results:
        result.automatic = result.contender == _find_winner(results, result)
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


def list_rivals(record: dict[str, Any]) -> list[Result]:
    """The times of other packages, and of torch's other ways, in an evidence file."""
    return [
        Result(op=op, contender=name, ms=ms, **{entry: kept[entry] for entry in _ABOUT})
        for op, proofs in record["ops"].items()
        for proof in (proofs.values() if op in PROVEN else ())
        for kept in proof["results"]
        for name, ms in kept["rivals_ms"].items()
        if name != EAGER
    ]


# --- The CPU's results ----------------------------------------------------------------------------


def hash_cpu_sources(names: Iterable[str], folder: Path) -> dict[str, str]:
    """The hash of the CPU kernels' sources by op; a block depends on every op's sources."""
    hashes = {
        name: sources_hash(op, "cpu", folder)
        for name, op in PROVEN.items()
        if "cpu" in files_of(op)
    }
    every = hashlib.sha256("".join(hashes.values()).encode()).hexdigest()
    digests = {name: hashes.get(name, "" if name in PROVEN else every) for name in names}
    return {name: digest for name, digest in digests.items() if digest}


def mark_stale(results: Iterable[Result], then: dict[str, str], folder: Path) -> list[Result]:
    """Results on a CPU, marked as stale unless `then` has the present sources' hashes."""
    results = list(results)
    now = hash_cpu_sources({result.op for result in results}, folder)
    for result in results:
        is_ours = result.contender in ("cpu", *blocks.FUSED_WAYS)
        if is_ours and then.get(result.op) != now.get(result.op):
            result.contender += " (stale)"
    return results
