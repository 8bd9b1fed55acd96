"""Which kernel serves a class of calls on a GPU: proven at first use, then kept.

This module decides and knows no device: what tries, times and captures is given to it. At most one
process of those that share a cache tries a class at a time; the others wait for what it finds.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchweld.dispatch import cache, proof
from torchweld.registry import EAGER

# off: shipped evidence decides, and what `torchweld tune` found. kept: before those, what was found
# at an earlier first use. check: kernels are checked at first use. time: checked, then timed.
VARIABLE = "TORCHWELD_TUNE"
MODES = ("off", "kept", "check", "time")
# How long a process waits for another that tries the same.
PATIENCE = 30.0


class Verdict(NamedTuple):
    """What serves a class of calls, and why: by evidence, by check, or by times in milliseconds."""

    backend: str
    by: str
    faults: dict[str, str]
    ms: dict[str, float]
    date: str = ""

    def against(self, backend: str) -> str | None:
        """Why this backend does not serve; None if it does."""
        if backend == self.backend:
            return None
        if backend in self.faults:
            return f"at its first use here: {self.faults[backend]}"
        if backend in self.ms:
            times = f"{self.ms[backend]:.3f} ms, {self.backend}: {self.ms[self.backend]:.3f} ms"
            return f"timed at its first use here: {times}"
        return f"{self.backend} serves, by {self.by}"


class Trial(Protocol):
    """A class of calls, as it can be tried on a device."""

    @property
    def key(self) -> str:
        """In words, for messages and for the cache."""

    @property
    def backends(self) -> Sequence[str]:
        """Those that can serve, in order of preference."""

    def static(self) -> str:
        """What evidence prefers; eager without any."""

    def may_run(self) -> bool:
        """False while a graph is captured, or where nothing can be run."""

    def fault(self, backend: str) -> str | None:
        """What is wrong with the backend's results. OutOfMemoryError says nothing of them."""

    def preferred(self, backends: Sequence[str]) -> str | None:
        """What evidence of this capability, width and direction prefers; None without any."""

    def mixed(self, backends: Sequence[str]) -> Sequence[str]:
        """More contenders, made of the forward of one of these and the backward of another."""

    def times(self, backends: Sequence[str]) -> Mapping[str, float]:
        """Milliseconds of these and eager's."""


def mode_from(environment: Mapping[str, str]) -> str:
    """The mode that the environment asks for; "time" without one."""
    asked = environment.get(VARIABLE, "time")
    if asked not in MODES:
        warnings.warn(f"{VARIABLE} is {asked!r}; accepted: {', '.join(MODES)}", stacklevel=2)
        return "time"
    return asked


mode = mode_from(os.environ)


class Verdicts:
    """The verdicts of one GPU, kernels and software, which `conditions` names, in a file."""

    def __init__(self, file: Path, conditions: str) -> None:
        self._file, self._conditions = file, conditions
        self._known: dict[str, Verdict] = {}
        self._said: set[str] = set()

    def decide(self, trial: Trial, how: str | None = None) -> str:
        """The backend that serves this class of calls. It raises nothing of the trial's."""
        how = how or mode
        known = self._known.get(trial.key)
        if known is not None:
            return known.backend
        if how == "off":
            return trial.static()
        if (verdict := self._kept(trial)) is None:
            if how == "kept":
                return trial.static()
            if not trial.may_run():
                self._say_once(f"{trial.key}: nothing is tried while a graph is captured")
                return trial.static()
            verdict = self._alone(trial, how)
        self._known[trial.key] = verdict
        return verdict.backend

    def all_kept(self) -> dict[str, Verdict]:
        """Every verdict in the file."""
        found = _entries(cache.read(self._file), self._conditions)
        return {key: v for key, given in found.items() if (v := _verdict(given)) is not None}

    def _kept(self, trial: Trial) -> Verdict | None:
        """What is in the file; not a backend that cannot serve here."""
        found = self.all_kept().get(trial.key)
        can = EAGER, *trial.backends, *trial.mixed(trial.backends)
        served = found is not None and found.backend in can
        return found if served else None

    def _alone(self, trial: Trial, how: str) -> Verdict:
        """The verdict of the first process to try; every other one's is that too."""
        digest = hashlib.sha256(f"{self._conditions}\n{trial.key}".encode()).hexdigest()[:16]
        try:
            with cache.locked(self._file.parent / "trials" / digest, PATIENCE):
                if (found := self._kept(trial)) is not None:
                    return found
                verdict, lasting = self._try(trial, how)
                if lasting:
                    cache.update(self._file, lambda content: self._add(content, trial, verdict))
                return verdict
        except TimeoutError:
            self._say_once(f"{trial.key}: another process has been trying it for {PATIENCE:g} s")
            return self._static(trial)
        except OSError:  # nothing can be written: each process for itself
            return self._try(trial, how)[0]

    def _add(self, content: dict[str, Any], trial: Trial, verdict: Verdict) -> None:
        kept = _entries(content, self._conditions)
        dated = verdict._replace(date=datetime.date.today().isoformat())
        content[self._conditions] = kept | {trial.key: dated._asdict()}

    def _try(self, trial: Trial, how: str) -> tuple[Verdict, bool]:
        """A verdict, and whether it is for good: not where memory was wanting."""
        faults: dict[str, str] = {}
        try:
            right = _right(trial, trial.backends, faults)
            if not right or how == "check":
                return Verdict(next(iter(right), EAGER), "check", faults, {}), True
            if (preferred := trial.preferred(right)) is not None:
                return Verdict(preferred, "evidence", faults, {}), True
            right += _right(trial, trial.mixed(right), faults)
            ms = dict(trial.times(right))
            fastest = min([*right, EAGER], key=lambda name: ms.get(name, float("inf")))
            return Verdict(fastest, "time", faults, ms), True
        except Exception as error:  # the user's call goes on
            self._say_once(f"{trial.key} could not be tried: {proof.in_a_line(error)}")
            return self._static(trial, faults), False

    def _static(self, trial: Trial, faults: Mapping[str, str] | None = None) -> Verdict:
        chosen = trial.static()
        faults = dict(faults or {})
        return Verdict(EAGER if chosen in faults else chosen, "evidence", faults, {})

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"torchweld: {message}", RuntimeWarning, stacklevel=2)


def _right(trial: Trial, backends: Sequence[str], faults: dict[str, str]) -> list[str]:
    """Those without a fault; the user is told of the others', which are added."""
    for backend in backends:
        if (reason := trial.fault(backend)) is not None:
            faults[backend] = reason
            proof.refuse(f"{backend} for {trial.key}", reason)
    return [backend for backend in backends if backend not in faults]


def _entries(content: Mapping[str, Any], conditions: str) -> dict[str, Any]:
    """The verdicts under these conditions; none if something else is in their place."""
    found = content.get(conditions)
    return found if isinstance(found, dict) else {}


def _verdict(given: Any) -> Verdict | None:
    """What `_asdict` made; None if it is something else."""
    try:
        verdict = Verdict(**given)
    except TypeError:
        return None
    return verdict if isinstance(verdict.backend, str) else None
