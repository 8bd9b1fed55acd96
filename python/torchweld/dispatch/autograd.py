"""The autograd function of an op's kernel, derived from the names in its two schemas."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchweld.registry import Op, Signature


@dataclass(frozen=True)
class Differentiable:
    """What an autograd function is made from; torchweld.registry explains the argument names."""

    name: str
    forward_signature: Signature
    backward_signature: Signature
    # Names of the forward's results that the function returns with a gradient.
    public: Sequence[str]
    # The backward's arguments to its results, in eager torch: it makes second derivatives.
    eager_backward: Callable[..., Any]
    # As in Op.
    unsaved: Callable[..., Collection[str]] | None = None
    same_gradient: Mapping[str, tuple[str, Callable[..., bool]]] = field(default_factory=dict)

    @classmethod
    def of(cls, op: Op) -> Differentiable:
        """What an op declares."""
        return cls(
            op.name,
            op.forward_signature,
            op.backward_signature,
            op.public,
            op.backward_reference or derivatives_of_reference(op),
            op.unsaved,
            op.same_gradient,
        )


def exports_a_derivative() -> bool:
    """Whether torch.export is tracing what may be trained later.

    Its tracer runs autograd functions and records only their forwards, so that they lose their
    backwards: what it records has to have a derivative itself.
    """
    # torch.compiler.is_exporting() returns this flag, but Dynamo of torch 2.11 takes it for true.
    return torch.compiler._is_exporting_flag and torch.is_grad_enabled()


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    """An op's results: torch hands a single one over bare."""
    return results if isinstance(results, tuple) else (results,)


def unaliased(result: torch.Tensor) -> torch.Tensor:
    """A result that a caller may change in place.

    torch refuses changes in place of a node's result if it is a view or an input of the node.
    """
    if torch.compiler.is_compiling() or not result._is_view():
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


# By the name of the node: torch 2.10 compiles no function that has such objects in its closure.
_NODES: dict[str, tuple[Differentiable, Any]] = {}


def autograd_function(op: Differentiable, kernel: Any) -> type[torch.autograd.Function]:
    """One class for each backend, so that a backward runs where its forward ran.

    `kernel` is a Kernel, or has as it forward, backward, public and backend. Results beside the
    public ones that it lets through get no gradient.
    """
    name = f"{op.name}_{kernel.backend.replace('/', '_')}"
    _NODES[name] = (op, kernel)
    inputs, outputs = op.forward_signature.arguments, op.forward_signature.results
    wanted, gradients = op.backward_signature.arguments, op.backward_signature.results
    is_tensor = ["Tensor" in kind for kind in op.forward_signature.types]

    public = op.public
    # Tensors go through save_for_backward, which watches them for changes in place.
    tensors = [name for name, tensor in zip(inputs, is_tensor, strict=True) if tensor]
    saved = [name for name in tensors if name in wanted]
    kept = [name for name in outputs if name in wanted]
    plain = [name for name in inputs if name not in tensors]
    typed = [name for name in tensors if f"{name}_dtype" in wanted]

    positions = {name: ("saved", i) for i, name in enumerate(saved + kept)}
    positions |= {name: ("plain", i) for i, name in enumerate(plain)}
    positions |= {f"{name}_dtype": ("dtype", i) for i, name in enumerate(typed)}
    positions |= {f"grad_{name}": ("grad", i) for i, name in enumerate(public)}
    positions |= {f"need_{name}": ("need", i) for i, name in enumerate(inputs)}
    backward_arguments = [positions[name] for name in wanted]
    gradient_of = [
        gradients.index(f"grad_{name}") if f"grad_{name}" in gradients else None for name in inputs
    ]

    saved_at = [inputs.index(name) for name in saved]
    kept_at = [outputs.index(name) for name in kept]
    plain_at = [inputs.index(name) for name in plain]
    typed_at = [inputs.index(name) for name in typed]

    def forward(ctx: Any, *given: Any) -> Any:
        op, kernel = _NODES[name]
        results = as_tuple(kernel.forward(*given))
        values = [given[i] for i in saved_at] + [results[i] for i in kept_at]
        if op.unsaved is not None:
            unsaved = op.unsaved(*given)
            values = [
                None if name in unsaved else value
                for name, value in zip(saved + kept, values, strict=True)
            ]
        ctx.save_for_backward(*values)
        ctx.plain = [given[i] for i in plain_at]
        ctx.dtype = [given[i].dtype for i in typed_at]
        ctx.same = {
            name: source for name, (source, when) in op.same_gradient.items() if when(*given)
        }
        ctx.late = None
        returned = kernel.public(results)
        if isinstance(returned, tuple):
            ctx.set_materialize_grads(False)
            if beside := returned[len(public) :]:
                ctx.mark_non_differentiable(*beside)
        return returned

    def backward(ctx: Any, *grads: Any) -> Any:
        op, kernel = _NODES[name]
        if all(grad is None for grad in grads):
            return (None,) * len(inputs)
        if ctx.late is not None and (late := _left_for_later(ctx, grads)) is not None:
            return late
        needs = ctx.needs_input_grad
        asked = _asked(inputs, needs, ctx.same) if ctx.same else needs
        values = {
            "saved": ctx.saved_tensors,
            "plain": ctx.plain,
            "dtype": ctx.dtype,
            "grad": grads,
            "need": asked,
        }
        arguments = [values[kind][i] for kind, i in backward_arguments]
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            results = op.eager_backward(*arguments)  # its graph is a second derivative's
        else:
            results = kernel.backward(*arguments)
        results = as_tuple(results)
        found = [
            results[at] if need and at is not None else None
            for at, need in zip(gradient_of, asked, strict=True)
        ]
        if ctx.same:
            named = dict(zip([f"grad_{name}" for name in inputs], found, strict=True))
            named |= dict(zip([f"grad_{name}" for name in public], grads, strict=True))
            found = [
                named[ctx.same.get(name, f"grad_{name}")] if need else None
                for name, need in zip(inputs, needs, strict=True)
            ]
        if not compiling and torch._C._autograd._get_current_graph_task_keep_graph():
            _leave_for_later(ctx, grads, found)
        return tuple(found)

    # With its name from the start: that of its nodes, in grad_fn and in the profiler, is made then.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return types.new_class(
        name, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(methods)
    )


