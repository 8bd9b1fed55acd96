"""The autograd function of an op's kernel, derived from the names in its two schemas."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import forward_ad

from torchweld import state
from torchweld.dispatch.warm.generate import compile_function
from torchweld.dispatch.warm.guards import copy_constant
from torchweld.registry import Differentiable, Op


def exports_a_derivative() -> bool:
    """Whether torch.export is tracing a program that may be trained later.

    Its tracer runs autograd functions but records only their forward passes, and so
    drops their backward passes: the recorded ops need derivatives of their own.
    """
    return state.is_exporting() and torch.is_grad_enabled()


def wants_gradient(*values: Any) -> bool:
    """Whether autograd records operations on the tensors among these values."""
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return True
    return False


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    """An op's results as a tuple: torch returns a single result without one."""
    return results if isinstance(results, tuple) else (results,)


def make_unaliased(result: torch.Tensor) -> torch.Tensor:
    """A result that the caller may modify in place.

    torch refuses in-place changes to a node's result that is a view or one of the node's inputs.
    """
    if state.is_compiling() or not result._is_view():
        return result
    return torch.ops.aten._unsafe_view(result, result.shape)


class Ready(NamedTuple):
    """Both directions of a kernel, and what a node needs to know of all calls like one call."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    rest: tuple[Any, ...] = ()  # the arguments that are no tensors
    unsaved: Collection[str] = ()
    same: Sequence[bool] = ()


def complete_steps(op: Differentiable, steps: Ready, inputs: Sequence[Any]) -> Ready:
    """What a ready node takes for calls like the one with these inputs."""
    rest = [value for at, value in enumerate(inputs) if at not in op.tensors_at]
    return steps._replace(
        rest=copy_constant(tuple(rest)),
        unsaved=op.unsaved(*inputs) if op.unsaved else (),
        same=[is_so(*inputs) for _, is_so in op.same_gradient.values()],
    )


# By the node's name: torch 2.10 cannot compile a function with these objects in its closure.
_NODES: dict[str, tuple[Differentiable, Any]] = {}


def autograd_function(
    op: Differentiable, kernel: Any, returned: Sequence[str] = (), *, ready: bool = False
) -> type[torch.autograd.Function]:
    """Make one class for each backend, so that a backward pass runs on its forward pass's backend.

    `kernel` has `forward`, `backward` and `backend`. A `ready` node takes Ready, then the tensors;
    others take the forward's arguments, which torch.compile traces. `returned` are the results that
    the node returns, by default the public ones; only public results get a gradient.
    """
    node = f"{op.name}_{kernel.backend}"
    _NODES[node] = (op, kernel)
    scope: dict[str, Any] = {}
    source = _write_node(node, op, returned or op.public, ready)
    compile_function("backward", source, globals(), f"the node {node}", into=scope)
    # The class needs its name at creation: torch derives the names of its nodes, seen in grad_fn
    # and in the profiler, from it immediately.
    methods = {name: staticmethod(scope[name]) for name in ("forward", "backward")}
    made: Any = types.new_class(
        node, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(methods)
    )
    # The engine calls this; torch's own looks for vjp() first, in two more Python calls.
    made._backward_cls.apply = scope["backward"]
    return made  # type: ignore[no-any-return]


def find_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """torch's apply without its search for wrappers of transforms, in which eager serves."""
    base: Any = super(torch.autograd.Function, function)
    return base.apply  # type: ignore[no-any-return]


