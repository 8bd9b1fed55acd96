"""Answers questions: looks an answer up, or finds it by a trial at first use and stores it.

A trial checks the contenders against exact results on a sample. The first correct one serves: their
order is declared. Nothing is timed but the tiles that `torchweld tune` tries.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.engine import store
from torchweld.dispatch.engine.judge import Judge, in_a_line
from torchweld.dispatch.engine.question import Answer, Key, Question, as_text
from torchweld.dispatch.engine.store import Entry, Store
from torchweld.isolate import apart
from torchweld.version import __version__

# off: the baseline serves. kept: stored answers are used as well. check: contenders are checked at
# first use.
VARIABLE = "TORCHWELD_TUNE"
MODES = ("off", "kept", "check")
# The factor by which a contender must beat the baseline: more than two runs of one call differ.
LEAD = 1.02
_PACKAGE = Path(__file__).parents[2]


def read_mode(environment: Mapping[str, str]) -> str:
    """The mode that the environment asks for; "check" without one."""
    asked = environment.get(VARIABLE, "check")
    if asked not in MODES:
        warnings.warn(f"{VARIABLE} is {asked!r}; accepted: {', '.join(MODES)}", stacklevel=2)
        return "check"
    return asked


mode = read_mode(os.environ)
# Set by `torchweld tune`: the milliseconds of each call. A call that fails has none.
take_times: Callable[[Mapping[str, Callable[[], Any]]], dict[str, float]] | None = None
# Backends by the mode and the class of the call.
_served: dict[tuple[str, Hashable], str] = {}
# How many questions were left open. What was decided meanwhile is not kept for later calls.
left_open = 0
# Held during a trial. Meanwhile the baseline serves the questions of other threads, such as
# autograd's; questions that the trial's own thread asks have trials of their own.
_trial = threading.RLock()


def pick(call_class: Hashable, make: Callable[[], Question]) -> tuple[str, bool]:
    """The backend for a class of calls, and whether it is final for this process."""
    global left_open
    known = _served.get((mode, call_class))
    if known is not None:
        return known, True
    question = make()
    # Where no backend can serve this call nothing is kept: the next one may differ.
    answer = engine_for(question.device).ask(question) if question.contenders else None
    if answer is None:
        left_open += 1
        return question.baseline, False
    _served[mode, call_class] = answer.backend
    return answer.backend, True


def has_trials(device: torch.device) -> bool:
    """Whether contenders can be tried on this device: only on a GPU."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: no trial may run meanwhile."""
    return device.type == "cuda" and state.is_capturing()


class Engine:
    """Answers questions about one device; `conditions` describe the device and its software."""

    def __init__(self, kept: Store, conditions: Key) -> None:
        self._store, self._conditions = kept, conditions
        self.file = kept.file
        self._for_now: dict[str, Answer] = {}  # of trials that failed, for lack of memory for one
        self._said: set[str] = set()

    def ask(self, question: Question) -> Answer | None:
        """The answer; None if the baseline serves this call and the next one may ask again.

        Errors in contenders do not propagate.
        """
        if mode == "off":
            return Answer(question.baseline, {}, {})
        if (known := self.known(question)) is not None:
            return known
        if mode == "kept" or (question.prepare is not None and take_times is None):
            return Answer(question.baseline, {}, {})
        if not has_trials(question.device):
            return None
        if is_capturing(question.device):
            self._say_once(f"{question}: nothing is tried while a graph is captured")
            return None
        if not _trial.acquire(blocking=False):
            return None
        try:
            return self._try(question)
        finally:
            _trial.release()

    def known(self, question: Question) -> Answer | None:
        """The stored answer for this question, if its backend is among those that can serve."""
        answer = self.find(question.kind, question.size)
        names = (question.baseline, *question.contenders)
        return answer if answer is not None and answer.backend in names else None

    def find(self, kind: Key, size: int) -> Answer | None:
        """The stored answer for a kind at the nearest size; while sizes are timed, at this one."""
        if (answer := self._for_now.get(_name(kind, size))) is not None:
            return answer
        of_kind = [e for e in self.entries() if _name(e.kind, size) == _name(kind, size)]
        if take_times is not None:
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

    def agreed(self, baseline: str, **fields: Any) -> str:
        """The backend of all such answers if they agree, else the baseline."""
        backends = self.find_backends(**fields)
        return backends.pop() if len(backends) == 1 else baseline

    def entries(self) -> list[Entry]:
        """Every stored answer for this device and software."""
        return self._store.entries(self._conditions)

    def _try(self, question: Question) -> Answer:
        faults: dict[str, str] = {}
        try:
            with apart(question.device):
                self._find_faults(question, faults)
                right = [name for name in question.contenders if name not in faults]
                chosen, ms = _choose(question, right)
        except Exception as error:  # the user's call continues
            self._say_once(f"{question} could not be tried: {in_a_line(error)}")
            answer = Answer(question.baseline, faults, {})
            self._for_now[_name(question.kind, question.size)] = answer
            return answer
        answer = Answer(chosen, faults, ms, datetime.date.today().isoformat())
        self._store.add(Entry(self._conditions, question.kind, question.size, answer))
        return answer

    def _find_faults(self, question: Question, faults: dict[str, str]) -> None:
        """Add the faults of wrong contenders, each with a warning."""
        judge = Judge(question.exact(), question.trusted(), question.rounded)
        for name in question.contenders:
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
    """The one of the correct contenders that serves, and the times that say so."""
    baseline = question.baseline
    if not right or question.prepare is None or take_times is None:
        return next(iter(right), baseline), {}
    ms = take_times({name: question.prepare(name) for name in (baseline, *right)})
    best = min(ms, key=lambda name: ms[name] * (1 if name == baseline else LEAD), default=baseline)
    return best, ms


def engine_for(device: torch.device) -> Engine:
    """The engine of a device."""
    if device.type != "cuda":
        return _engine(torch.device(device.type))
    index = torch.cuda.current_device() if device.index is None else device.index
    return _engine(torch.device("cuda", index))


@functools.cache
def _engine(device: torch.device) -> Engine:
    kept = Store(store.find_folder() / "answers.json", store.list_shipped())
    return Engine(kept, _describe_conditions(device))


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
    sources = sorted((_PACKAGE / "triton_kernels").glob("*.py"))
    sources += sorted((_PACKAGE.parent.parent / "triton_kernels").glob("*.py"))
    digest = hashlib.sha256()
    for file in [*sources, _PACKAGE / "lib" / "built.json"]:
        if file.exists():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