# Zero-bubble schedules run a backward twice: for what flows, keeping the graph, and then for the
# parameters. A kernel computes both at once: what the first run has no use for is kept for the
# second.


def _leave_for_later(ctx: Any, grads: tuple[Any, ...], found: list[Any]) -> None:
    unused = {
        i: found[i]
        for i, goes_on in enumerate(where_it_goes(ctx))
        if not goes_on and found[i] is not None
    }
    ctx.late = (grads, unused) if unused else None


def _left_for_later(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What is wanted now, if an earlier run with the same gradients found all of it."""
    (earlier, unused), goes_on = ctx.late, where_it_goes(ctx)
    if any(a is not b for a, b in zip(earlier, grads, strict=True)) or torch.is_grad_enabled():
        return None
    if any(goes and i not in unused for i, goes in enumerate(goes_on)):
        return None
    ctx.late = None
    return tuple([unused[i] if goes else None for i, goes in enumerate(goes_on)])


def where_it_goes(ctx: Any) -> list[bool]:
    """For each input, whether the running backward goes on to it."""
    if torch.compiler.is_compiling():  # compiled graphs run whole
        return list(ctx.needs_input_grad)
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return [need and _runs(next(nodes)) for need in ctx.needs_input_grad]


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf: torch.autograd.grad is to return its gradient
        return True


def _asked(inputs: tuple[str, ...], needs: Any, same: dict[str, str]) -> list[bool]:
    """The gradients to ask the kernel for, where some are others unchanged."""
    wanted = dict(zip(inputs, needs, strict=True))
    lent = {source for name, source in same.items() if wanted[name]}
    return [name not in same and (need or f"grad_{name}" in lent) for name, need in wanted.items()]


def derivatives_of_reference(op: Op) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The backward's arguments to its results, with a graph of their own (create_graph=True)."""

    def backward(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
        values = dict(zip(op.backward_signature.arguments, arguments, strict=True))
        given = [values[name] for name in op.forward_signature.arguments]
        names = [name.removeprefix("grad_") for name in op.backward_signature.results]
        needed = [
            name
            for name in names
            if isinstance(values[name], torch.Tensor) and values[name].requires_grad
        ]
        grads = [values[f"grad_{name}"] for name in op.public]
        sources = [values[name] for name in needed]
        found = torch.autograd.grad(op.reference(*given), sources, grads, create_graph=True)
        by_name = dict(zip(needed, found, strict=True))
        return tuple([by_name.get(name) for name in names])

    return backward
