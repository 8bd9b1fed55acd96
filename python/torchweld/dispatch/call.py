"""The whole path of a call: check, choice of a backend, autocast, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from torchweld import state
from torchweld.dispatch import choice, dtensor
from torchweld.dispatch.choice import choose, use_backend
from torchweld.dispatch.kernels import Casting
from torchweld.errors import ArgumentError
from torchweld.isolate import leave_transforms
from torchweld.registry import EAGER, Composite, Op
from torchweld.registry.processor import has_units


class Decision(NamedTuple):
    """The function that serves a call, and its arguments.

    A public function returns one in place of its results: `short` (warm/cache.py) runs it, and
    keeps it for later calls like this one.
    """

    op: Op | None  # whose arguments these are; None for a function that is no op's
    function: Callable[..., Any]
    inputs: Sequence[Any]
    names: Sequence[str]  # of the inputs; those that are raw arguments have their names
    # What the public function returns: results or raw arguments, by name. None: all results.
    returned: str | Sequence[str] | None = None
    # What made the first `arranged` inputs of these raw arguments; it repeats that in later calls,
    # and depends on nothing but the forms of its arguments.
    arrange: Callable[..., Sequence[Any]] | None = None
    given: Mapping[str, Any] = {}
    arranged: int = 0
    # The numbers of elements of the first tensor for which this holds. They are the last fields.
    least: int = 0
    below: float = math.inf

    def run(self) -> Any:
        """Compute the results."""
        try:
            made = self.function(*self.inputs)
        except _FAULTS as error:
            _name_fault(self.op, self.inputs, error)
            raise
        if self.returned is None:
            return made
        assert self.op is not None
        results = made if isinstance(made, tuple) else (made,)
        by_name = dict(zip(self.names, self.inputs, strict=True))
        by_name |= zip(self.op.public, results, strict=True)
        if isinstance(self.returned, str):
            return by_name[self.returned]
        return tuple([by_name[name] for name in self.returned])


# What torch and kernels raise of wrong arguments.
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def _name_fault(op: Op | None, inputs: Sequence[Any], error: Exception) -> None:
    """Raise an error that names the argument, if one is at fault."""
    if op is not None and not isinstance(error, ArgumentError):
        op.check(*inputs)


def decide(op: Op, *inputs: Any, returned: str | Sequence[str] | None = None) -> Any:
    """Choose what serves an op with these inputs; returns a Decision."""
    try:
        function = _find_function(op, inputs)
    except _FAULTS as error:
        _name_fault(op, inputs, error)
        raise
    names = op.forward_signature.arguments
    return Decision(op, function, inputs, names, returned, **_find_span(op, inputs))


def decide_arranged(
    op: Op,
    arrange: Callable[..., Sequence[Any]],
    given: Mapping[str, Any],
    *rest: Any,
    returned: str | Sequence[str] | None = None,
) -> Any:
    """As `decide`, of the inputs that `arrange` makes of raw arguments, and of further ones."""
    inputs = (*arrange(*given.values()), *rest)
    decision: Decision = decide(op, *inputs, returned=returned)
    arranged = len(inputs) - len(rest)
    return decision._replace(arrange=arrange, given=given, arranged=arranged)


def call(op: Op, *inputs: Any) -> Any:
    """Run an op on the selected backend, or on the best one for these inputs."""
    return decide(op, *inputs).run()


def _find_span(op: Op, inputs: Sequence[Any]) -> dict[str, Any]:
    """The numbers of elements for which the choice between eager and kernels is the same."""
    if not op.small or choice.forced is not None or inputs[0].is_cuda:
        return {}
    few = inputs[0].numel() < op.small
    return {"below": op.small} if few else {"least": op.small}


def is_too_small(op: Op, inputs: Sequence[Any]) -> bool:
    """Whether eager is as fast and as exact, on the CPU.

    On a GPU trials decide at every size.
    """
    x = inputs[0]
    fits = x.dtype in op.slower or (x.numel() < op.small and x.dtype in op.dtypes_of_eager)
    if not fits or x.is_cuda or x.is_nested:
        return False
    casts = isinstance(op, Composite) and torch.is_autocast_enabled("cpu")
    return not casts or has_units(torch.get_autocast_dtype("cpu"))


def _find_function(op: Op, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What serves these inputs."""
    if state.is_fake(inputs[0]):
        op.check(*inputs)  # eager torch would serve it, and accept more
    compiling = state.is_compiling()
    if choice.forced is None and not compiling and is_too_small(op, inputs):
        return op.reference
    if compiling and _is_left_to_compiler(op, inputs):
        return op.reference
    x = inputs[0]
    if x.is_nested or x.dtype not in op.dtypes:
        op.check(*inputs)  # torch would accept more
    if isinstance(op, Composite):
        backend = choose(op, inputs)
        return op.reference if backend == EAGER else op.plan(backend, *inputs)
    if type(x) not in state.PLAIN and dtensor.is_dtensor(x):  # each shard is served by itself
        return partial(dtensor.run_on_shards, op, lambda *local: _find_function(op, local)(*local))
    return find_function_of(op, choose(op, inputs), inputs)


def _is_left_to_compiler(op: Op, inputs: Sequence[Any]) -> bool:
    """Whether Inductor serves these inputs better than a kernel that it cannot see into."""
    if op.left_to_compiler is None or choice.forced is not None or not state.has_compiler():
        return False
    x = inputs[0]
    if type(x) not in state.PLAIN or x.is_nested:
        return False
    return op.left_to_compiler(*inputs)


def find_function_of(op: Op, backend: str, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs an op on this backend, which can serve these inputs."""
    if backend == EAGER:
        return op.reference
    x = inputs[0]
    if type(x) not in state.PLAIN and dtensor.is_dtensor(x):
        return partial(dtensor.run_on_shards, op, partial(run_on, op, backend))
    if op.autocast:
        device = x.device.type
        dtype = op.autocast.get(device)
        if dtype is not None and torch.is_autocast_enabled(device):
            return Casting(op.kernels[backend], dtype)
    return op.kernels[backend]  # type: ignore[no-any-return]


def run_on(op: Op, backend: str, *inputs: Any) -> Any:
    """Run an op on this backend, which can serve these inputs."""
    return find_function_of(op, backend, inputs)(*inputs)


def choose_automatically(op: Op, inputs: Sequence[Any]) -> str:
    """The backend that a call takes; small inputs fall back to eager."""
    return EAGER if choice.forced is None and is_too_small(op, inputs) else choose(op, inputs)


# --- Recomputation ----------------------------------------------------------------------------


def run_checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """Run function(*args), saving only its arguments; the backward pass runs it again.

    The recomputation uses the backend selected now, even if another one is selected by then, and no
    transform if there is none now: vmap may run the backward pass. In a compiled or recorded graph
    the choice is already made.
    """
    context: dict[str, Any] = {}
    if (
        not state.is_compiling() and not state.is_recording()
    ):  # recorded checkpoints have no contexts
        asked: Sequence[str | None] = choice.forced or (None,)
        context["context_fn"] = partial(_make_contexts, asked)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **context)


def _make_contexts(names: Sequence[str | None]) -> tuple[Any, Any]:
    return nullcontext(), _AsBefore(names)


class _AsBefore:
    """Restores the state in which it was made; a retained graph enters it at every run."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self._names = names
        self._is_transformed = state.is_transforming()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(use_backend(*self._names))
            if not self._is_transformed:
                stack.enter_context(leave_transforms())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
