"""The results of rows of a linear layer's logits, differentiable, chunk by chunk.

While torch compiles or records, and for fake or batched tensors, chunks run inside an op of
torch.library: their sizes depend on `memory` and on the ignored rows, which a graph does not know.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import exports_a_derivative
from torchweld.dispatch.library import define_differentiable
from torchweld.errors import ArgumentError
from torchweld.ops.loss import chunks, results, rows, sharded
from torchweld.ops.loss.chunks import Layer, Needs, Plan
from torchweld.ops.loss.results import Factors, RowResults, Wanted
from torchweld.ops.loss.rows import How
from torchweld.ops.loss.sharded import Classes
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
    known = How(None, *how, 0, rows.accumulate_type(layer.logits_dtype))
    return layer, target, known, inputs[_LAYERS + _HOWS :]


def _forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, wanted = _split(inputs)
    return chunks.run_forward(layer, target, how, *wanted)


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
    layer, target, how, (*grads, need_input, need_weight, need_bias) = _split(inputs)
    needs = Needs(need_input, need_weight, need_bias)
    return _present(layer, chunks.run_backward(layer, target, how, *grads, needs))


def _fake_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    sources = zip(inputs[:3], inputs[-3:], strict=True)
    made = [torch.empty_like(x) if need and x is not None else None for x, need in sources]
    return _present(Layer(*inputs[:_LAYERS]), tuple(made))  # type: ignore[arg-type]


def _both(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, (*grads, smooth) = _split(inputs[:-3])
    plan = chunks.make_plan(layer, Needs(*inputs[-3:]))
    made, gradients = chunks.run_both(plan, layer, target, how, *grads, smooth)
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
    kind = layer.logits_dtype
    bias = None if layer.bias is None else layer.bias.to(kind)
    logits = torch.nn.functional.linear(layer.input.to(kind), layer.weight.to(kind), bias)
    return results.reference(logits, target, how, wanted)


# The arguments of the autograd functions are plain: Dynamo makes no graph of tuples with tensors.
_HOW_FIELDS, _FACTORS = len(How._fields), len(Factors._fields)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        classes: Classes | None,
        into_grad: bool,
        target: torch.Tensor,
        entropy: bool,
        smooth: bool,
        argmax: bool,
        *fields: Any,
    ) -> tuple[torch.Tensor, ...]:
        layer, how = Layer(*fields[:_LAYERS]), How(*fields[_LAYERS:])
        wanted = Wanted(entropy, smooth, argmax)
        made = _run_forward(*layer, target, *how[rows.GIVEN], *wanted)
        if classes is not None:
            made = sharded.combine(classes, made, target, wanted, how.probabilities is not None)
        row_results = results.find(made, target, how, wanted)
        ctx.classes, ctx.into_grad = classes, into_grad
        ctx.save_for_backward(*layer[:3], target, made[1], *how[rows.TENSORS])
        ctx.layer, ctx.numbers = layer[3:], how[rows.TENSORS.stop :]
        ctx.wanted = (entropy, smooth, argmax)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_results.argmax)
        return tuple(row_results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[6:9]
        after = (None,) * (_LAYERS - 3 + _HOW_FIELDS)
        if all(grad is None for grad in grads) or not any(needs):
            return (*(None,) * 9, *after)
        x, linear_weight, bias, target, statistics, *tensors = ctx.saved_tensors
        how = How(*tensors, *ctx.numbers)
        layer = Layer(x, linear_weight, bias, *ctx.layer)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_shared(ctx.classes)
            row_results = find_by_reference(layer, target, how, Wanted(*ctx.wanted))
            made = results.differentiate_reference(row_results, layer[:3], grads)
        else:
            coefficients = results.make_coefficients(grads, statistics, target, how)
            may_add = ctx.into_grad and needs[1] and checks.can_read(linear_weight, *grads)
            if may_add and linear_weight.grad is not None:
                rest = (statistics, *coefficients, Needs(*needs), linear_weight.grad)
                gradients = chunks.run_backward(layer, target, how, *rest)
                return (*(None,) * 6, *gradients, *after)
            arguments = (*layer, target, *how[rows.GIVEN], statistics, *coefficients, *needs)
            made = [
                grad if need else None
                for grad, need in zip(_run_backward(*arguments), needs, strict=True)
            ]
        return (*(None,) * 6, *made, *after)


def _run_rows(*inputs: Any) -> Any:
    return _Rows.apply(None, False, *inputs)


_exported = define_differentiable(
    "linear_rows_results",
    "any",
    f"(Tensor target, bool entropy, bool smooth, bool argmax, {_LAYER}, {rows.HOW_SCHEMA})"
    f" -> {rows.RESULTS_SCHEMA}",
    _run_rows,
)


class _Total(torch.autograd.Function):
    """The weighted sum of the rows' losses, computed together with its gradients, which it keeps.

    Later the gradients are multiplied by one number, so the logits need not be computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan | None,
        classes: Classes | None,
        target: torch.Tensor,
        factors: Factors,
        *fields: Any,
    ) -> torch.Tensor:
        layer, how = Layer(*fields[:_LAYERS]), How(*fields[_LAYERS:])
        needs, wanted = ctx.needs_input_grad[4:7], factors.find_wanted()
        coefficients = factors.make_coefficients(how, target)
        if plan is None:
            arguments = (*how[rows.GIVEN], *coefficients, wanted.smooth, *needs)
            *made, of_x, of_weight, of_bias = _run_both(*layer, target, *arguments)
            grads = (of_x, of_weight, of_bias)
        else:
            rest = (*coefficients, wanted.smooth)
            made, grads = chunks.run_both(plan, layer, target, how, *rest)
        row_results = results.find(made, target, how, wanted)
        ctx.classes = classes
        ctx.save_for_backward(*layer[:3], target, *how[rows.TENSORS])
        ctx.layer, ctx.numbers, ctx.factors = layer[3:], how[rows.TENSORS.stop :], factors
        ctx.kept = [of if need else None for of, need in zip(grads, needs, strict=True)]
        return factors.add_up(row_results)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, linear_weight, bias, target, *tensors = ctx.saved_tensors
        before, after = (None,) * 4, (None,) * (_LAYERS - 3 + _HOW_FIELDS)
        if torch.is_grad_enabled():
            _refuse_shared(ctx.classes)
            how = How(*tensors, *ctx.numbers)
            layer = Layer(x, linear_weight, bias, *ctx.layer)
            row_results = find_by_reference(layer, target, how, ctx.factors.find_wanted())
            total = ctx.factors.add_up(row_results)
            return (*before, *results.differentiate_total(total, layer[:3], grad), *after)
        kept = ctx.kept
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if keeps_graph or not checks.can_read(grad, *kept):
            scaled = [None if of is None else (of * grad).to(of.dtype) for of in kept]
            return (*before, *scaled, *after)
        # Nobody else holds the gradients, so scale them in place and return them.
        ctx.kept = None
        if grad.device.type != "cpu" or grad != 1:
            for of in kept:
                if of is not None and of.is_cuda and of.is_contiguous():
                    rows.SCALE.run(of, grad)
                elif of is not None:  # a gradient has the strides of its weight
                    of.mul_(grad)
        return (*before, *kept, *after)


