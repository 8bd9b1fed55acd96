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
    """The parts of an autograd function; torchweld.registry explains the argument names."""

    name: str
    forward_signature: Signature
    backward_signature: Signature
    # Names of the forward op's results that the function returns with a gradient.
    public: Sequence[str]
    # Maps the backward op's arguments to its results in eager torch, for second derivatives.
    eager_backward: Callable[..., Any]
    # The next two are documented in Op.
    unsaved: Callable[..., Collection[str]] | None = None
    same_gradient: Mapping[str, tuple[str, Callable[..., bool]]] = field(default_factory=dict)

    @classmethod
    def of(cls, op: Op) -> Differentiable:
        """Make one from an op's declaration."""
        return cls(
            op.name,
            op.forward_signature,
            op.backward_signature,
            op.public,
            op.backward_reference or derive_from_reference(op),
            op.unsaved,
            op.same_gradient,
        )


def exports_a_derivative() -> bool:
    """Whether torch.export is tracing a program that may be trained later.

    Its tracer runs autograd functions but records only their forward passes, and so
    drops their backward passes: the recorded ops need derivatives of their own.
    """
    # torch.compiler.is_exporting() returns this flag, but Dynamo in torch 2.11 assumes True.
    return torch.compiler._is_exporting_flag and torch.is_grad_enabled()


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    """An op's results as a tuple: torch returns a single result without one."""
    return results if isinstance(results, tuple) else (results,)


def make_unaliased(result: torch.Tensor) -> torch.Tensor:
    """A result that the caller may modify in place.

    torch refuses in-place changes to a node's result that is a view or one of the node's inputs.
    """
    if torch.compiler.is_compiling() or not result._is_view():
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


# Keyed by the node's name: torch 2.10 cannot compile a function with these objects in its closure.
_NODES: dict[str, tuple[Differentiable, Any]] = {}


def autograd_function(op: Differentiable, kernel: Any) -> type[torch.autograd.Function]:
    """Make one class for each backend, so that a backward pass runs on its forward pass's backend.

    `kernel` is a Kernel, or has the same `forward`, `backward`, `public` and `backend`. Results
    that it returns beside the public ones get no gradient.
    """
    node = f"{op.name}_{kernel.backend.replace('/', '_')}"
    _NODES[node] = (op, kernel)
    inputs, results = op.forward_signature.arguments, op.forward_signature.results
    wanted, gradients = op.backward_signature.arguments, op.backward_signature.results
    types_of = dict(zip(inputs, op.forward_signature.types, strict=True))
    public = op.public
    # Zeros take the place of a missing gradient where the backward op cannot do without it.
    kinds = dict(zip(wanted, op.backward_signature.types, strict=True))
    wants_all = len(public) > 1 and any("Optional" not in kinds[f"grad_{name}"] for name in public)

    # The values kept for the backward pass. Tensors go through save_for_backward, which watches
    # them for changes in place; other arguments, and dtypes, are kept in a list.
    values = [*inputs, *results]
    is_tensor = {name: "Tensor" in types_of.get(name, "Tensor") for name in values}
    saved = [name for name in values if is_tensor[name] and name in wanted]
    plain = [name for name in inputs if not is_tensor[name] and name in wanted]
    typed = [name for name in inputs if is_tensor[name] and f"{name}_dtype" in wanted]
    saved_at = [values.index(name) for name in saved]
    plain_at = [inputs.index(name) for name in plain]
    typed_at = [inputs.index(name) for name in typed]

    # What the backward pass has, in this order, and where the backward op's arguments are in it.
    has = [*saved, *plain, *(f"{name}_dtype" for name in typed)]
    has += [*(f"grad_{name}" for name in public), *(f"need_{name}" for name in inputs)]
    arguments_at = [has.index(name) for name in wanted]
    gradient_at = [
        gradients.index(f"grad_{name}") if f"grad_{name}" in gradients else None for name in inputs
    ]

    def forward(ctx: Any, *arguments: Any) -> Any:
        op, kernel = _NODES[node]
        made = as_tuple(kernel.forward(*arguments))
        every = (*arguments, *made)
        to_save = [every[at] for at in saved_at]
        if op.unsaved is not None:
            unsaved = op.unsaved(*arguments)
            to_save = [
                None if name in unsaved else value
                for name, value in zip(saved, to_save, strict=True)
            ]
        ctx.save_for_backward(*to_save)
        ctx.kept = [arguments[at] for at in plain_at] + [arguments[at].dtype for at in typed_at]
        ctx.same = {
            name: source for name, (source, when) in op.same_gradient.items() if when(*arguments)
        }
        ctx.late = None
        returned = kernel.public(made)
        if isinstance(returned, tuple):
            ctx.set_materialize_grads(wants_all)
            if beside := returned[len(public) :]:
                ctx.mark_non_differentiable(*beside)
        return returned

    def backward(ctx: Any, *grads: Any) -> Any:
        op, kernel = _NODES[node]
        for grad in grads:
            if grad is not None:
                break
        else:
            return (None,) * len(inputs)
        if ctx.late is not None and (late := _take_left_over(ctx, grads)) is not None:
            return late
        needs = ctx.needs_input_grad
        asked = _list_asked(inputs, needs, ctx.same) if ctx.same else needs
        has = (*ctx.saved_tensors, *ctx.kept, *grads[: len(public)], *asked)
        arguments = [has[at] for at in arguments_at]
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and not compiling:
            made = op.eager_backward(*arguments)  # its graph gives second derivatives
        else:
            made = kernel.backward(*arguments)
        made = as_tuple(made)
        of_inputs = [
            made[at] if need and at is not None else None
            for at, need in zip(gradient_at, asked, strict=True)
        ]
        if ctx.same:
            named = dict(zip([f"grad_{name}" for name in inputs], of_inputs, strict=True))
            named |= dict(zip([f"grad_{name}" for name in public], grads, strict=True))
            of_inputs = [
                named[ctx.same.get(name, f"grad_{name}")] if need else None
                for name, need in zip(inputs, needs, strict=True)
            ]
        if not compiling and torch._C._autograd._get_current_graph_task_keep_graph():
            _leave_over(ctx, grads, of_inputs)
        return tuple(of_inputs)

    # The class needs its name at creation: torch derives the names of its nodes, seen in grad_fn
    # and in the profiler, from it immediately.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return types.new_class(
        node, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(methods)
    )


