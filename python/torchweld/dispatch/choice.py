"""The choice of a backend for ops, composites, bare ops and optimizer steps.

Each of them has a `name`, its `backends` in order of preference, and `why_not(backend, inputs)`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any, Protocol

import torch

from torchweld import state
from torchweld.dispatch import op_proof, proof
from torchweld.errors import ArgumentError, BackendError
from torchweld.names import BackendName
from torchweld.registry import BACKENDS, EAGER, Op

BACKEND_VARIABLE = "TORCHWELD_BACKEND"
UNTRIED = "no kernel has been tried for such calls on this GPU; until then eager serves"
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


def _expand_groups(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(backend for name in names for backend in GROUPS.get(name, (name,)))


def _read_environment() -> tuple[str, ...] | None:
    names = os.environ.get(BACKEND_VARIABLE)
    return _expand_groups([name.strip() for name in names.split(",")]) if names else None


# The backends that the user selected by name, in order of preference; None: the automatic choice.
# It is a plain module attribute, because torch.compile guards on module attributes.
forced: tuple[str, ...] | None = _read_environment()


class _Selection:
    """What a context selects; selections of the same names are not equal."""

    names = forced  # the environment's


# The last one is in force, the first one is the environment's.
_in_force = [_Selection()]


class use_backend(ContextDecorator):  # noqa: N801 - it is used as a function
    """A context in which every op runs on the first of these backends that can serve it.

    A call that none can serve raises BackendError with every reason. Names come from
    `torchweld.backends()`; "gpu" means "cuda" and "triton", and None the automatic choice. The
    context holds for the whole process, including other threads and asyncio tasks; where several
    enter one, the last has its way. A backward pass runs on the backend of its forward pass.
    """

    def __init__(self, *names: BackendName | str | None) -> None:
        asked = None if names == (None,) else _expand_groups([str(name) for name in names])
        check_names("use_backend", "name", asked)
        self.names = asked
        self._mine: list[_Selection] = []

    def __enter__(self) -> None:
        global forced
        selection = _Selection()
        selection.names = self.names
        self._mine.append(selection)
        _in_force.append(selection)
        forced = selection.names

    def __exit__(self, *_: object) -> None:
        global forced
        _in_force.remove(self._mine.pop())
        # Threads leave in any order. One that leaves meanwhile does this after its removal too.
        while forced is not (names := _in_force[-1].names):
            forced = names


def check_names(function: str, argument: str, names: Sequence[str] | None) -> None:
    """Raise ArgumentError if one of the names is not a backend's."""
    known = [EAGER, *BACKENDS]
    if names is not None and not (names and set(names) <= set(known)):
        accepted = " or ".join([*known, *GROUPS])
        raise ArgumentError(function, argument, repr(",".join(names)), accepted)


def choose(op: Choosable, inputs: Sequence[Any]) -> str:
    """The backend for these inputs; raises BackendError if no selected backend can serve."""
    if forced is not None:
        return _choose_by_name(op, inputs, forced)
    if is_on_gpu(inputs[0]):
        return _choose_on_gpu(op, inputs)
    for backend in op.backends:
        if op.why_not(backend, inputs) is None:
            return backend
    return EAGER


def _choose_on_gpu(op: Choosable, inputs: Sequence[Any]) -> str:
    """The preferred backend that was found right; eager if the call cannot be checked."""
    x = inputs[0]
    if not isinstance(op, Op) or proof.mode == "off":
        return EAGER
    if is_tried(x):
        return op_proof.choose_on_gpu(op, inputs)
    if state.is_compiling():
        direction = op_proof.find_direction(inputs)
        backend = op_proof.choose_while_compiling(op.name, x.device.index, x.dtype, direction)
        return backend if backend == EAGER or op.why_not(backend, inputs) is None else EAGER
    return EAGER


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU. Tests replace this function."""
    return x.is_cuda


def is_tried(x: torch.Tensor) -> bool:
    """Whether kernels for such a tensor are tried at first use: on a GPU, and not while compiling.

    Tensor subclasses, such as fake tensors, cannot be tried.
    """
    return is_on_gpu(x) and not state.is_compiling() and type(x) in state.PLAIN


def _choose_by_name(op: Choosable, inputs: Sequence[Any], names: Sequence[str]) -> str:
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
    if not is_on_gpu(inputs[0]):
        return None
    if isinstance(op, Op) and is_tried(inputs[0]):
        answer = proof.checker_for(inputs[0].device).known(op_proof.make_question(op, inputs))
        return UNTRIED if answer is None else answer.why_not(backend)
    return UNTRIED


def backends() -> dict[str, str]:
    """Every backend: "available", or why it is not."""
    status = {EAGER: "available"}
    return status | {name: b.why_missing() or "available" for name, b in BACKENDS.items()}
