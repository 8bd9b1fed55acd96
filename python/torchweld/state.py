"""What torch is doing now. Callers name the states that matter to them; only this file asks torch.

Dynamo traces these functions, so none may hide what it knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PLAIN = (torch.Tensor, torch.nn.Parameter)
# Of torch's dispatch modes, two that record a call or compute only its sizes.
_RECORDS, _FAKES = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE

count_dispatch_modes = torch._C._len_torch_dispatch_stack
count_function_modes = torch._C._len_torch_function_stack
is_transforming = torch._C._are_functorch_transforms_active


def is_compiling() -> bool:
    """Whether torch compiles or exports in this thread.

    torch's own flag is up in all threads while one compiles: a forward that saw it, and a backward
    that did not, would not agree. Where this thread traces, Dynamo does or a mode records.
    """
    return is_dynamo_compiling() or (
        torch.compiler._is_compiling_flag and bool(count_dispatch_modes())
    )


def is_exporting() -> bool:
    """Whether torch.export traces. Dynamo in torch 2.11 takes torch's own function for True."""
    return torch.compiler._is_exporting_flag


def has_compiler() -> bool:
    """Whether torch.compile's front end traces, to hand the graph to a compiler.

    Not for torch.export, nor for a graph of fuse(), which runs in eager torch.
    """
    return is_dynamo_compiling() and not torch.compiler._is_exporting_flag


def is_tracing() -> bool:
    """Whether torch.jit.trace records."""
    return bool(torch._C._get_tracing_state())


# torch 2.14 has the flag for each thread, behind a function.
_is_fx_tracing = getattr(_symbolic_trace, "_get_is_fx_tracing", None)


def is_fx_tracing() -> bool:
    """Whether torch.fx.symbolic_trace, or what is built on it, records."""
    if _is_fx_tracing is not None:
        return bool(_is_fx_tracing())
    return bool(_symbolic_trace._is_fx_tracing_flag)


def is_recording() -> bool:
    """Whether make_fx, or a transform built on it, records."""
    return torch._C._get_dispatch_mode(_RECORDS) is not None


def is_faking() -> bool:
    """Whether a FakeTensorMode computes sizes only."""
    return torch._C._get_dispatch_mode(_FAKES) is not None


def is_fake(x: Any) -> TypeGuard[FakeTensor]:
    """Whether a tensor has sizes, but no numbers."""
    return isinstance(x, FakeTensor)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a tensor stands for a plain one in a compiler's trace, which is no export."""
    return type(x) in (FakeTensor, FunctionalTensor) and is_compiling() and not is_exporting()


def is_batched(x: torch.Tensor) -> bool:
    """Whether vmap, or a backward pass with is_grads_batched=True, has batched a tensor."""
    return is_batchedtensor(x) or is_legacy_batchedtensor(x)


def has_modes() -> bool:
    """Whether a mode of torch sees or changes calls."""
    return bool(count_dispatch_modes() or count_function_modes())


def has_other_modes() -> bool:
    """The same, but for modes that have `counts_welds`: graphs of fuse() run in them."""
    if not has_modes():
        return False
    modes = _get_current_dispatch_mode_stack()
    return bool(count_function_modes()) or not all(getattr(m, "counts_welds", False) for m in modes)


def is_watched() -> bool:
    """Whether more than autograd sees or changes calls: a mode, transform, recorder or compiler."""
    return bool(
        is_compiling()  # first: Dynamo traces no more of this
        or count_dispatch_modes()
        or count_function_modes()
        or is_transforming()
        or torch._C._get_tracing_state()
        or forward_ad._current_level >= 0
    )


def has_forward_ad() -> bool:
    """Whether forward-mode AD is on."""
    return forward_ad._current_level >= 0


def is_capturing() -> bool:
    """Whether a CUDA graph captures the current stream."""
    return torch.cuda.is_current_stream_capturing()


def is_capturing_at_all() -> bool:
    """The same where there may be no CUDA or no driver, for which torch raises an error."""
    return torch.cuda.is_initialized() and is_capturing()


# The names of a module's hooks: those of its calls, and those of its gradients.
CALL_HOOKS = "_forward_pre_hooks", "_forward_hooks"
HOOKS = *CALL_HOOKS, "_backward_pre_hooks", "_backward_hooks"


def count_hooks(module: torch.nn.Module, names: Iterable[str] = HOOKS) -> int:
    """The number of a module's own hooks."""
    return sum(len(getattr(module, name)) for name in names)


# Where torch is asked this.
CAPTURING = "cuda.is_current_stream_capturing", "xpu.is_current_stream_capturing"


def can_read(*tensors: torch.Tensor | None) -> bool:
    """Whether Python may branch on the tensors' numbers, and write results in place.

    It may not while torch compiles, records or transforms, nor for fake, meta or batched tensors.
    """
    if is_compiling() or is_transforming() or is_recording() or is_faking():
        return False
    for t in tensors:
        if t is not None and (type(t) not in PLAIN or t.is_meta or is_batched(t)):
            return False
    return True


def why_not_now() -> str | None:
    """The current mode of torch that only eager serves; None if there is none."""
    # Products ask at each call, so this calls none of the functions above.
    if is_transforming():
        return "inside a torch.func transform, whose rules eager has"
    if forward_ad._current_level >= 0:
        return "inside forward-mode AD, whose rules eager has"
    if torch._C._get_tracing_state():
        return "while torch.jit.trace records, which takes eager's ops"
    if torch.compiler._is_exporting_flag and torch.onnx.is_in_onnx_export():
        return "inside torch.onnx.export, which knows eager's ops"
    return None


# --- The running backward pass --------------------------------------------------------------------


def has_tangents(grads: Iterable[torch.Tensor | None]) -> bool:
    """Whether forward-mode AD differentiates the pass, by its gradients, and it makes no graph."""
    if forward_ad._current_level < 0 or torch.is_grad_enabled():
        return False
    given = [grad for grad in grads if grad is not None]
    return any(forward_ad.unpack_dual(grad).tangent is not None for grad in given)


# Whether the running backward pass leaves the graph for another one.
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph


def find_backward_pass() -> int:
    """The number of the running backward pass, -1 outside of any."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool | None:
    """Whether the running backward pass goes on to a node; None: it returns a leaf's gradient."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


__all__ = [
    "PLAIN",
    "can_read",
    "count_dispatch_modes",
    "count_function_modes",
    "find_backward_pass",
    "has_forward_ad",
    "has_modes",
    "is_batched",
    "is_capturing",
    "is_compiling",
    "is_dynamo_compiling",
    "is_exporting",
    "is_fake",
    "is_faking",
    "is_legacy_batchedtensor",
    "is_recording",
    "is_traced",
    "is_tracing",
    "is_transforming",
    "is_watched",
    "retains_graph",
    "why_not_now",
    "will_run",
]
