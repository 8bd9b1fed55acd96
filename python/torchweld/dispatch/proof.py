"""The check of a GPU's kernels at their first use: who is asked, what is compared, what is kept.

A call on a GPU asks which backend serves calls of its class: this op, these dtypes, flags, widths,
this alignment and direction. The answer is found once:

1. `pick` knows the answers of this process, and makes a `Question` for a class without one:
   op_proof.py for an op, tile_proof.py for a tile, bare.py, ops/optimizer/proof.py and
   ops/gemm/fused_choice.py for theirs. A question names its candidates in the declared order, and
   has a sample: the call's own first rows.
2. `Checker.ask` looks the answer up in the user's cache (store.py), where an answer holds for one
   GPU, one hash of all kernels' sources, and one version of torch and of Triton.
3. Without one each candidate runs on the sample, apart from the caller: `Judge` compares the
   results with the reference in float64, and two launches by their bits.
4. The first right candidate serves, and the answer is kept. A wrong one, or one that raises, never
   serves under these conditions: one warning says what was wrong, and `torchweld.explain` repeats
   it. Where no candidate is right, the fallback serves: eager torch.

Nothing is timed in a user's process. `torchweld tune` sets `choose_fastest` in its own, times tiles
and keeps which one is the fastest.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import json
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch import store
from torchweld.dispatch.store import Answer, Entry, Key, Store, as_text, describe
from torchweld.isolate import apart
from torchweld.numerics import Bound
from torchweld.version import __version__

# off: the fallback serves. kept: stored answers are used as well. check: candidates are checked at
# first use.
VARIABLE = "TORCHWELD_TUNE"
MODES = ("off", "kept", "check")
_PACKAGE = Path(__file__).parents[1]

Results = Mapping[str, torch.Tensor]
Calls = Mapping[str, Callable[[], Any]]


def read_mode(environment: Mapping[str, str]) -> str:
    """The mode that the environment asks for; "check" without one."""
    asked = environment.get(VARIABLE, "check")
    if asked not in MODES:
        warnings.warn(f"{VARIABLE} is {asked!r}; accepted: {', '.join(MODES)}", stacklevel=2)
        return "check"
    return asked


mode = read_mode(os.environ)
# Set by `torchweld tune`: the name that serves among right calls, the fallback's first, and the
# milliseconds of each.
choose_fastest: Callable[[Calls], tuple[str, dict[str, float]]] | None = None
# Backends by the mode and the class of the call.
_served: dict[tuple[str, Hashable], str] = {}
# How many questions were left open. What was decided meanwhile is not kept for later calls.
left_open = 0
# Held during a check. Meanwhile the fallback serves the questions of other threads, such as
# autograd's; questions that the check's own thread asks have checks of their own.
_checking = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which of several callables serves a class of calls on a device."""

    # `kind` holds everything that correctness depends on. Only times depend on `size`, for example
    # the bit length of the number of rows.
    kind: Key
    size: int = 0
    device: torch.device
    # Serves where no candidate does.
    fallback: str
    # The names of callables that can serve, the preferred one first.
    candidates: Sequence[str]
    # Returns the results of a candidate on a sample of the call.
    run: Callable[[str], Results]
    # Return these results in the call's own precision, whose errors are accepted, and in float64.
    trusted: Callable[[], Results]
    exact: Callable[[], Results]
    # If no result is exact: the accepted error, as a part of the largest number.
    rounded: float = 0.0
    # Takes a name and returns a function that `torchweld tune` times, on the call's own inputs.
    # Until it has, the fallback serves. None: the first correct candidate serves.
    prepare: Callable[[str], Callable[[], Any]] | None = None

    def __str__(self) -> str:
        return describe(json.loads(as_text(self.kind)), self.size)


def pick(call_class: Hashable, make: Callable[[], Question]) -> tuple[str, bool]:
    """The backend for a class of calls, and whether it is final for this process."""
    global left_open
    known = _served.get((mode, call_class))
    if known is not None:
        return known, True
    question = make()
    # Where no backend can serve this call nothing is kept: the next one may differ.
    answer = checker_for(question.device).ask(question) if question.candidates else None
    if answer is None:
        left_open += 1
        return question.fallback, False
    _served[mode, call_class] = answer.backend
    return answer.backend, True


