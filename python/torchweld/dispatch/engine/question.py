"""A question (which of several callables serves a class of calls?) and its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Only values that JSON can represent, and dtypes, since keys are stored in a file.
Key = Mapping[str, Any]
Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which of several callables serves a class of calls on a device."""

    # `kind` holds everything that correctness depends on. Only times depend on `size`, for example
    # the bit length of the number of rows.
    kind: Key
    size: int = 0
    device: torch.device
    # Serves where no contender does.
    baseline: str
    # The names of callables that can serve, the preferred one first.
    contenders: Sequence[str]
    # Returns the results of a contender on a sample of the call.
    run: Callable[[str], Results]
    # Return these results in the call's own precision, whose errors are accepted, and in float64.
    trusted: Callable[[], Results]
    exact: Callable[[], Results]
    # If no result is exact: the accepted error, as a part of the largest number.
    rounded: float = 0.0
    # Takes a name and returns a function that `torchweld tune` times, on the call's own inputs.
    # Until it has, the baseline serves. None: the first correct contender serves.
    prepare: Callable[[str], Callable[[], Any]] | None = None

    def __str__(self) -> str:
        return describe(json.loads(as_text(self.kind)), self.size)


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
