"""Answers questions: looks an answer up, or finds it by a trial at first use and stores it.

A trial checks the contenders against exact results on a sample. The first correct one serves:
their order is declared. Only tiles are timed, on the call's own inputs, where the mode asks for it.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from torchweld.dispatch.engine import clock, files, store
from torchweld.dispatch.engine.apart import apart
from torchweld.dispatch.engine.conditions import describe_device
from torchweld.dispatch.engine.judge import Judge, in_a_line, is_out_of_memory
from torchweld.dispatch.engine.question import Answer, Key, Question, describe
from torchweld.dispatch.engine.store import Entry, Store

# off: the baseline serves. kept: stored answers are used as well. check: contenders are checked at
# first use. time: tiles are also timed, as `torchweld tune` does.
VARIABLE = "TORCHWELD_TUNE"
MODES = ("off", "kept", "check", "time")
# Milliseconds of device time that timing a question may take.
BUDGET = 30.0
# The factor by which a contender must beat the baseline: more than two runs of one call differ.
LEAD = 1.02
# A trial must not take more than this part of the free memory.
MEMORY_PART = 0.5


def read_mode(environment: Mapping[str, str]) -> str:
    """The mode that the environment asks for; "check" without one."""
    asked = environment.get(VARIABLE, "check")
    if asked not in MODES:
        warnings.warn(f"{VARIABLE} is {asked!r}; accepted: {', '.join(MODES)}", stacklevel=2)
        return "check"
    return asked


mode = read_mode(os.environ)
# Backends by the mode and the class of the call. Calls that match no recent one (recent.py) are
# looked up here.
_served: dict[tuple[str, Hashable], str] = {}
# Held during a trial. Meanwhile the baseline serves the questions of other threads, such as
# autograd's; questions that the trial's own thread asks have trials of their own.
_trial = threading.RLock()


def pick(call_class: Hashable, make: Callable[[], Question]) -> tuple[str, bool]:
    """The backend for a class of calls, and whether it is final for this process."""
    known = _served.get((mode, call_class))
    if known is not None:
        return known, True
    question = make()
    if not question.contenders:
        return question.baseline, False  # no backend can serve this call; do not cache
    answer = engine_for(question.device).ask(question)
    if answer is None:
        return question.baseline, False
    _served[mode, call_class] = answer.backend
    return answer.backend, True


def has_trials(device: torch.device) -> bool:
    """Whether contenders can be tried on this device: only on a GPU."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: no trial may run meanwhile."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Engine:
    """Answers questions about one device; `conditions` describe the device and its software."""

    def __init__(self, kept: Store, conditions: Key) -> None:
        self._store, self._conditions = kept, conditions
        self.file = kept.file
        self._for_now: dict[str, Answer] = {}  # not stored: given for lack of memory, for example
        self._said: set[str] = set()

    def ask(self, question: Question, how: str | None = None) -> Answer | None:
        """The answer; None if the baseline serves this call and the next one may ask again.

        Errors in contenders do not propagate.
        """
        how = how or mode
        if how == "off":
            return _default(question, how)
        if (known := self.known(question)) is not None:
            return known
        if how == "kept" or (how == "check" and not question.serves_untimed):
            return _default(question, how)
        if not has_trials(question.device):
            return None
        if is_capturing(question.device):
            self._say_once(f"{question}: nothing is tried while a graph is captured")
            return None
        if not _trial.acquire(blocking=False):
            return None
        try:
            return self._try(question, how)
        finally:
            _trial.release()

    def known(self, question: Question) -> Answer | None:
        """The stored answer for this question, if its backend is among those that can serve."""
        answer = self.find(question.kind, question.size)
        return answer if answer is not None and answer.backend in question.names() else None

    def find(self, kind: Key, size: int) -> Answer | None:
        """The stored answer for a kind at this size, or the one that its neighbours agree on."""
        if (answer := self._for_now.get(describe(kind, size))) is not None:
            return answer
        by_size = self._store.answers(self._conditions, kind)
        return by_size.get(size) or _between(by_size, size)

    def find_backends(self, **fields: Any) -> set[str]:
        """All stored backends for kinds with these fields, at any size; none if the mode is off."""
        if mode == "off":
            return set()
        return {
            entry.answer.backend
            for entry in self.entries()
            if all(entry.kind.get(name) == value for name, value in fields.items())
        }

    def entries(self) -> list[Entry]:
        """Every stored answer for this device and software."""
        return self._store.entries(self._conditions)

    def _try(self, question: Question, how: str) -> Answer:
        right: list[str] = []
        faults: dict[str, str] = {}
        try:
            with apart(question.device):
                self._check_memory(question)
                right, faults = self._judge(question)
                answer = self._choose(question, how, right, faults)
        except Exception as error:  # the user's call continues
            self._say_once(f"{question} could not be tried: {in_a_line(error)}")
            answer = Answer(question.baseline, "a trial that failed", right, faults, {})
            self._for_now[str(question)] = answer
            return answer
        answer = answer._replace(date=datetime.date.today().isoformat())
        self._store.add(Entry(self._conditions, question.kind, question.size, answer))
        return answer

    def _check_memory(self, question: Question) -> None:
        free = _free_memory(question.device)
        if question.bytes > MEMORY_PART * free:
            wanted, there = question.bytes / 2**20, free / 2**20
            raise MemoryError(f"a trial takes {wanted:.0f} MB, and {there:.0f} MB are free")

    def _judge(self, question: Question) -> tuple[list[str], dict[str, str]]:
        """The correct contenders, and the faults of the others, which are reported as warnings.

        A result at one size holds at every size.
        """
        for known in self._store.answers(self._conditions, question.kind).values():
            if set(question.contenders) <= {*known.right, *known.faults}:
                return [c for c in question.contenders if c in known.right], dict(known.faults)
        judge = Judge(question.exact(), question.trusted(), question.rounded)
        faults: dict[str, str] = {}
        for name in question.contenders:
            reason = judge.find_fault_of(functools.partial(question.run, name))
            if reason is not None:
                faults[name] = reason
                self._warn_of_fault(name, question, reason)
        return [name for name in question.contenders if name not in faults], faults

    def _choose(
        self, question: Question, how: str, right: list[str], faults: dict[str, str]
    ) -> Answer:
        baseline = question.baseline
        if not right or how == "check" or question.prepare is None:
            chosen = right[0] if right and question.serves_untimed else baseline
            return Answer(chosen, "check", right, faults, {})
        calls, failed = self._prepare(question, right)
        ms = take_times(calls) if calls else {}
        faults |= failed
        best = min(ms.keys() - {baseline}, key=lambda name: ms[name], default=baseline)
        if ms.get(best, math.inf) * LEAD >= ms.get(baseline, math.inf):
            best = baseline
        return Answer(best, "time", [name for name in right if name not in failed], faults, ms)

    def _prepare(
        self, question: Question, names: Sequence[str]
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
        """Make the calls to be timed and run each once; also return the faults of failing calls.

        A call that runs out of memory is left out, even the baseline's. The first run answers the
        questions that a call asks itself, so that it is timed in its final form.
        """
        assert question.prepare is not None
        calls: dict[str, Callable[[], Any]] = {}
        faults: dict[str, str] = {}
        for name in (question.baseline, *names):
            try:
                call = question.prepare(name)
                call()
                calls[name] = call
            except Exception as error:
                if is_out_of_memory(error):
                    continue
                if name == question.baseline:
                    raise
                faults[name] = in_a_line(error)
                self._warn_of_fault(name, question, faults[name])
        return calls, faults

    def _warn_of_fault(self, name: str, question: Question, reason: str) -> None:
        if not reason.startswith("OutOfResources"):  # the tile is too large for this GPU
            message = f"torchweld: {name} for {question} is not used: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"torchweld: {message}", RuntimeWarning, stacklevel=2)


def take_times(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each call on the current stream."""
    medians = clock.take_medians(list(calls.values()), clock.DeviceClock(), BUDGET)
    return dict(zip(calls, medians, strict=True))


def _default(question: Question, how: str) -> Answer:
    return Answer(question.baseline, f"{VARIABLE}={how}", [], {}, {})


def _between(by_size: Mapping[int, Answer], size: int) -> Answer | None:
    """The answer of the next smaller and the next larger size, if they agree."""
    below = max((s for s in by_size if s < size), default=None)
    above = min((s for s in by_size if s > size), default=None)
    if below is None or above is None or by_size[below].backend != by_size[above].backend:
        return None
    return by_size[below]._replace(why="the times of smaller and larger sizes", ms={})


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def reduce_to_one(backends: set[str], baseline: str) -> str:
    """One backend for several classes of calls: theirs if they agree, else the baseline."""
    return next(iter(backends)) if len(backends) == 1 else baseline


def engine_for(device: torch.device) -> Engine:
    """The engine of a device."""
    if device.type != "cuda":
        return _engine(torch.device(device.type))
    index = torch.cuda.current_device() if device.index is None else device.index
    return _engine(torch.device("cuda", index))


@functools.cache
def _engine(device: torch.device) -> Engine:
    kept = Store(files.find_folder() / "answers.json", store.shipped_files())
    return Engine(kept, describe_device(device))