def tell_apart(inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs of a node. Under torch.compile, which passes none twice, repeats become views."""
    if not state.is_compiling():
        return inputs
    told: list[Any] = []
    for x in inputs:
        is_again = isinstance(x, torch.Tensor) and any(x is each for each in told)
        told.append(x.view_as(x) if is_again else x)
    return told


def _write_node(node: str, op: Differentiable, returned: Sequence[str], ready: bool) -> str:
    """The code of a node, without a loop: each value has its name in the schemas."""
    inputs, results = op.forward_signature.arguments, op.forward_signature.results
    wanted, gradients = op.backward_signature.arguments, op.backward_signature.results
    tensors = [inputs[at] for at in op.tensors_at]
    rest = [name for name in inputs if name not in tensors]
    saved = [name for name in (*tensors, *results) if name in wanted]
    same = {name: source for name, (source, _) in op.same_gradient.items()}
    flags = [f"_{name}_same" for name in same]
    given = ", ".join(inputs)
    passed = tensors if ready else inputs
    first, under, none = (["_ready"], ["_"], ["None"]) if ready else ([], [], [])
    unpack = f"{_tuple(rest)} = _ready.rest" if ready and rest else ""
    lenders = [name for name in inputs if f"grad_{name}" in same.values()]
    incoming = [f"grad_{name}" for name in op.public]
    kept = {"_ready": "_ready"} if ready else {name: name for name in rest if name in wanted}
    kept |= {f"{name}_dtype": f"{name}.dtype" for name in tensors if f"{name}_dtype" in wanted}
    kept |= dict(zip(flags, flags, strict=True))
    extra = returned[len(op.public) :]
    to_save = [f"None if '{n}' in _unsaved else {n}" if op.unsaved else n for n in saved]
    forward = [
        f"def forward({', '.join(['_ctx', *first, *passed])}):",
        unpack,
        *_find_how(node, op, flags, given, ready),
        f"{', '.join(results)} = _run({given})",
        f"_ctx.save_for_backward({', '.join(to_save)})",
        f"_ctx.kept = {_tuple(kept.values())}" if kept else "",
        "_ctx.late = None",
        f"_ctx.set_materialize_grads({_wants_all(op)})" if len(returned) > 1 else "",
        f"_ctx.mark_non_differentiable({', '.join(extra)})" if extra else "",
        f"return {', '.join(returned)}",
    ]
    backward = [
        f"def backward(_ctx, {', '.join(incoming)}{', *_' if extra else ''}):",
        f"if {' and '.join(f'{name} is None' for name in incoming)}:",
        f"    return (None,) * {len(first) + len(passed)}",
        f"_grads = {_tuple(incoming)}",
        "_is_eager, _needs = not state.is_compiling(), _ctx.needs_input_grad",
        "if _is_eager and _has_tangents(_grads):",
        f"    return carry_tangents(_ctx._forward_cls.backward, _ctx, {', '.join(incoming)})",
        f"{_tuple(saved)} = _ctx.saved_tensors" if saved else "",  # raises if one has changed
        "_is_one_of_several = _is_eager and (_ctx.late is not None or _keeps_the_graph())",
        "if _is_one_of_several:",
        "    if (_late := take_left_over(_ctx, _grads)) is not None:",
        "        return _late",
        "    _needs = list_wanted(_ctx)",
        f"{_tuple(kept)} = _ctx.kept" if kept else "",
        unpack,
        f"{_tuple([*under, *(f'need_{name}' for name in passed)])} = _needs",
        *(f"_{name}_wanted = need_{name}" for name in (*same, *lenders)),
        *_lend(same, lenders),
        "if _is_eager and torch.is_grad_enabled():",  # its graph gives second derivatives
        f"    _run = find_eager_backward(_NODES['{node}'][0])",
        f"    {_tuple(gradients)} = as_tuple(_run({', '.join(wanted)}))",
        "else:",
        # Compiled autograd traces this, and knows torch's ops only.
        f"    _run = {'_ready.backward if _is_eager else ' * ready}_NODES['{node}'][1].backward",
        f"    {', '.join(gradients)} = _run({', '.join(wanted)})",
        f"_made = {_tuple([*none, *_write_gradients(passed, gradients, same, lenders)])}",
        "if _is_one_of_several:",
        "    leave_over(_ctx, _grads, _made)",
        "return _made",
    ]
    # save_for_backward watches tensors for changes in place.
    return "\n".join("\n    ".join(filter(None, lines)) for lines in (forward, backward))


def _find_how(
    node: str, op: Differentiable, flags: Sequence[str], given: str, ready: bool
) -> Iterator[str]:
    """The code that finds a forward's function, what is not saved, and which gradients equal."""
    if ready:
        yield "_run = _ready.forward"
        yield "_unsaved = _ready.unsaved" if op.unsaved else ""
        yield f"{_tuple(flags)} = _ready.same" if flags else ""
        return
    yield f"_op, _kernel = _NODES['{node}']"
    yield "_run = _kernel.forward"
    yield f"_unsaved = _op.unsaved({given})" if op.unsaved else ""
    for name, flag in zip(op.same_gradient, flags, strict=True):
        yield f"{flag} = _op.same_gradient['{name}'][1]({given})"


def _tuple(names: Iterable[str]) -> str:
    return f"({', '.join(names)},)"


def _wants_all(op: Differentiable) -> bool:
    """Whether missing gradients become zeros."""
    signature = op.backward_signature
    kinds = dict(zip(signature.arguments, signature.types, strict=True))
    missing = any("Optional" not in kinds[f"grad_{name}"] for name in op.public)
    return len(op.public) > 1 and missing


def _lend(same: Mapping[str, str], lenders: Sequence[str]) -> Iterator[str]:
    """The code that asks for the gradients which others equal, in place of theirs."""
    for name, source in same.items():
        yield f"if _{name}_same:"
        yield f"    need_{name} = False"
        if (lender := source.removeprefix("grad_")) in lenders:
            yield f"    need_{lender} = need_{lender} or _{name}_wanted"


def _write_gradients(
    inputs: Sequence[str], gradients: Sequence[str], same: Mapping[str, str], lenders: Sequence[str]
) -> Iterator[str]:
    """The code of each input's gradient."""
    for name in inputs:
        own = f"grad_{name}" if f"grad_{name}" in gradients else "None"
        if name in same:
            yield f"({same[name]} if _{name}_same else {own}) if _{name}_wanted else None"
        elif own == "None":
            yield own
        else:
            yield f"{own} if {f'_{name}_wanted' if name in lenders else f'need_{name}'} else None"


# --- Forward-mode AD of a backward pass -----------------------------------------------------------

# A name of its own: generated code asks at each backward pass.
_has_tangents = state.has_tangents


def carry_tangents(
    backward: Callable[..., Any], ctx: Any, *grads: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Run a backward pass as with create_graph=True, by eager torch; its results have no graph."""
    with torch.enable_grad():
        return tuple([None if made is None else _cut(made) for made in backward(ctx, *grads)])


def _cut(made: torch.Tensor) -> torch.Tensor:
    primal, tangent = forward_ad.unpack_dual(made)
    primal = primal.detach()
    return primal if tangent is None else forward_ad.make_dual(primal, tangent.detach())


def carrying_tangents(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a node's backward pass carry tangents, by what it does with create_graph=True."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if _has_tangents(grads) and not state.is_compiling():
            return carry_tangents(backward, ctx, *grads)
        return backward(ctx, *grads)

    return run


# --- Several runs of one graph --------------------------------------------------------------------

# Zero-bubble schedules run a backward pass in two parts: first for the inputs, retaining the graph,
# then for the weights. A kernel computes both at once, so the first part leaves over the gradients
# that it does not use. Only a schedule may ask for that: the second part's gradients are the first
# one's by its definition, while elsewhere a caller may have written to them through `.data`, an
# array or a receive, and no version would count it.

_PART = "torchweld_part_of_a_backward_pass"
# A name of its own: generated code calls it at each backward pass.
_keeps_the_graph = state.retains_graph


@contextmanager
def split_backward(part: Literal["inputs", "weights"]) -> Iterator[None]:
    """Run one part of a backward pass: "inputs" first, then "weights" on the same gradients.

    The part is kept where torch's threads of backward passes inherit it.
    """
    before = _find_part()
    torch._C._stash_obj_in_tls(_PART, part)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_PART, before)


def _find_part() -> str | None:
    return torch._C._get_obj_in_tls(_PART) if torch._C._is_key_in_tls(_PART) else None


class _LeftOver(NamedTuple):
    """The gradients that a run did not use, by place, and the incoming ones it made them from."""

    gradients: dict[int, torch.Tensor]
    incoming: tuple[Any, ...]
    versions: tuple[int, ...]


_NOTHING = _LeftOver({}, (), ())


def is_one_of_several(ctx: Any) -> bool:
    """Whether the running backward pass of a node, which has `late`, is not its only one."""
    return not state.is_compiling() and (ctx.late is not None or _keeps_the_graph())


def list_wanted(ctx: Any) -> Sequence[bool]:
    """For each input, whether this run of several is to compute its gradient."""
    return ctx.needs_input_grad if _find_part() == "inputs" else list_reached(ctx)  # type: ignore[no-any-return]


def leave_over(ctx: Any, grads: tuple[Any, ...], gradients: Sequence[Any]) -> None:
    """Keep the gradients that the first part of a backward pass does not use."""
    unused = {}
    if _find_part() == "inputs":
        reached = list_reached(ctx)
        unused = {i: g for i, g in enumerate(gradients) if g is not None and not reached[i]}
    versions = _list_versions(grads) if unused else None
    ctx.late = _NOTHING if versions is None else _LeftOver(unused, grads, versions)


def find_left_over(ctx: Any, grads: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """The gradients that the first part left over, if the second part runs on the same ones."""
    late = ctx.late
    if late is None or _find_part() != "weights" or torch.is_grad_enabled():
        return {}
    if any(a is not b for a, b in zip(late.incoming, grads, strict=False)):
        return {}
    return late.gradients if _list_versions(grads) == late.versions else {}


def take_left_over(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The gradients needed now, if the first part left over all of them."""
    unused = find_left_over(ctx, grads)
    if not unused:
        return None
    goes_on = list_reached(ctx)
    if any(goes and i not in unused for i, goes in enumerate(goes_on)):
        return None
    ctx.late = _NOTHING
    return tuple([unused[i] if goes else None for i, goes in enumerate(goes_on)])


def _list_versions(grads: tuple[Any, ...]) -> tuple[int, ...] | None:
    """How often each gradient was changed in place; None if inference mode did not count it."""
    given = [grad for grad in grads if grad is not None]
    return None if any(g.is_inference() for g in given) else tuple([g._version for g in given])


def list_reached(ctx: Any) -> list[bool]:
    """For each input, whether the running backward pass continues to it."""
    if state.is_compiling():  # compiled graphs run whole
        return list(ctx.needs_input_grad)
    reached, nodes = [*ctx.needs_input_grad], iter(ctx.next_functions)
    for at, need in enumerate(reached):
        if need:
            while (node := next(nodes)[0]) is None:
                pass
            # Of a leaf, whose gradient torch.autograd.grad returns, nothing is known.
            reached[at] = state.will_run(node) is not False
    return reached


def find_eager_backward(op: Differentiable) -> Callable[..., Any]:
    """The backward pass in eager torch, for second derivatives."""
    if op.backward_reference is not None:
        return op.backward_reference
    assert isinstance(op, Op)
    return derive_from_reference(op)


def make_views(tensors: Sequence[Any]) -> list[Any]:
    """Views of tensors that need gradients: one of them may have been computed from another.

    The gradient of a view leaves out what reaches it through the others, which autograd adds.
    """
    return [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in tensors]


def differentiate(
    outputs: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor | None],
    create_graph: bool = True,
) -> list[torch.Tensor | None]:
    """The gradients of the sources, with a graph; None for a source without one."""
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=False)
        if grad is not None and output.requires_grad
    ]
    wanted = [x for x in sources if x is not None and x.requires_grad]
    made = torch.autograd.grad(
        *([output for output, _ in pairs], wanted, [grad for _, grad in pairs]),
        create_graph=create_graph,
        allow_unused=True,
    )
    by_id = {id(x): grad for x, grad in zip(wanted, made, strict=True)}
    return [None if x is None else by_id.get(id(x)) for x in sources]


def derive_from_reference(op: Op) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """Make a differentiable backward function from the reference (create_graph=True)."""

    given = op.backward_signature.arguments

    def backward(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
        values = dict(zip(given, make_views(arguments), strict=True))
        inputs = [values[name] for name in op.forward_signature.arguments]
        sources = [values[n.removeprefix("grad_")] for n in op.backward_signature.results]
        grads = [values[f"grad_{name}"] for name in op.public]
        return tuple(differentiate(as_tuple(op.reference(*inputs)), sources, grads))

    return backward
