"""The results of rows of given logits, differentiable: one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import exports_a_derivative
from torchweld.dispatch.library import define_differentiable
from torchweld.ops.loss import results, rows
from torchweld.ops.loss.results import RowResults, Wanted
from torchweld.ops.loss.rows import How


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        entropy: bool,
        smooth: bool,
        argmax: bool,
        in_place: bool,
        *fields: Any,
    ) -> tuple[torch.Tensor, ...]:
        how, wanted = How(*fields), Wanted(entropy, smooth, argmax)
        made = rows.FORWARD.run(logits, target, *how[rows.GIVEN], *wanted)
        row_results = results.find(made, target, how, wanted)
        ctx.save_for_backward(logits, target, made[1], *how[rows.TENSORS])
        ctx.numbers, ctx.in_place = how[rows.TENSORS.stop :], in_place
        ctx.wanted = (entropy, smooth, argmax)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_results.argmax)
        return tuple(row_results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is None for grad in grads) or not ctx.needs_input_grad[0]:
            return (None,) * (6 + len(How._fields))
        logits, target, statistics, *tensors = ctx.saved_tensors
        how = How(*tensors, *ctx.numbers)
        nothing = (None,) * (5 + len(How._fields))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            row_results = results.reference(logits, target, how, Wanted(*ctx.wanted))
            return (*results.differentiate_reference(row_results, [logits], grads), *nothing)
        arguments = (target, statistics, *results.make_coefficients(grads, statistics, target, how))
        if ctx.in_place and checks.can_read(logits, *grads) and logits.is_contiguous():
            rows.BACKWARD_IN_PLACE.run(logits, *arguments, *how[rows.GIVEN])
            # Other nodes that saved the logits must notice that they changed.
            torch.autograd.graph.increment_version(logits)
            return (logits.detach(), *nothing)
        return (rows.BACKWARD.run(logits, *arguments, *how[rows.GIVEN]), *nothing)


def _run_rows(*inputs: Any) -> Any:
    return _Rows.apply(*inputs)


_exported = define_differentiable(
    "loss_rows_results",
    "any",
    "(Tensor logits, Tensor target, bool entropy, bool smooth, bool argmax, bool in_place,"
    f" {rows.HOW_SCHEMA}) -> {rows.RESULTS_SCHEMA}",
    _run_rows,
)


def find(
    logits: torch.Tensor, target: torch.Tensor, how: How, wanted: Wanted, in_place: bool
) -> RowResults:
    """Compute the results of rows; with `in_place` the backward pass overwrites the logits."""
    if not torch.is_grad_enabled() or not logits.requires_grad:
        made = rows.FORWARD.run(logits.detach(), target, *how[rows.GIVEN], *wanted)
        return results.find(made, target, how, wanted)
    run = _exported if exports_a_derivative() else _Rows.apply
    return RowResults(*run(logits, target, *wanted, in_place, *how))
