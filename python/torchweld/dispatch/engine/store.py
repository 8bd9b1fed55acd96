"""Answers in a JSON file of the user's cache. Their keys are data, compared field by field."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweld.dispatch.engine.question import Answer, Key, as_text

# The folder of the cache; without it, torchweld in the user's cache.
FOLDER_VARIABLE = "TORCHWELD_CACHE"
# Files of answers that `torchweld tune --write` made, for machines whose cache starts empty.
SHIPPED_VARIABLE = "TORCHWELD_TUNED"


class Entry(NamedTuple):
    """An answer with its question's kind and size, and the conditions it holds under."""

    conditions: Key  # the device and the software that determine results and speed
    kind: Key
    size: int
    answer: Answer


class Store:
    """Answers in a file, and in memory those that could not be written.

    `shipped` files are only read. Answers found on this machine take precedence over theirs.
    """

    def __init__(self, file: Path, shipped: Sequence[Path] = ()) -> None:
        self.file, self._shipped = file, shipped
        self._memory: list[Entry] = []

    def entries(self, conditions: Key) -> list[Entry]:
        """Every answer under these conditions."""
        known = [entry for path in self._shipped for entry in _read_entries(path, is_own=False)]
        known += [*_read_entries(self.file), *self._memory]
        wanted = as_text(conditions)
        return [e for e in _take_last(known) if as_text(e.conditions) == wanted]

    def add(self, entry: Entry) -> None:
        """Keep an answer."""
        conditions, kind, size = json.loads(as_text(entry[:-1]))
        entry = Entry(conditions, kind, size, entry.answer)
        self._memory.append(entry)
        # Where the file cannot be written, only this process has the answer.
        with contextlib.suppress(OSError), hold_lock(self.file.with_suffix(".lock")):
            write(self.file, _take_last([*_read_entries(self.file), entry]))


def find_folder() -> Path:
    """The folder of the cache, which may not exist yet."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "torchweld"
    try:
        return Path.home() / ".cache" / "torchweld"
    except RuntimeError:  # a user without a name or HOME, as in some containers
        return Path(tempfile.gettempdir()) / f"torchweld-{os.getuid()}"


def list_shipped() -> list[Path]:
    """The files of answers that the environment names."""
    return [Path(path) for path in os.environ.get(SHIPPED_VARIABLE, "").split(os.pathsep) if path]


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Write a file of answers, for a Store or to ship."""
    listed = [entry._asdict() | {"answer": entry.answer._asdict()} for entry in entries]
    write_json(path, {"answers": listed})


def _take_last(entries: Sequence[Entry]) -> list[Entry]:
    """Without entries that a later one replaces."""
    return [*{as_text(entry[:-1]): entry for entry in entries}.values()]


def _read_entries(path: Path, is_own: bool = True) -> Iterator[Entry]:
    """The valid entries of a file."""
    listed = _read_json(path, is_own).get("answers")
    for record in listed if isinstance(listed, list) else ():
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            answer = Answer(**record["answer"])
            if isinstance(answer.backend, str) and isinstance(record["kind"], dict):
                yield Entry(record["conditions"], record["kind"], record["size"], answer)


def _read_json(file: Path, is_own: bool) -> dict[str, Any]:
    """The file's content; empty if the file is missing or damaged.

    A damaged file of the cache is put aside under another name; a user's is left where it is.
    """
    try:
        content = json.loads(file.read_bytes())
        if isinstance(content, dict):
            return content
    except OSError:
        return {}
    except ValueError:
        pass
    if not is_own:
        message = f"torchweld: {file}, of {SHIPPED_VARIABLE}, is no file of answers"
        warnings.warn(message, stacklevel=2)
        return {}
    aside = file.with_suffix(".damaged")
    with contextlib.suppress(OSError):  # another process may have put it aside
        os.replace(file, aside)
        warnings.warn(f"torchweld: {file} was damaged; it is now {aside}", stacklevel=2)
    return {}


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
