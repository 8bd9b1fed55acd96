"""Files that are replaced as a whole, and locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Replace the file's content atomically."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace the file's text atomically."""
    replace_file(file, lambda new: new.write_text(text))


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Replace the file atomically: no reader sees half of it, and an error leaves the old one.

    `write` gets the path of the new file, which has the same ending.
    """
    file = file.resolve()  # the file that a link leads to
    if file.exists() and not file.is_file():  # a pipe or a terminal
        write(file)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.stem}.{uuid.uuid4().hex}{file.suffix}")
    try:
        write(unfinished)
        if file.exists():
            shutil.copymode(file, unfinished)
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
