"""The results of rows of logits, differentiable; a linear layer's are computed in chunks.

While torch compiles or records, and for fake or batched tensors, chunks run inside an op of
torch.library: their sizes depend on `memory` and on the ignored rows, which a graph does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import differentiate, exports_a_derivative, make_views
from torchweld.dispatch.library import define_differentiable
from torchweld.errors import ArgumentError
from torchweld.ops.loss import chunks, results, rows, sharded
from torchweld.ops.loss.arguments import Classes
from torchweld.ops.loss.chunks import Layer, Needs, Plan
from torchweld.ops.loss.results import Factors, RowResults, Wanted
from torchweld.ops.loss.rows import How
from torchweld.ops.opaque import define_opaque

_LAYER = (
    "Tensor input, Tensor linear_weight, Tensor? bias, int memory, ScalarType logits_dtype,"
    " bool float32_sums, bool batch_invariant, SymInt widest"
)
_NEEDS = "bool need_input, bool need_weight, bool need_bias"
_HOW, _GRADS = f"Tensor target, {rows.GIVEN_SCHEMA}", rows.GRADS_SCHEMA
_LAYERS, _HOWS = len(Layer._fields), 6  # the numbers of arguments in _LAYER and _HOW


def _split(inputs: tuple[Any, ...]) -> tuple[Layer, torch.Tensor, How, tuple[Any, ...]]:
    layer = Layer(*inputs[:_LAYERS])
    target, *how = inputs[_LAYERS : _LAYERS + _HOWS]
    # Kernels do not take the number of classes; only the caller needs it.
    known = How(None, *how)._replace(kind=rows.accumulate_type(layer.logits_dtype))
    return layer, target, known, inputs[_LAYERS + _HOWS :]


def _forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, wanted = _split(inputs)
    plan = chunks.make_plan(layer, chunks.NO_GRADIENT, rows.FORWARD.find(layer.input))
    return chunks.run_forward(plan, layer, target, how, *wanted)


def _fake_forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, wanted = _split(inputs)
    count = target.shape[0]
    return (
        layer.input.new_empty(target.shape, dtype=how.kind),
        layer.input.new_empty((count, rows.STATISTICS), dtype=how.kind),
        target.new_empty((count if wanted[-1] else 0,)),
    )


def _present(layer: Layer, grads: chunks.Gradients) -> tuple[torch.Tensor, ...]:
    """The gradients; an op returns an empty tensor in place of one that is not wanted."""
    return tuple([layer.input.new_empty(0) if grad is None else grad for grad in grads])


def _backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, (statistics, coefficients, grad_picked, *needs) = _split(inputs)
    plan = chunks.make_plan(layer, Needs(*needs), rows.BACKWARD_IN_PLACE.find(layer.input))
    rest = (statistics, coefficients, grad_picked)
    return _present(layer, chunks.run_backward(plan, layer, target, how, *rest))


def _fake_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    sources = zip(inputs[:3], inputs[-3:], strict=True)
    made = [torch.empty_like(x) if need and x is not None else None for x, need in sources]
    return _present(Layer(*inputs[:_LAYERS]), tuple(made))  # type: ignore[arg-type]


def _both(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, rest = _split(inputs[:-3])
    kernel = rows.BOTH_IN_PLACE.find(layer.input)
    plan = chunks.make_plan(layer, Needs(*inputs[-3:]), kernel)
    coefficients, grad_picked, smooth = rest
    given = (coefficients, grad_picked)
    made, gradients = chunks.run_both(plan, layer, target, how, lambda: given, smooth)
    return (*made, *_present(layer, gradients))


def _fake_both(*inputs: Any) -> tuple[torch.Tensor, ...]:
    made = _fake_forward(*inputs[: _LAYERS + _HOWS], False)
    return (*made, *_fake_backward(*inputs))


_run_forward = define_opaque(
    "linear_rows",
    f"({_LAYER}, {_HOW}, bool entropy, bool smooth, bool argmax)"
    " -> (Tensor picked, Tensor statistics, Tensor argmax)",
    _forward,
    _fake_forward,
)
_run_backward = define_opaque(
    "linear_rows_backward",
    f"({_LAYER}, {_HOW}, Tensor statistics, {_GRADS}, {_NEEDS})"
    " -> (Tensor grad_input, Tensor grad_linear_weight, Tensor grad_bias)",
    _backward,
    _fake_backward,
)


_run_both = define_opaque(
    "linear_rows_both",
    f"({_LAYER}, {_HOW}, {_GRADS}, bool smooth, {_NEEDS})"
    " -> (Tensor picked, Tensor statistics, Tensor argmax,"
    " Tensor grad_input, Tensor grad_linear_weight, Tensor grad_bias)",
    _both,
    _fake_both,
)


def find_by_reference(layer: Layer, target: torch.Tensor, how: How, wanted: Wanted) -> RowResults:
    """The results by plain torch, with all logits at once."""
    logits, kind = layer.input, layer.logits_dtype
    if layer.weight is not None:
        bias = None if layer.bias is None else layer.bias.to(kind)
        logits = torch.nn.functional.linear(logits.to(kind), layer.weight.to(kind), bias)
    return results.reference(logits, target, how, wanted)


# The arguments of the autograd functions are plain: Dynamo makes no graph of tuples with tensors.
# The first three, which may need a gradient, are input, weight and bias of a layer.
_FIELDS, _FACTORS = _LAYERS + len(How._fields), len(Factors._fields)
_AFTER = (None,) * (_FIELDS - 3)


class _Rows(torch.autograd.Function):
    """The results of rows. The backward pass computes a layer's logits again.

    With `in_place` it writes where it may: over given logits, or to the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        layer, how = Layer(*inputs[:_LAYERS]), How(*inputs[_LAYERS:_FIELDS])
        target, entropy, smooth, argmax, in_place, classes, plans = inputs[_FIELDS:]
        wanted = Wanted(entropy, smooth, argmax)
        if layer.weight is None:
            made = rows.FORWARD.run(layer.input, target, *how[1:6], *wanted)
        elif plans is None:
            made = _run_forward(*layer, target, *how[1:6], *wanted)
        else:
            made = chunks.run_forward(plans[0], layer, target, how, *wanted)
        if classes is not None:
            made = sharded.combine(classes, made, target, wanted, how.probabilities is not None)
        row_results = results.find(made, target, how, wanted)
        ctx.classes, ctx.in_place, ctx.plans = classes, in_place, plans
        ctx.save_for_backward(*layer[:3], target, made[1], *how[:4])
        ctx.layer, ctx.numbers = layer[3:], how[4:]
        ctx.wanted = (entropy, smooth, argmax)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_results.argmax)
        return tuple(row_results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs, after = Needs(*ctx.needs_input_grad[:3]), (*_AFTER, *(None,) * 7)
        if all(grad is None for grad in grads) or not any(needs):
            return (None, None, None, *after)
        x, linear_weight, bias, target, statistics, *tensors = ctx.saved_tensors
        how = How(*tensors, *ctx.numbers)
        layer = Layer(x, linear_weight, bias, *ctx.layer)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_shared(ctx.classes)
            layer = Layer(*make_views(layer[:3]), *ctx.layer)
            row_results = find_by_reference(layer, target, how, Wanted(*ctx.wanted))
            return (*differentiate(row_results, layer[:3], grads), *after)
        coefficients = results.make_coefficients(grads, target, how, statistics)
        if linear_weight is None:
            given = (target, statistics, *coefficients, *how[1:6])
            if not (ctx.in_place and state.can_read(x, *grads) and x.is_contiguous()):
                return (rows.BACKWARD.run(x, *given), None, None, *after)
            rows.BACKWARD_IN_PLACE.run(x, *given)
            # Other nodes that saved the logits must notice that they changed.
            torch.autograd.graph.increment_version(x)
            return (x.detach(), None, None, *after)
        may_add = ctx.in_place and needs.weight and state.can_read(linear_weight, *grads)
        rest = (layer, target, how, statistics, *coefficients)
        if may_add and linear_weight.grad is not None:
            plan = chunks.make_plan(layer, needs, rows.BACKWARD_IN_PLACE.find(x), adds=True)
            return (*chunks.run_backward(plan, *rest, linear_weight.grad), *after)
        if ctx.plans is not None and state.can_read(*grads):
            return (*chunks.run_backward(ctx.plans[1], *rest), *after)
        arguments = (*layer, target, *how[1:6], statistics, *coefficients, *needs)
        made = zip(_run_backward(*arguments), needs, strict=True)
        return (*[grad if need else None for grad, need in made], *after)


def _run_rows(*inputs: Any) -> Any:
    return _Rows.apply(*inputs, None, None)


_exported = define_differentiable(
    "loss_rows_results",
    "any",
    f"({_LAYER.replace('Tensor linear_weight', 'Tensor? linear_weight')},"
    f" {rows.HOW_SCHEMA}, Tensor target, bool entropy, bool smooth, bool argmax, bool in_place)"
    f" -> {rows.RESULTS_SCHEMA}",
    _run_rows,
)


class _Total(torch.autograd.Function):
    """The weighted sum of the rows' losses, computed together with its gradients, which it keeps.

    Later the gradients are multiplied by one number, so the logits need not be computed again.
    While torch compiles, the graph holds the gradients, and has no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        layer, how = Layer(*inputs[:_LAYERS]), How(*inputs[_LAYERS:_FIELDS])
        factors = Factors(*inputs[_FIELDS : _FIELDS + _FACTORS])
        target, needs, plan, classes, begun = inputs[_FIELDS + _FACTORS :]
        wanted, make = factors.find_wanted(), partial(factors.make_coefficients, target, how)
        if plan is None:
            arguments = (*how[1:6], *make(), wanted.smooth, *needs)
            *made, of_x, of_weight, of_bias = _run_both(*layer, target, *arguments)
            grads = (of_x, of_weight, of_bias)
        else:
            made, grads = chunks.run_both(plan, layer, target, how, make, wanted.smooth, begun)
        ctx.needs, ctx.classes = needs, classes
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*grads)
        else:
            ctx.save_for_backward(*layer[:3], target, *how[:4])
            ctx.layer, ctx.numbers, ctx.factors = layer[3:], how[4:], factors
            ctx.kept = [of if need else None for of, need in zip(grads, needs, strict=True)]
        return factors.add_up(results.find(made, target, how, wanted))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        after = (*_AFTER, *(None,) * (_FACTORS + 5))
        if torch.compiler.is_compiling():
            each = zip(ctx.saved_tensors, ctx.needs, strict=True)
            return (*_scale([of if need else None for of, need in each], grad), *after)
        x, linear_weight, bias, target, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            _refuse_shared(ctx.classes)
            how = How(*tensors, *ctx.numbers)
            layer = Layer(*make_views((x, linear_weight, bias)), *ctx.layer)
            row_results = find_by_reference(layer, target, how, ctx.factors.find_wanted())
            total = ctx.factors.add_up(row_results)
            return (*differentiate([total], layer[:3], [grad]), *after)
        kept = ctx.kept
        keeps_graph = state.retains_graph()
        if keeps_graph or not state.can_read(grad, *kept):
            return (*_scale(kept, grad), *after)
        # Nobody else holds the gradients, so scale them in place and return them.
        ctx.kept = None
        if grad.device.type != "cpu" or grad != 1:
            for of in kept:
                if of is not None and of.is_cuda and of.is_contiguous():
                    rows.SCALE.run(of, grad)
                elif of is not None:  # a gradient has the strides of its weight
                    of.mul_(grad)
        return (*kept, *after)


def _scale(kept: Sequence[torch.Tensor | None], by: torch.Tensor) -> list[torch.Tensor | None]:
    return [None if of is None else (of * by).to(of.dtype) for of in kept]


def _refuse_shared(classes: Classes | None) -> None:
    """Refuse second derivatives: they need all logits at once, which no device has."""
    if classes is not None:
        accepted = "False where devices share the classes of linear_weight"
        raise ArgumentError("linear_cross_entropy", "create_graph", "True", accepted)


def find_total(
    layer: Layer, target: torch.Tensor, how: How, factors: Factors, *rest: Any
) -> torch.Tensor:
    """Compute the weighted sum of the rows' losses, and its gradients at once.

    The rest are the gradients that are wanted, the plan, the classes that devices share, and the
    pass if it has begun. Without a plan an op of torch.library computes them: the numbers cannot be
    read.
    """
    return _Total.apply(*layer, *how, *factors, target, *rest)  # type: ignore[no-any-return]


def find(
    layer: Layer,
    target: torch.Tensor,
    how: How,
    wanted: Wanted,
    in_place: bool,
    classes: Classes | None = None,
    plans: tuple[Plan, Plan] | None = None,
) -> RowResults:
    """Compute the results of rows, as _Rows says.

    `plans` are of the forward and the backward pass; None: as for find_total.
    """
    inputs = (*layer, *how, target, *wanted, in_place)
    if classes is None and exports_a_derivative():
        return RowResults(*_exported(*inputs))
    return RowResults(*_Rows.apply(*inputs, classes, plans))


def as_layer(logits: torch.Tensor) -> Layer:
    """Given logits: a layer without a weight."""
    nothing: Any = None
    return Layer(logits, nothing, None, 0, logits.dtype, False, False, 0)