# Zero-bubble schedules run a backward pass twice: first for the inputs, retaining the graph, then
# for the weights. A kernel computes both at once, so the first run keeps the gradients that it does
# not use for the second.


def _leave_over(ctx: Any, grads: tuple[Any, ...], gradients: list[Any]) -> None:
    unused = {
        i: gradients[i]
        for i, goes_on in enumerate(list_reached(ctx))
        if not goes_on and gradients[i] is not None
    }
    ctx.late = (grads, unused) if unused else None


def _take_left_over(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The gradients needed now, if an earlier run on the same gradients kept all of them."""
    (earlier, unused), goes_on = ctx.late, list_reached(ctx)
    if any(a is not b for a, b in zip(earlier, grads, strict=True)) or torch.is_grad_enabled():
        return None
    if any(goes and i not in unused for i, goes in enumerate(goes_on)):
        return None
    ctx.late = None
    return tuple([unused[i] if goes else None for i, goes in enumerate(goes_on)])


def list_reached(ctx: Any) -> list[bool]:
    """For each input, whether the running backward pass continues to it."""
    if torch.compiler.is_compiling():  # compiled graphs run whole
        return list(ctx.needs_input_grad)
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return [need and _will_run(next(nodes)) for need in ctx.needs_input_grad]


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf: torch.autograd.grad is to return its gradient
        return True


def _list_asked(inputs: tuple[str, ...], needs: Any, same: dict[str, str]) -> list[bool]:
    """Whether to compute each gradient; some equal an incoming or another gradient."""
    wanted = dict(zip(inputs, needs, strict=True))
    lent = {source for name, source in same.items() if wanted[name]}
    return [name not in same and (need or f"grad_{name}" in lent) for name, need in wanted.items()]


def derive_from_reference(op: Op) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """Make a differentiable backward function from the reference (create_graph=True)."""

    def backward(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
        values = dict(zip(op.backward_signature.arguments, arguments, strict=True))
        inputs = [values[name] for name in op.forward_signature.arguments]
        names = [name.removeprefix("grad_") for name in op.backward_signature.results]
        needed = [
            name
            for name in names
            if isinstance(values[name], torch.Tensor) and values[name].requires_grad
        ]
        grads = [values[f"grad_{name}"] for name in op.public]
        sources = [values[name] for name in needed]
        gradients = torch.autograd.grad(op.reference(*inputs), sources, grads, create_graph=True)
        by_name = dict(zip(needed, gradients, strict=True))
        return tuple([by_name.get(name) for name in names])

    return backward
