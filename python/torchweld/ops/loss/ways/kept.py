"""Logits in chunks of rows: their gradients are computed with the loss, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import carrying_tangents, differentiate, make_views
from torchweld.ops.loss import arguments, chunk_ops, chunks, results, rows, sharding
from torchweld.ops.loss.chunks import Layer, Plan
from torchweld.ops.loss.results import LossFactors
from torchweld.ops.loss.rows import LossTransform
from torchweld.ops.loss.ways import eager
from torchweld.ops.loss.ways.kind import LossKind, make_layer


def may_serve(kind: LossKind, layer: Layer, token_weights: torch.Tensor | None) -> bool:
    """Whether the gradients are computed with the loss: one number multiplies them later.

    In float16 that number is a loss scale, without which they would vanish. An exported graph
    needs no gradients, and the op that computes both does not exchange results of shared classes.
    """
    if kind.settings.reduction == "none" or kind.returns_lse or kind.into_grad:
        return False
    if not any(kind.needs) or state.is_exporting() or kind.takes_eager:
        return False
    if kind.sharding.classes is not None and not state.can_read(*layer[:3]):
        return False
    trains = token_weights is not None and token_weights.requires_grad
    return not trains and layer.input.dtype != torch.float16


def make_plan(kind: LossKind, layer: Layer, token_weights: torch.Tensor | None) -> Plan | None:
    """The plan of a loss and its gradients; None: numbers cannot be read."""
    if kind.sharding.classes is not None:
        run = partial(sharding.run_both, kind.sharding.classes)
        return chunks.make_plan(layer, kind.needs, run)
    if not state.can_read(*layer[:3], token_weights):
        return None
    return chunks.make_plan(layer, kind.needs, rows.BOTH_IN_PLACE.find(layer.input))


def run(kind: LossKind, plan: Plan | None, *given: Any) -> torch.Tensor:
    *parts, target, weight, temperature, token_weights = given
    settings, sharding, averages = kind.settings, kind.sharding, kind.settings.reduction == "mean"
    layer, begun = make_layer(kind, *parts), None
    if plan is not None and settings.several is not None and sharding.classes is None:
        with torch.no_grad():  # the node that takes it has the derivative
            begun = chunks.begin(plan, layer, target.reshape(-1, 1), settings.ignored)
    target, how = arguments.read_rows(settings, target, weight, temperature)
    factors, count = results.make_factors(settings, target, how, token_weights)
    if averages:
        count = sharding.add_up(count)
        factors = factors.divide(count)
    target, how = sharding.take_classes(target, how)
    rest = (factors, kind.needs, plan, sharding.classes, begun)
    made = sharding.add_up(find_total(layer, target, how, *rest))
    made = torch.where(count == 0, torch.nan, made) if averages else made
    return made.to(kind.dtype or made.dtype)


class _Total(torch.autograd.Function):
    """The weighted sum of the rows' losses, computed together with its gradients, which it keeps.

    Later the gradients are multiplied by one number, so the logits need not be computed again.
    While torch compiles, the graph holds the gradients, and has no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        fields, rest = chunk_ops.FIELDS, chunk_ops.FIELDS + chunk_ops.FACTORS
        layer = Layer(*inputs[: chunk_ops.LAYERS])
        how = LossTransform(*inputs[chunk_ops.LAYERS : fields])
        factors = LossFactors(*inputs[fields:rest])
        target, needs, plan, classes, begun = inputs[rest:]
        wanted, make = factors.find_outputs(), partial(factors.make_coefficients, target, how)
        if plan is None:
            arguments = (*how[1:6], *make(), wanted.smooth, *needs)
            *made, of_x, of_weight, of_bias = chunk_ops.run_both(*layer, target, *arguments)
            grads = (of_x, of_weight, of_bias)
        else:
            made, grads = chunks.run_both(plan, layer, target, how, make, wanted.smooth, begun)
        ctx.needs, ctx.classes = needs, classes
        if state.is_compiling():
            ctx.save_for_backward(*grads)
        else:
            ctx.save_for_backward(*layer[:3], target, *how[:4])
            ctx.layer, ctx.numbers, ctx.factors = layer[3:], how[4:], factors
            ctx.kept = [of if need else None for of, need in zip(grads, needs, strict=True)]
        return factors.add_up(results.find(made, target, how, wanted))

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        after = (*chunk_ops.AFTER, *(None,) * (chunk_ops.FACTORS + 5))
        if state.is_compiling():
            each = zip(ctx.saved_tensors, ctx.needs, strict=True)
            return (*_scale([of if need else None for of, need in each], grad), *after)
        x, linear_weight, bias, target, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            sharding.refuse_second_derivatives(ctx.classes)
            how = LossTransform(*tensors, *ctx.numbers)
            layer = Layer(*make_views((x, linear_weight, bias)), *ctx.layer)
            row_results = eager.find_by_reference(layer, target, how, ctx.factors.find_outputs())
            total = ctx.factors.add_up(row_results)
            return (*differentiate([total], layer[:3], [grad]), *after)
        kept = ctx.kept
        keeps_graph = state.retains_graph()
        if keeps_graph or not state.can_read(grad, *kept):
            return (*_scale(kept, grad), *after)
        # Nobody else holds the gradients, so scale them in sharding and return them.
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


def find_total(
    layer: Layer, target: torch.Tensor, how: LossTransform, factors: LossFactors, *rest: Any
) -> torch.Tensor:
    """Compute the weighted sum of the rows' losses, and its gradients at once.

    The rest are the gradients that are wanted, the plan, the classes that devices share, and the
    pass if it has begun. Without a plan an op of torch.library computes them: the numbers cannot be
    read.
    """
    return _Total.apply(*layer, *how, *factors, target, *rest)  # type: ignore[no-any-return]
