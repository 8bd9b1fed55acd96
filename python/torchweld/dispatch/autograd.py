"""The autograd function of an op's kernel, derived from the names in its two schemas."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling

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
    if is_compiling() or not result._is_view():
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


# By the node's name: torch 2.10 cannot compile a function with these objects in its closure.
_NODES: dict[str, tuple[Differentiable, Any]] = {}


def autograd_function(
    op: Differentiable, kernel: Any, returned: Sequence[str] = ()
) -> type[torch.autograd.Function]:
    """Make one class for each backend, so that a backward pass runs on its forward pass's backend.

    `kernel` has `forward`, `backward` and `backend`. The node's first argument has the same two, in
    a form that is ready for calls like this one, or is None. `returned` are the results that the
    node returns, by default the public ones; others than those get no gradient.
    """
    node = f"{op.name}_{kernel.backend}"
    _NODES[node] = (op, kernel)
    scope: dict[str, Any] = {}
    source = _write_node(node, op, returned or op.public)
    exec(compile(source, f"<the node {node}>", "exec"), globals(), scope)
    # The class needs its name at creation: torch derives the names of its nodes, seen in grad_fn
    # and in the profiler, from it immediately.
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    return types.new_class(
        node, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(methods)
    )


def _write_node(node: str, op: Differentiable, returned: Sequence[str]) -> str:
    """The code of a node, without a loop: each value has the name that it has in the schemas.

    Tensors kept for the backward pass go through save_for_backward, which watches them for changes
    in place. An input in `op.same_gradient` may lend another one's gradient, its source.
    """
    inputs, results, public = (
        op.forward_signature.arguments,
        op.forward_signature.results,
        op.public,
    )
    wanted, gradients = op.backward_signature.arguments, op.backward_signature.results
    types_of = dict(zip(inputs, op.forward_signature.types, strict=True))
    # Zeros take the place of a missing gradient where the backward op cannot do without it.
    kinds = dict(zip(wanted, op.backward_signature.types, strict=True))
    wants_all = any("Optional" not in kinds[f"grad_{name}"] for name in public)

    tensors = [name for name in inputs if "Tensor" in types_of[name]]
    saved = [name for name in (*inputs, *results) if name in {*tensors, *results} & {*wanted}]
    kept = [name for name in inputs if name not in tensors and name in wanted]
    dtypes = [name for name in tensors if f"{name}_dtype" in wanted]
    same = {name: source for name, (source, _) in op.same_gradient.items()}
    lenders = [name for name in inputs if f"grad_{name}" in same.values()]

    to_save = [
        f'None if "{name}" in _unsaved else {name}' if op.unsaved else name for name in saved
    ]
    to_keep = ["_steps", *kept, *(f"{name}.dtype" for name in dtypes)]
    to_keep += [f'_op.same_gradient["{name}"][1]({", ".join(inputs)})' for name in same]
    is_kept = [
        "_steps",
        *kept,
        *(f"{name}_dtype" for name in dtypes),
        *(f"_{n}_same" for n in same),
    ]
    incoming = [f"grad_{name}" for name in public]

    def gradient_of(name: str) -> str:
        own = f"grad_{name}" if f"grad_{name}" in gradients else "None"
        if name in same:
            return f"({same[name]} if _{name}_same else {own}) if _{name}_wanted else None"
        if own == "None":
            return own
        return f"{own} if {f'_{name}_wanted' if name in lenders else f'need_{name}'} else None"

    forward = [
        f"_op, _kernel = _NODES[{node!r}]",
        f"{_unpack(results)} = (_kernel if _steps is None else _steps).forward({', '.join(inputs)})",
        f"_unsaved = _op.unsaved({', '.join(inputs)})" if op.unsaved else "",
        f"_ctx.save_for_backward({', '.join(to_save)})",
        f"_ctx.kept = ({', '.join(to_keep)},)",
        "_ctx.late = None",
        f"_ctx.set_materialize_grads({wants_all and len(public) > 1})" if returned[1:] else "",
        f"_ctx.mark_non_differentiable({', '.join(rest)})"
        if (rest := returned[len(public) :])
        else "",
        f"return {', '.join(returned)}",
    ]
    backward = [
        f"if {' and '.join(f'{name} is None' for name in incoming)}:",
        f"    return (None,) * {1 + len(inputs)}",
        f"_grads = ({', '.join(incoming)},)",
        "if _ctx.late is not None and (_late := _take_left_over(_ctx, _grads)) is not None:",
        "    return _late",
        f"{_unpack(saved, tuples=True)} = _ctx.saved_tensors" if saved else "",
        f"{_unpack(is_kept, tuples=True)} = _ctx.kept",
        f"_, {_unpack([f'need_{name}' for name in inputs], tuples=True)} = _ctx.needs_input_grad",
        *(f"_{name}_wanted = need_{name}" for name in (*same, *lenders)),
    ]
    for name, source in same.items():
        backward.append(f"if _{name}_same:")
        backward.append(f"    need_{name} = False")
        if (lender := source.removeprefix("grad_")) in lenders:
            backward.append(f"    need_{lender} = need_{lender} or _{name}_wanted")
    backward += [
        f"_op, _kernel = _NODES[{node!r}]",
        "_is_eager = not is_compiling()",
        "if _is_eager and torch.is_grad_enabled():",
        # Its graph gives second derivatives.
        f"    {_unpack(gradients, tuples=True)} = as_tuple(_op.eager_backward({', '.join(wanted)}))",
        "else:",
        "    _run = (_kernel if _steps is None else _steps).backward",
        f"    {_unpack(gradients)} = _run({', '.join(wanted)})",
        f"_made = (None, {', '.join(gradient_of(name) for name in inputs)})",
        "if _is_eager and torch._C._autograd._get_current_graph_task_keep_graph():",
        "    _leave_over(_ctx, _grads, _made)",
        "return _made",
    ]
    rest_of_grads = ", *_" if returned[len(public) :] else ""
    heads = (
        f"def forward(_ctx, _steps, {', '.join(inputs)}):",
        f"def backward(_ctx, {', '.join(incoming)}{rest_of_grads}):",
    )
    return "\n".join(
        "\n    ".join([head, *filter(None, body)])
        for head, body in zip(heads, (forward, backward), strict=True)
    )


def _unpack(names: Sequence[str], *, tuples: bool = False) -> str:
    """The left side of an assignment; torch returns a single result without a tuple."""
    return f"{names[0]}," if tuples and len(names) == 1 else ", ".join(names)


# Zero-bubble schedules run a backward pass twice: first for the inputs, retaining the graph, then
# for the weights. A kernel computes both at once, so the first run keeps the gradients that it does
# not use for the second.


def _leave_over(ctx: Any, grads: tuple[Any, ...], gradients: Sequence[Any]) -> None:
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
    if is_compiling():  # compiled graphs run whole
        return list(ctx.needs_input_grad)
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return [need and _will_run(next(nodes)) for need in ctx.needs_input_grad]


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf: torch.autograd.grad is to return its gradient
        return True


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
