"""The whole path of a call: check, choice of a backend, autocast, autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from torchweld import state
from torchweld.dispatch import choice, dtensor
from torchweld.dispatch.choice import choose, use_backend
from torchweld.dispatch.kernels import Casting
from torchweld.dispatch.warm.guards import PLAIN
from torchweld.dispatch.warm.recorder import RECORDER, Note, leave_open
from torchweld.errors import ArgumentError
from torchweld.isolate import leave_transforms
from torchweld.registry import EAGER, Composite, Op
from torchweld.registry.processor import has_units


def call(op: Op, *inputs: Any) -> Any:
    """Run an op on the selected backend, or on the best one for these inputs."""
    notes = RECORDER.notes
    before = len(notes) if notes is not None else 0
    try:
        function = _find_function(op, inputs)
        result = function(*inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if not isinstance(error, ArgumentError):
            op.check(*inputs)  # raises an error that names the argument, if one is at fault
        raise
    if notes is not None:  # in place of its parts
        notes[before:] = [Note(op, function, inputs, result, **_find_span(op, inputs))]
    return result


def call_arranged(
    op: Op, arrange: Callable[..., Sequence[Any]], given: Sequence[Any], *rest: Any
) -> Any:
    """Run an op on the tensors that `arrange` makes of raw arguments, and on further arguments.

    Later calls repeat `arrange`; what it does depends on nothing but its arguments' forms.
    """
    result = call(op, *arrange(*given), *rest)
    notes = RECORDER.notes
    if notes is not None:
        notes[-1] = notes[-1]._replace(arrange=arrange, given=given, kept=len(rest))
    return result


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
    # This is is_compiling() with one Python call less: small calls count each of them.
    compiling = is_dynamo_compiling() or torch.compiler._is_compiling_flag
    if choice.forced is None and not compiling and is_too_small(op, inputs):
        return op.reference
    if compiling and _is_left_to_compiler(op, inputs):
        return op.reference
    x = inputs[0]
    if x.is_nested or x.dtype not in op.dtypes:
        op.check(*inputs)  # torch would accept more
    if isinstance(op, Composite):
        backend = choose(op, inputs)
        return op.reference if backend == EAGER else partial(op.fused, backend)
    if type(x) not in PLAIN and dtensor.is_dtensor(x):  # each shard is served by itself
        return partial(dtensor.run_on_shards, op, lambda *local: _find_function(op, local)(*local))
    return find_function_of(op, choose(op, inputs), inputs)


def _is_left_to_compiler(op: Op, inputs: Sequence[Any]) -> bool:
    """Whether Inductor serves these inputs better than a kernel that it cannot see into."""
    if op.left_to_compiler is None or choice.forced is not None or not state.has_compiler():
        return False
    x = inputs[0]
    if type(x) not in PLAIN or x.is_nested:
        return False
    return op.left_to_compiler(*inputs)


def find_function_of(op: Op, backend: str, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs an op on this backend, which can serve these inputs."""
    if backend == EAGER:
        return op.reference
    x = inputs[0]
    if type(x) not in PLAIN and dtensor.is_dtensor(x):
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
    leave_open()  # what it calls is not all that it does
    context: dict[str, Any] = {}
    if not is_compiling() and not state.is_recording():  # a recorded checkpoint takes no contexts
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
