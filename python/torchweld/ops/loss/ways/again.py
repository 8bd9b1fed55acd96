"""Logits in chunks of rows, which the backward pass computes again."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import (
    carrying_tangents,
    differentiate,
    exports_a_derivative,
    make_views,
)
from torchweld.dispatch.library import define_differentiable
from torchweld.ops.loss import chunk_ops, chunks, results, rows, sharding
from torchweld.ops.loss.chunks import Layer, Needs, Plan
from torchweld.ops.loss.results import Outputs, RowResults
from torchweld.ops.loss.rows import LossTransform
from torchweld.ops.loss.sharding import Classes
from torchweld.ops.loss.ways import eager
from torchweld.ops.loss.ways.kind import LossKind


def make_plans(kind: LossKind, layer: Layer) -> tuple[Plan, Plan] | None:
    """The plans of a forward and a backward pass; None: numbers cannot be read."""
    if not state.can_read(*layer[:3]):
        return None
    forward, backward = (op.find(layer.input) for op in (rows.FORWARD, rows.BACKWARD_IN_PLACE))
    plan = chunks.make_plan(layer, chunks.NO_GRADIENT, forward)
    return plan, chunks.make_plan(layer, kind.needs, backward)


def compute(
    kind: LossKind,
    plans: tuple[Plan, Plan] | None,
    layer: Layer,
    target: torch.Tensor,
    how: LossTransform,
    wanted: Outputs,
) -> RowResults:
    return find(layer, target, how, wanted, kind.into_grad, kind.sharding.classes, plans)


class _ComputedAgain(torch.autograd.Function):
    """The results of rows. The backward pass computes a layer's logits again.

    With `in_place` it writes where it may: over given logits, or to the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        layer = Layer(*inputs[: chunk_ops.LAYERS])
        how = LossTransform(*inputs[chunk_ops.LAYERS : chunk_ops.FIELDS])
        target, entropy, smooth, argmax, in_place, classes, plans = inputs[chunk_ops.FIELDS :]
        wanted = Outputs(entropy, smooth, argmax)
        if layer.weight is None:
            made = rows.FORWARD.run(layer.input, target, *how[1:6], *wanted)
        elif plans is None:
            made = chunk_ops.run_forward(*layer, target, *how[1:6], *wanted)
        else:
            made = chunks.run_forward(plans[0], layer, target, how, *wanted)
        if classes is not None:
            made = sharding.combine(classes, made, target, wanted, how.probabilities is not None)
        row_results = results.find(made, target, how, wanted)
        ctx.classes, ctx.in_place, ctx.plans = classes, in_place, plans
        ctx.save_for_backward(*layer[:3], target, made[1], *how[:4])
        ctx.layer, ctx.numbers = layer[3:], how[4:]
        ctx.wanted = (entropy, smooth, argmax)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_results.argmax)
        return tuple(row_results)

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs, after = Needs(*ctx.needs_input_grad[:3]), (*chunk_ops.AFTER, *(None,) * 7)
        if all(grad is None for grad in grads) or not any(needs):
            return (None, None, None, *after)
        x, linear_weight, bias, target, statistics, *tensors = ctx.saved_tensors
        how = LossTransform(*tensors, *ctx.numbers)
        layer = Layer(x, linear_weight, bias, *ctx.layer)
        if torch.is_grad_enabled() and not state.is_compiling():
            sharding.refuse_second_derivatives(ctx.classes)
            layer = Layer(*make_views(layer[:3]), *ctx.layer)
            row_results = eager.find_by_reference(layer, target, how, Outputs(*ctx.wanted))
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
        made = zip(chunk_ops.run_backward(*arguments), needs, strict=True)
        return (*[grad if need else None for grad, need in made], *after)


def _run_rows(*inputs: Any) -> Any:
    return _ComputedAgain.apply(*inputs, None, None)


_exported = define_differentiable(
    "loss_rows_results",
    "any",
    f"({chunk_ops.LAYER.replace('Tensor linear_weight', 'Tensor? linear_weight')},"
    f" {rows.HOW_SCHEMA}, Tensor target, bool entropy, bool smooth, bool argmax, bool in_place)"
    f" -> {rows.RESULTS_SCHEMA}",
    _run_rows,
)


def find(
    layer: Layer,
    target: torch.Tensor,
    how: LossTransform,
    wanted: Outputs,
    in_place: bool,
    classes: Classes | None = None,
    plans: tuple[Plan, Plan] | None = None,
) -> RowResults:
    """Compute the results of rows, as _ComputedAgain says.

    `plans` are of the forward and the backward pass; None: as for find_total.
    """
    inputs = (*layer, *how, target, *wanted, in_place)
    if classes is None and exports_a_derivative():
        return RowResults(*_exported(*inputs))
    return RowResults(*_ComputedAgain.apply(*inputs, classes, plans))
