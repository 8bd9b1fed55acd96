"""What is kept for the user between processes: JSON files in a folder of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# The folder; without it, torchweld in the user's cache.
VARIABLE = "TORCHWELD_CACHE"


def folder() -> Path:
    """Where the files are, or will be."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchweld"


def read(file: Path) -> dict[str, Any]:
    """The file's content; a file that is missing or cannot be read is empty."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def write(file: Path, content: dict[str, Any]) -> None:
    """Replaces the file: a reader, or the next process, never meets half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, file)
