"""The one path of a call: check, choice of a backend, autocast, autograd."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

import torchweld
from torchweld import _evidence
from torchweld._autograd import as_tuple
from torchweld.distributed import dtensor
from torchweld.errors import ArgumentError, BackendError
from torchweld.registry import BACKENDS, EAGER, OPS, Op, Seam

BACKEND_VARIABLE = "TORCHWELD_BACKEND"

# The backend that was asked for by name; None: the automatic choice. A plain module attribute,
# since that is what torch.compile guards on.
forced: str | None = os.environ.get(BACKEND_VARIABLE) or None


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within it every op runs on the backend `name`, or raises BackendError saying why it cannot.

    Names are those of `torchweld.backends()`; None is the automatic choice.
    """
    global forced
    _check_name("use_backend", "name", name)
    previous, forced = forced, name
    try:
        yield
    finally:
        forced = previous


def _check_name(function: str, argument: str, name: str | None) -> None:
    names = [EAGER, *BACKENDS]
    if name is not None and name not in names:
        raise ArgumentError(function, argument, repr(name), " or ".join(names))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def call(op: Op, *inputs: Any) -> Any:
    """Run an op on the backend that was asked for, or on the one that is best for these inputs."""
    try:
        if forced is None and not is_compiling() and _too_small(op, inputs):
            return op.reference(*inputs)
        return _run(op, inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if not isinstance(error, ArgumentError | BackendError):
            op.check(*inputs)  # raises an error that names the argument, if one is at fault
        raise


def _too_small(op: Op, inputs: Sequence[Any]) -> bool:
    if inputs[0].numel() >= op.small:
        return False
    return op.seed_at is None or inputs[op.seed_at] is None  # eager draws in many steps


def _run(op: Op, inputs: Sequence[Any]) -> Any:
    if isinstance(op, Seam):
        backend = choose(op, inputs)
        return op.reference(*inputs) if backend == EAGER else op.fused(backend, *inputs)
    if _is_dtensor(inputs[0]):
        return dtensor.on_shards(op, inputs, _run)
    return run_on(op, choose(op, inputs), inputs)


def run_on(op: Op, backend: str, inputs: Sequence[Any]) -> Any:
    """Run an op on this backend, which can serve these inputs."""
    if backend == EAGER:
        return op.reference(*inputs)
    if _is_dtensor(inputs[0]):
        return dtensor.on_shards(op, inputs, lambda op, inputs: run_on(op, backend, inputs))
    dtype = op.autocast.get(inputs[0].device.type)
    if dtype is not None and torch.is_autocast_enabled(inputs[0].device.type):
        inputs = [_cast(value, dtype) for value in inputs]
    kernel = op.kernels[backend]
    if torch.is_grad_enabled() and any(_requires_grad(v) for v in inputs):
        return kernel.function.apply(*inputs)
    return kernel.public(as_tuple(kernel.forward(*inputs)))


def _is_dtensor(x: Any) -> bool:
    return type(x) not in _PLAIN and dtensor.is_one(x)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


# --- Choice -----------------------------------------------------------------------------------


def choose(op: Op, inputs: Sequence[Any]) -> str:
    """The backend for these inputs; raises BackendError if the one asked for cannot serve."""
    if forced is not None:
        _check_name(BACKEND_VARIABLE, "the environment variable", forced)
        if reason := op.why_not(forced, inputs):
            op.check(*inputs)
            raise BackendError(op.name, forced, reason)
        return forced
    for backend in op.sources:
        if why_not_automatic(op, backend, inputs) is None:
            return backend
    return EAGER


def automatic(op: Op, inputs: Sequence[Any]) -> str:
    """The backend that a call takes: eager where there is too little to gain."""
    return EAGER if forced is None and _too_small(op, inputs) else choose(op, inputs)


def why_not_automatic(op: Op, backend: str, inputs: Sequence[Any]) -> str | None:
    """Why the automatic choice does not take this backend."""
    reason = op.why_not(backend, inputs)
    if reason is None and BACKENDS[backend].devices != {"cpu"}:
        rivals = tuple(name for name in op.sources if op.refused(name, inputs) is None)
        reason = _evidence.against(op, backend, rivals, inputs[0])
    return reason


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and why the others do not; how it runs it, where it may vary."""

    op: str
    chosen: str
    reasons: dict[str, str]
    detail: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.chosen}" + (f": {self.detail}" if self.detail else "")]
        lines += [f"  not {backend}: {reason}" for backend, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend `function(*args, **kwargs)` would run on, and why the others would not.

    `function` is one of torchweld.functional, or its name. Nothing is computed.
    """
    name = function if isinstance(function, str) else function.__name__
    if name not in OPS:
        raise ArgumentError("explain", "function", repr(name), ", ".join(sorted(OPS)))
    op = OPS[name]
    bound = inspect.signature(getattr(torchweld.functional, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    inputs = _inputs(op, bound.arguments)
    op.check(*inputs)
    chosen = automatic(op, inputs)
    reasons = {}
    for backend in [EAGER, *BACKENDS]:
        if backend == chosen:
            continue
        if backend != EAGER and (reason := why_not_automatic(op, backend, inputs)):
            reasons[backend] = reason
        elif forced is not None:
            reasons[backend] = f"{forced} was asked for by name"
        elif _too_small(op, inputs):
            reasons[backend] = f"fewer than {op.small} elements: too small to gain"
        else:
            reasons[backend] = f"{chosen} comes first"
    detail = op.detail(chosen, *inputs) if isinstance(op, Seam) and op.detail else ""
    return Explanation(name, chosen, reasons, detail)


def _inputs(op: Op, given: dict[str, Any]) -> Sequence[Any]:
    """The forward's arguments from the public function's, without drawing a seed."""
    if op.inputs is None:
        return [given[argument] for argument in op.forward_signature.arguments]
    if "seed" in given and given["seed"] is None:
        given["seed"] = 0
    return op.inputs(**given)


def backends() -> dict[str, str]:
    """Every backend: "available", or why it is not."""
    status = {EAGER: "available"}
    return status | {name: b.missing() or "available" for name, b in BACKENDS.items()}
