"""Triton's launches in a compiled graph, where Inductor's own code starts them.

An op is opaque to Inductor: its code calls torch's dispatcher, and the op allocates what it needs.
So while AOTAutograd traces an op, a rule runs the op's Triton function on the trace's tensors. Its
allocations and views become nodes of the graph, and so does each launch, as for torch's own
`triton_op`. Inductor then plans the memory, and starts the kernels between its own. It passes
floats in 64 bits, so kernels narrow them where they use them.

Where that cannot be, the op stays one node, as in eager torch and in exported graphs.
`TORCH_LOGS=torchweld.dispatch.visible` says which op, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.library import Library, wrap_triton

from torchweld import state

_LOG = logging.getLogger(__name__)
# Options that Inductor does not pass on to Triton. Fusion is Triton's default for GPUs of NVIDIA.
# Without a limit of registers, aligned kernels take as many at most (docs/notebook/graph-welds.md).
_DROPPED = ("enable_fp_fusion", "maxnreg")
_PASSED = ("num_warps", "num_stages")
# A mask is read as bytes. Inductor of torch 2.10 fails there, that of 2.13 does not; between them
# nobody tried.
_VIEWS_BOOLS = torch.__version__ >= "2.13"


class _Opaque(Exception):  # noqa: N818 - it is an answer
    """Why an op stays one node."""


class _Tracer:
    """Makes launches nodes of the graph; a Watcher of triton_kernels/launch.py."""

    traces = True
    fits = True

    def start(self, launch: Any, options: dict[str, Any]) -> None:
        if why := _why_opaque(launch, options):
            raise _Opaque(f"{launch.kernel.__name__} {why}")
        _add_node(launch, {name: x for name, x in options.items() if name not in _DROPPED})


def _why_opaque(launch: Any, options: dict[str, Any]) -> str | None:
    """Why Inductor could not start a kernel as we do; None if it can."""
    kernel = launch.kernel
    if kernel.is_gluon():
        return "is written in Gluon"
    if any(hasattr(value, "block_shape") for value in launch.args):
        return "reads descriptors of tensors"
    constants = [p.name for p in kernel.params if p.is_constexpr]
    if unknown := options.keys() - {*constants, *_DROPPED, *_PASSED}:
        return f"has options that Inductor does not know: {', '.join(sorted(unknown))}"
    # Triton is told not to make them constants, in which its functions are not written.
    given = zip(kernel.params, launch.args, strict=False)
    ones = [p.name for p, x in given if p.do_not_specialize and type(x) is int and x == 1]
    return f"has 1 as {', '.join(ones)}, which Inductor makes a constant" if ones else None


def _add_node(launch: Any, options: dict[str, Any]) -> None:
    wrap_triton(launch.kernel)[(launch.grid,)](*launch.args, **options)


def show_launches(library: Library, name: str, find: Callable[[], Callable[..., Any]]) -> None:
    """Make the launches of `torchweld::name.triton` visible; `find` returns its function."""

    def rule(
        mode: FunctionalTensorMode, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> Any:
        try:
            if kwargs:
                raise _Opaque("it is called by keyword")
            function = _find_function(find, args)
            with mode:
                return _trace(function, args)
        except _Opaque as why:
            _LOG.info("%s stays one node: %s", op, why)
        return mode.__torch_dispatch__(op, types, args, kwargs)

    torch.library.register_torch_dispatch(
        f"torchweld::{name}.triton", FunctionalTensorMode, rule, lib=library
    )


def _find_function(find: Callable[[], Callable[..., Any]], args: Sequence[Any]) -> Any:
    """The Triton function, if it can be traced with these arguments; else raises _Opaque."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not all(map(_is_on_gpu, tensors)):
        raise _Opaque("not all of its tensors are on a GPU")
    if not _VIEWS_BOOLS and any(x.dtype == torch.bool for x in tensors):
        raise _Opaque("Inductor of this torch cannot view bools as bytes")
    if _keeps_ops():
        raise _Opaque("the graph is exported")
    if any(map(_has_symbols, args)):  # each branch of the function would be a guard of the graph
        raise _Opaque("its sizes are symbolic")
    function = find()
    if not hasattr(function, "launching"):
        raise _Opaque("its launches depend on more than its arguments")
    return function


def _trace(function: Any, args: Sequence[Any]) -> Any:
    """The function's results on tensors of the trace; raises _Opaque."""
    tracer = _Tracer()
    function.launching.watch(tracer)
    try:
        results = function(*args)
    finally:
        function.launching.watch(None)
    if not tracer.fits:
        raise _Opaque("its launches depend on a setting of torch's")
    return results


def _is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU. Tests replace this function."""
    return x.is_cuda


def _keeps_ops() -> bool:
    """Whether torch.export traces, or makes a graph of its own from an exported one."""
    if state.is_exporting():
        return True
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return custom_triton_ops_decomposition_disabled()


def _has_symbols(value: Any) -> bool:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else value
    sizes = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes)
