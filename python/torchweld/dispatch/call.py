"""The one path of a call: check, choice of a backend, autocast, autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from torchweld.dispatch import choice, dtensor, native
from torchweld.dispatch.choice import choose, use_backend
from torchweld.errors import ArgumentError
from torchweld.registry import EAGER, Composite, Op
from torchweld.registry.op import why_not_now

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def call(op: Op, *inputs: Any) -> Any:
    """Run an op on the selected backend, or on the best one for these inputs."""
    try:
        # This is is_compiling() with one Python call less: small calls count each of them.
        compiling = is_dynamo_compiling() or torch.compiler._is_compiling_flag
        if choice.forced is None and not compiling and is_too_small(op, inputs):
            return op.reference(*inputs)
        return _run(op, inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if not isinstance(error, ArgumentError):
            op.check(*inputs)  # raises an error that names the argument, if one is at fault
        raise


def is_too_small(op: Op, inputs: Sequence[Any]) -> bool:
    """Whether eager is as fast and as exact, on the CPU.

    On a GPU trials decide at every size.
    """
    x = inputs[0]
    if x.numel() >= op.small or x.is_cuda or x.dtype not in op.dtypes_of_eager or x.is_nested:
        return False
    return op.seed_at is None or inputs[op.seed_at] is None  # eager draws in many steps


def _run(op: Op, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    if x.is_nested or x.dtype not in op.dtypes:
        op.check(*inputs)  # torch would accept more
    if isinstance(op, Composite):
        backend = choose(op, inputs)
        return op.reference(*inputs) if backend == EAGER else op.fused(backend, *inputs)
    if _is_dtensor(x):
        return dtensor.run_on_shards(op, inputs, _run)
    return run_on(op, choose(op, inputs), inputs)


def run_on(op: Op, backend: str, inputs: Sequence[Any]) -> Any:
    """Run an op on this backend, which can serve these inputs."""
    if backend == EAGER:
        return op.reference(*inputs)
    if _is_dtensor(inputs[0]):
        return dtensor.run_on_shards(op, inputs, lambda op, inputs: run_on(op, backend, inputs))
    if op.autocast:
        device = inputs[0].device.type
        dtype = op.autocast.get(device)
        if dtype is not None and torch.is_autocast_enabled(device):
            inputs = [_cast(value, dtype) for value in inputs]
    return op.kernels[backend].run(inputs)


def find_direct_kernel(op: Op, *tensors: Any) -> Any:
    """The CPU's forward op, if a call with these tensors leaves nothing else to decide; else None.

    Then no gradient is needed, no other backend is selected and no mode of torch is active. It is
    for callers whose kernel takes microseconds. Where the op raises, the whole path explains why.
    """
    if is_compiling() or choice.forced not in (None, ("cpu",)):
        return None
    graph = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in _PLAIN or not x.is_cpu or (graph and x.requires_grad):
            return None
    if native.cpu_isa is None or torch._C._is_any_autocast_enabled() or why_not_now():
        return None
    return op.kernels["cpu"].forward._op  # without its Python frame


def _is_dtensor(x: Any) -> bool:
    return type(x) not in _PLAIN and dtensor.is_dtensor(x)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def choose_automatically(op: Op, inputs: Sequence[Any]) -> str:
    """The backend that a call takes; small inputs fall back to eager."""
    return EAGER if choice.forced is None and is_too_small(op, inputs) else choose(op, inputs)


# --- Recomputation ----------------------------------------------------------------------------


def run_checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """Run function(*args), saving only its arguments; the backward pass runs it again.

    The recomputation uses the backend selected now, even if another one is selected by then. In a
    compiled or recorded graph the choice is already made.
    """
    context: dict[str, Any] = {}
    if not is_compiling() and not _records_a_graph():
        asked: Sequence[str | None] = choice.forced or (None,)
        context["context_fn"] = partial(_make_contexts, asked)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **context)


def _records_a_graph() -> bool:
    """Whether make_fx, or a transform built on it, records: checkpoints then get no contexts."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._get_dispatch_mode(proxy) is not None


def _make_contexts(names: Sequence[str | None]) -> tuple[Any, Any]:
    return nullcontext(), use_backend(*names)
