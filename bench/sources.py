"""Kernel sources and their hashes, which tell whether evidence fits the present code."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

from torchweld.ops.optimizer.rule import Rule
from torchweld.registry import Op

# Strings and character literals are matched too: they may contain what looks like a comment.
_C_TOKEN = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)
# Begins a block that CUDA's compilers never see.
_CPU_ONLY = "#if !defined(TW_CUDA)"
_INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)


def root() -> Path | None:
    """The repository that this package runs from; an installed wheel has no sources."""
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / "csrc").is_dir() and (folder / "tests").is_dir() else None


def files_of(op: Op | Rule) -> dict[str, tuple[str, ...]]:
    """Kernel files by backend. A rule declares only backends that need evidence."""
    if isinstance(op, Rule):
        cpu = (*op.kernel_files("cpu", "cpp"), "csrc/cpu/sum_of_squares.cpp")
        return {"cpu": cpu, **op.sources}
    return {backend: tuple(files) for backend, files in op.sources.items()}


def find_sources(op: Op | Rule, backend: str, folder: Path) -> list[Path]:
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
    paths: dict[Path, None] = {}
    open_ends = [*roots]
    while open_ends:
        path = open_ends.pop()
        if path not in paths and path.exists():
            paths[path] = None
            open_ends += _list_uses(path, folder)
    return sorted(paths)


def _list_uses(path: Path, folder: Path) -> list[Path]:
    """This repository's files that a file includes or imports."""
    names = _list_names(stripped(path), path.suffix == ".py")
    if path.suffix == ".py":
        return [path.parent / f"{module}.py" for module in names]
    return [folder / "csrc" / name for name in names]


@functools.cache
def _list_names(text: str, is_python: bool) -> list[str]:
    """The modules that a text imports, or the files that it includes."""
    return (_IMPORT if is_python else _INCLUDE).findall(text)


def sources_hash(op: Op | Rule, backend: str, folder: Path) -> str:
    """SHA-256 of the backend's sources, without what compilers ignore."""
    return hash_of(find_sources(op, backend, folder), folder, on_cuda=backend == "cuda")


def hash_of(paths: Iterable[Path], folder: Path, on_cuda: bool = False) -> str:
    """SHA-256 of files, without comments, docstrings and blank lines.

    With `on_cuda` also without the blocks that are left out of CUDA's build.
    """
    digest = hashlib.sha256()
    for path in paths:
        text = stripped(path)
        text = _drop_cpu_blocks(text) if on_cuda else text
        digest.update(f"{path.relative_to(folder)}\n{text}\n".encode())
    return digest.hexdigest()


def _drop_cpu_blocks(text: str) -> str:
    """The text without the blocks of `#if !defined(TW_CUDA)` that have no other branch."""
    kept: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line != _CPU_ONLY:
            kept.append(line)
            continue
        depth = 1
        while depth:
            word = next(lines).replace(" ", "")
            depth += word.startswith("#if") - word.startswith("#endif")
            if depth == 1 and word.startswith("#el"):
                raise ValueError(f"{_CPU_ONLY} has another branch: begin it with CUDA's")
    return "\n".join(kept)


def stripped(path: Path) -> str:
    """The file's text without comments, docstrings and blank lines."""
    return _stripped(path.read_text(), path.suffix == ".py")


@functools.cache
def _stripped(text: str, is_python: bool) -> str:
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
