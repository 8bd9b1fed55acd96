"""Stores answers in one JSON file. Keys are data, and look-ups compare them field by field."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchweld.dispatch.engine import files
from torchweld.dispatch.engine.question import Answer, Key

# A file of answers that `torchweld tune --write` made, for machines whose cache starts empty.
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
        self._memory: dict[str, Entry] = {}
        self._read: dict[Path, tuple[Any, list[Entry]]] = {}

    def entries(self, conditions: Key) -> list[Entry]:
        """Every answer under these conditions."""
        by_identity: dict[str, Entry] = {}
        for path in (*self._shipped, self.file):
            by_identity |= {_identity(entry): entry for entry in self._entries_of(path)}
        by_identity |= self._memory
        return [entry for entry in by_identity.values() if entry.conditions == conditions]

    def answers(self, conditions: Key, kind: Key) -> dict[int, Answer]:
        """The answers of a kind, by size."""
        kind = _as_kept(kind)
        return {e.size: e.answer for e in self.entries(conditions) if e.kind == kind}

    def add(self, entry: Entry) -> None:
        """Keep an answer."""
        entry = entry._replace(conditions=_as_kept(entry.conditions), kind=_as_kept(entry.kind))
        self._memory[_identity(entry)] = entry
        # Where the file cannot be written, only this process has the answer.
        with contextlib.suppress(OSError), files.hold_lock(self.file.with_suffix(".lock")):
            by_identity = {_identity(e): e for e in self._entries_of(self.file)}
            write(self.file, [*(by_identity | {_identity(entry): entry}).values()])

    def _entries_of(self, path: Path) -> list[Entry]:
        """The entries of a file, read again only after it has changed."""
        try:
            status = os.stat(path)
        except OSError:
            return []
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        known = self._read.get(path)
        if known is None or known[0] != stamp:
            known = stamp, list(_read(path))
            self._read[path] = known
        return known[1]


def shipped_files() -> list[Path]:
    """The files of answers that the environment names."""
    return [Path(path) for path in os.environ.get(SHIPPED_VARIABLE, "").split(os.pathsep) if path]


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Write a file of answers, for a Store or to ship."""
    listed = [entry._asdict() | {"answer": entry.answer._asdict()} for entry in entries]
    files.write(path, {"answers": listed})


def _read(path: Path) -> Iterator[Entry]:
    """The valid entries of a file."""
    listed = files.read(path).get("answers")
    for record in listed if isinstance(listed, list) else ():
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            answer = Answer(**record["answer"])
            if isinstance(answer.backend, str) and isinstance(record["kind"], dict):
                yield Entry(record["conditions"], record["kind"], record["size"], answer)


def _identity(entry: Entry) -> str:
    return json.dumps([entry.conditions, entry.kind, entry.size], sort_keys=True)


def _as_kept(key: Key) -> dict[str, Any]:
    """A key as JSON returns it, with lists instead of tuples."""
    kept: dict[str, Any] = json.loads(json.dumps(dict(key)))
    return kept
