"""What a call decided, noted for the short way of the calls that follow (cache.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A call in its final form: what ran, on which arguments, and what it returned."""

    op: Any  # None for a function that is no op's
    function: Callable[..., Any]
    inputs: Sequence[Any]
    result: Any
    # What made the first inputs of raw arguments; None: they are raw arguments themselves.
    arrange: Callable[..., Sequence[Any]] | None = None
    given: Sequence[Any] = ()
    kept: int = 0  # how many inputs follow what `arrange` made
    # The numbers of elements of the first tensor for which this holds. They are the last fields.
    least: int = 0
    below: float = float("inf")


class _Recorder(threading.local):
    notes: list[Note] | None = None  # of the public function that runs; None: nobody listens
    is_final: bool = True


RECORDER = _Recorder()


def leave_open() -> None:
    """Say that the next call like this one may be decided otherwise."""
    RECORDER.is_final = False


def run_final(
    function: Callable[..., Any], *inputs: Any, least: int = 0, below: float = float("inf")
) -> Any:
    """Run a function of raw arguments, which serves later calls like this one as it is.

    It serves if the first tensor has at least `least` and fewer than `below` elements.
    """
    notes = RECORDER.notes
    before = len(notes) if notes is not None else 0
    result = function(*inputs)
    if notes is not None:  # in place of its parts
        notes[before:] = [Note(None, function, inputs, result, least=least, below=below)]
    return result
