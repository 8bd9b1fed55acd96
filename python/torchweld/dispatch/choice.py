"""The choice of a backend, for all calls: ops, composites, bare ops and so optimizer steps.

Each of them has a `name`, its `backends` in order of preference, and `why_not(backend, inputs)`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any, Protocol

import torch

from torchweld.dispatch import evidence, trial, verdicts
from torchweld.errors import ArgumentError, BackendError
from torchweld.registry import BACKENDS, EAGER, Op

BACKEND_VARIABLE = "TORCHWELD_BACKEND"
# A name for several backends, in order of preference.
GROUPS = {"gpu": ("cuda", "triton")}


class Choosable(Protocol):
    """An op of the registry, or a bare one."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def backends(self) -> Sequence[str]:
        """The backends that it has kernels for, the preferred one first."""

    def why_not(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why the backend cannot serve these inputs; None if it can."""


def _listed(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(backend for name in names for backend in GROUPS.get(name, (name,)))


def _from_environment() -> tuple[str, ...] | None:
    names = os.environ.get(BACKEND_VARIABLE)
    return _listed([name.strip() for name in names.split(",")]) if names else None


# The backends that were asked for by name, in order of preference; None: the automatic choice. A
# plain module attribute, since that is what torch.compile guards on.
forced: tuple[str, ...] | None = _from_environment()


class use_backend(ContextDecorator):  # noqa: N801 - it is used as a function
    """A context in which every op runs on the first of these backends that can serve it.

    A call that none can serve raises BackendError with every reason. Names are those of
    `torchweld.backends()`, or "gpu" for "cuda" and "triton"; None is the automatic choice. It holds
    for the whole process, other threads and asyncio's tasks included: enter it from one of them at
    a time. A backward runs where its forward ran, in whichever context.
    """

    def __init__(self, *names: str | None) -> None:
        asked = None if names == (None,) else _listed([str(name) for name in names])
        check_names("use_backend", "name", asked)
        self.names = asked
        self._previous: list[tuple[str, ...] | None] = []

    def __enter__(self) -> None:
        global forced
        self._previous.append(forced)
        forced = self.names

    def __exit__(self, *_: object) -> None:
        global forced
        forced = self._previous.pop()


def check_names(function: str, argument: str, names: Sequence[str] | None) -> None:
    """Raise ArgumentError if one of the names is not a backend's."""
    known = [EAGER, *BACKENDS]
    if names is not None and not (names and set(names) <= set(known)):
        accepted = " or ".join([*known, *GROUPS])
        raise ArgumentError(function, argument, repr(",".join(names)), accepted)


def choose(op: Choosable, inputs: Sequence[Any]) -> str:
    """The backend for these inputs; raises BackendError if none of those asked for can serve."""
    if forced is not None:
        return _by_name(op, inputs, forced)
    if isinstance(op, Op) and on_gpu(x := inputs[0]):
        if on_trial(x):
            return trial.proven(op, inputs)
        # A graph that is being compiled takes what is proven at first use.
        if torch.compiler.is_compiling() and verdicts.mode != "off":
            by = evidence.direction(inputs)
            found = trial.while_compiling(op.name, x.device.index, x.dtype, by)
            return found if found == EAGER or op.why_not(found, inputs) is None else EAGER
    for backend in op.backends:
        if op.why_not(backend, inputs) is None and _against(op, backend, inputs) is None:
            return backend
    return EAGER


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or stands for one in a test."""
    return x.is_cuda


def on_trial(x: torch.Tensor) -> bool:
    """Whether kernels for such a tensor are proven at first use: on a GPU, and not while compiling.

    Tensors that stand for others, as fake ones do, prove nothing.
    """
    return on_gpu(x) and not torch.compiler.is_compiling() and type(x) in _PLAIN


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _by_name(op: Choosable, inputs: Sequence[Any], names: Sequence[str]) -> str:
    check_names(BACKEND_VARIABLE, "the environment variable", names)
    reasons = {}
    for backend in names:
        reason = op.why_not(backend, inputs)
        if reason is None:
            return backend
        reasons[backend] = reason
    raise BackendError(op.name, reasons)


def why_not_automatic(op: Choosable, backend: str, inputs: Sequence[Any]) -> str | None:
    """Why the automatic choice does not take this backend."""
    reason = op.why_not(backend, inputs)
    if reason is not None:
        return reason
    if isinstance(op, Op) and on_trial(inputs[0]):
        verdict = trial.known(op, inputs)
        if verdict is not None:
            return verdict.against(backend)
    return _against(op, backend, inputs)


def _against(op: Choosable, backend: str, inputs: Sequence[Any]) -> str | None:
    """What evidence says against a backend that can serve."""
    return None if backend == "cpu" else evidence.against(op, backend, inputs)


def backends() -> dict[str, str]:
    """Every backend: "available", or why it is not."""
    status = {EAGER: "available"}
    return status | {name: b.missing() or "available" for name, b in BACKENDS.items()}
