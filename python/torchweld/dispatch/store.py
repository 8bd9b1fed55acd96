"""Answers in a JSON file of the user's cache. Their keys are data, compared field by field."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweld.files import hold_lock, write_json

# Only values that JSON can represent, and dtypes, since keys are stored in a file.
Key = Mapping[str, Any]
# The folder of the cache; without it, torchweld in the user's cache.
FOLDER_VARIABLE = "TORCHWELD_CACHE"
# Files of answers that `torchweld tune --write` made, for machines whose cache starts empty.
SHIPPED_VARIABLE = "TORCHWELD_TUNED"


class Answer(NamedTuple):
    """The backend for a class of calls, what is wrong with others, and the times it is based on."""

    backend: str
    faults: dict[str, str]
    ms: dict[str, float]
    date: str = ""

    def why_not(self, backend: str) -> str | None:
        """Why this backend does not serve; None if it does."""
        if backend == self.backend:
            return None
        if backend in self.faults:
            return f"at its first use here: {self.faults[backend]}"
        return f"{self.backend} comes first"


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


def as_text(key: Any) -> str:
    """A key as a file has it: dtypes are their names, and tuples are lists."""
    return json.dumps(key, default=lambda x: str(x).removeprefix("torch."))


def describe(kind: Key, size: int) -> str:
    """A class of calls in words."""
    words = [word for name, value in kind.items() for word in _words(name, value)]
    return ", ".join([*words, *([f"sizes below 2^{size}"] if size else [])])


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, (list, tuple)):
        joined = " ".join(str(one) for one in value)
        return [joined] if joined else []
    return [value] if isinstance(value, str) else [f"{name} {value}"]