class _TotalInGraph(torch.autograd.Function):
    """_Total while torch compiles, which has no second derivatives.

    The graph holds the gradients, so the backward pass cannot scale them in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        target: torch.Tensor,
        need_input: bool,
        need_weight: bool,
        need_bias: bool,
        *fields: Any,
    ) -> torch.Tensor:
        factors, rest = Factors(*fields[:_FACTORS]), fields[_FACTORS:]
        layer, how = Layer(*rest[:_LAYERS]), How(*rest[_LAYERS:])
        wanted, needs = factors.find_wanted(), (need_input, need_weight, need_bias)
        coefficients = factors.make_coefficients(how, target)
        arguments = (*how[rows.GIVEN], *coefficients, wanted.smooth, *needs)
        picked, statistics, argmax, *grads = _run_both(*layer, target, *arguments)
        ctx.needs = needs
        ctx.save_for_backward(*grads)
        return factors.add_up(results.find((picked, statistics, argmax), target, how, wanted))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            (of * grad).to(of.dtype) if need else None
            for of, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
        ]
        after = (None,) * (_LAYERS - 3 + _HOW_FIELDS)
        return (*(None,) * (4 + _FACTORS), *scaled, *after)


def _refuse_shared(classes: Classes | None) -> None:
    """Refuse second derivatives: they need all logits at once, which no device has."""
    if classes is not None:
        accepted = "False where devices share the classes of linear_weight"
        raise ArgumentError("linear_cross_entropy", "create_graph", "True", accepted)


def find_total(
    layer: Layer,
    target: torch.Tensor,
    how: How,
    factors: Factors,
    plan: Plan | None,
    classes: Classes | None,
    needs: Needs,
) -> torch.Tensor:
    """Compute the weighted sum of the rows' losses, and its gradients at once.

    Without a plan an op of torch.library does so: the numbers cannot be read.
    """
    if torch.compiler.is_compiling():
        return _TotalInGraph.apply(target, *needs, *factors, *layer, *how)  # type: ignore[no-any-return]
    return _Total.apply(plan, classes, target, factors, *layer, *how)  # type: ignore[no-any-return]


def find(
    layer: Layer,
    target: torch.Tensor,
    how: How,
    wanted: Wanted,
    classes: Classes | None,
    into_grad: bool,
) -> RowResults:
    """Compute the results of rows; the backward pass computes the logits again.

    With `into_grad` the backward pass adds the weight's gradient to an existing one.
    """
    if classes is None and exports_a_derivative():
        return RowResults(*_exported(target, *wanted, *layer, *how))
    return RowResults(*_Rows.apply(classes, into_grad, target, *wanted, *layer, *how))