def can_check(device: torch.device) -> bool:
    """Whether candidates are checked on this device: only on a GPU."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: no check may run meanwhile."""
    return device.type == "cuda" and state.is_capturing()


class Checker:
    """Answers questions about one device; `conditions` describe the device and its software."""

    def __init__(self, kept: Store, conditions: Key) -> None:
        self._store, self._conditions = kept, conditions
        self.file = kept.file
        # Where a check could not be made, for lack of memory for one.
        self._of_this_process: dict[str, Answer] = {}
        self._said: set[str] = set()

    def ask(self, question: Question) -> Answer | None:
        """The answer; None if the fallback serves this call and the next one may ask again.

        Errors in candidates do not propagate.
        """
        if mode == "off":
            return Answer(question.fallback, {}, {})
        if (known := self.known(question)) is not None:
            return known
        if mode == "kept" or (question.prepare is not None and choose_fastest is None):
            return Answer(question.fallback, {}, {})
        if not can_check(question.device):
            return None
        if is_capturing(question.device):
            self._say_once(f"{question}: nothing is tried while a graph is captured")
            return None
        if not _checking.acquire(blocking=False):
            return None
        try:
            return self._check(question)
        finally:
            _checking.release()

    def known(self, question: Question) -> Answer | None:
        """The stored answer for this question, if its backend is among those that can serve."""
        answer = self.find(question.kind, question.size)
        names = (question.fallback, *question.candidates)
        return answer if answer is not None and answer.backend in names else None

    def find(self, kind: Key, size: int) -> Answer | None:
        """The stored answer for a kind at the nearest size; while sizes are timed, at this one."""
        if (answer := self._of_this_process.get(_name(kind, size))) is not None:
            return answer
        of_kind = [e for e in self.entries() if _name(e.kind, size) == _name(kind, size)]
        if choose_fastest is not None:
            of_kind = [entry for entry in of_kind if entry.size == size]
        nearest = min(of_kind, key=lambda entry: abs(entry.size - size), default=None)
        return nearest and nearest.answer

    def find_backends(self, **fields: Any) -> set[str]:
        """All stored backends for kinds with these fields, at any size; none if the mode is off."""
        if mode == "off":
            return set()
        return {
            entry.answer.backend
            for entry in self.entries()
            if as_text({name: entry.kind.get(name) for name in fields}) == as_text(fields)
        }

    def agreed(self, fallback: str, **fields: Any) -> str:
        """The backend of all such answers if they agree, else the fallback."""
        backends = self.find_backends(**fields)
        return backends.pop() if len(backends) == 1 else fallback

    def entries(self) -> list[Entry]:
        """Every stored answer for this device and software."""
        return self._store.entries(self._conditions)

    def _check(self, question: Question) -> Answer:
        faults: dict[str, str] = {}
        try:
            with apart(question.device):
                self._find_faults(question, faults)
                right = [name for name in question.candidates if name not in faults]
                chosen, ms = _choose(question, right)
        except Exception as error:  # the user's call continues
            self._say_once(f"{question} could not be tried: {in_a_line(error)}")
            answer = Answer(question.fallback, faults, {})
            self._of_this_process[_name(question.kind, question.size)] = answer
            return answer
        answer = Answer(chosen, faults, ms, datetime.date.today().isoformat())
        self._store.add(Entry(self._conditions, question.kind, question.size, answer))
        return answer

    def _find_faults(self, question: Question, faults: dict[str, str]) -> None:
        """Add the faults of wrong candidates, each with a warning."""
        judge = Judge(question.exact(), question.trusted(), question.rounded)
        for name in question.candidates:
            reason = judge.find_fault_of(functools.partial(question.run, name))
            if reason is None:
                continue
            faults[name] = reason
            if not reason.startswith("OutOfResources"):  # the tile is too large for this GPU
                message = f"torchweld: {name} for {question} is not used: {reason}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"torchweld: {message}", RuntimeWarning, stacklevel=2)


