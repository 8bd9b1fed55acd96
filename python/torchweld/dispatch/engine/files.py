"""The user's cache: a folder of JSON files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The folder; without it, torchweld in the user's cache.
VARIABLE = "TORCHWELD_CACHE"


def find_folder() -> Path:
    """The folder of the files, which may not exist yet."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchweld"


def read(file: Path) -> dict[str, Any]:
    """The file's content; empty if the file is missing or damaged.

    A damaged file is put aside under another name.
    """
    try:
        content = json.loads(file.read_bytes())
        if isinstance(content, dict):
            return content
    except OSError:
        return {}
    except ValueError:
        pass
    aside = file.with_suffix(".damaged")
    with contextlib.suppress(OSError):  # another process may have put it aside
        os.replace(file, aside)
        warnings.warn(f"torchweld: {file} was damaged; it is now {aside}", stacklevel=2)
    return {}


def write(file: Path, content: dict[str, Any]) -> None:
    """Replace the file atomically, so that no reader sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(prefix=f"{file.stem}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(json.dumps(content, indent=1) + "\n")
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


@contextlib.contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """Hold a lock across processes; the system releases it even if the process crashes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
