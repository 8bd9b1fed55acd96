"""Kernel sources and their hash, which says whether evidence is of the code as it is now."""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from pathlib import Path

from torchweld.ops.optimizer.rule import Rule
from torchweld.registry import Op

# Strings and character literals are kept: they may hold what looks like a comment.
_C_TOKEN = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)


def root() -> Path | None:
    """The repository that this package runs from; an installed wheel has no sources."""
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / "csrc").is_dir() and (folder / "tests").is_dir() else None


def sources_hash(op: Op | Rule, backend: str, folder: Path) -> str:
    """SHA-256 of the backend's kernel sources, comments and blank lines aside."""
    digest = hashlib.sha256()
    for path in (folder / name for name in op.sources[backend]):
        text = stripped(path) if path.exists() else "no such file"
        digest.update(f"{path.name}\n{text}\n".encode())
    return digest.hexdigest()


def stripped(path: Path) -> str:
    """The file's text without comments and blank lines."""
    text = path.read_text()
    if path.suffix == ".py":
        text = _without_python_comments(text)
    else:
        text = _C_TOKEN.sub(lambda token: token[1] or " ", text)
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _without_python_comments(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(lines)