def _name(kind: Key, size: int) -> str:
    return f"{size} {as_text(kind)}"


def _choose(question: Question, right: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The right candidate that serves, and the times that `torchweld tune` took for it."""
    if not right or question.prepare is None or choose_fastest is None:
        return next(iter(right), question.fallback), {}
    return choose_fastest({name: question.prepare(name) for name in (question.fallback, *right)})


# --- What is compared -----------------------------------------------------------------------------

# This many rows of a real input are enough, since a kernel treats all blocks alike. The number is a
# prime: no tile divides it, so that the ragged end is checked too.
ROWS = 4093


class Judge:
    """Judges candidates by exact results, and by the errors of trusted results (numerics.Bound)."""

    def __init__(self, exact: Results, trusted: Results, rounded: float = 0.0) -> None:
        self._bounds = {name: Bound(value, trusted[name], rounded) for name, value in exact.items()}

    def find_fault(self, results: Results) -> str | None:
        """The fault in the results; None if there is none."""
        for name, bound in self._bounds.items():
            if (fault := bound.find_fault(results[name])) is not None:
                return f"wrong result: {name} {fault}"
        return None

    def find_fault_of(self, function: Callable[[], Results]) -> str | None:
        """The fault in a function's results, or the error that it raises; None if there is none.

        It runs twice, and both results must be equal: a race shows in few launches. A lack of
        memory propagates: it says nothing about the function.
        """
        try:
            results = function()
            return self.find_fault(results) or _find_difference(results, function())
        except Exception as error:  # a kernel that is checked never fails the user's call
            if is_out_of_memory(error):
                raise
            return in_a_line(error)


def _find_difference(first: Results, second: Results) -> str | None:
    """How results of two equal launches differ; None if they are equal."""
    for name, value in first.items():
        other = second[name]
        if not bool(((value == other) | (value.isnan() & other.isnan())).all()):
            return f"two equal launches differ in {name}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory is lacking, of the device or of the host.

    Libraries that allocate themselves have their own words. A tile that takes more shared memory
    than the GPU has is another matter.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGES)


_SHORTAGES = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")


def in_a_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def some_rows(t: torch.Tensor, most: int = ROWS) -> torch.Tensor:
    """At most `most` of a tensor's first and last rows, as a matrix."""
    matrix = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    if matrix.shape[0] <= most:
        return matrix
    return torch.cat([matrix[: most // 2], matrix[-(most - most // 2) :]])


def name_results(results: Any, *names: str) -> dict[str, torch.Tensor]:
    """Results by name, without those that are empty."""
    values = results if isinstance(results, tuple) else (results,)
    return {n: v for n, v in zip(names, values, strict=False) if v is not None and v.numel()}


# --- What an answer depends on --------------------------------------------------------------------


def checker_for(device: torch.device) -> Checker:
    """The checker of a device."""
    if device.type != "cuda":
        return _make_checker(torch.device(device.type))
    index = torch.cuda.current_device() if device.index is None else device.index
    return _make_checker(torch.device("cuda", index))


@functools.cache
def _make_checker(device: torch.device) -> Checker:
    kept = Store(store.find_folder() / "answers.json", store.list_shipped())
    return Checker(kept, _describe_conditions(device))


def _describe_conditions(device: torch.device) -> dict[str, Any]:
    """What a kernel's correctness and speed depend on: the device, the kernels, torch, Triton."""
    name, has_triton = device.type, importlib.util.find_spec("triton") is not None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.name}, {gpu.multi_processor_count} SMs, sm_{gpu.major}{gpu.minor}"
    return {
        "device": name,
        "torchweld": __version__,
        "kernels": _hash_kernels(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if has_triton else "none",
    }


@functools.cache
def _hash_kernels() -> str:
    """A hash of the Triton sources and of the sources that the build recorded."""
    sources = sorted((_PACKAGE / "triton_kernels").rglob("*.py"))
    sources += sorted((_PACKAGE.parent.parent / "triton_kernels").rglob("*.py"))
    digest = hashlib.sha256()
    for file in [*sources, _PACKAGE / "lib" / "built.json"]:
        if file.exists():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
