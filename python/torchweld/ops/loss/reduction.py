"""The reduction of the rows' results to the loss that the caller wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.ops.loss import arguments, rows
from torchweld.ops.loss.results import Factors, RowResults
from torchweld.ops.loss.rows import How

REDUCTIONS = ("mean", "sum", "none")


class Loss(NamedTuple):
    """How the rows' results become a loss."""

    reduction: str
    label_smoothing: float
    z_loss: float
    token_weights: torch.Tensor | None  # [n]

    def make_factors(self, target: torch.Tensor, how: How) -> tuple[Factors, torch.Tensor]:
        """Make the factors of a row's terms, and the divisor of a mean."""
        soft = how.probabilities is not None
        smoothing, classes = self.label_smoothing, how.classes
        like = target.new_zeros(target.shape[:1], dtype=how.kind)
        if soft:
            counted = weights = torch.ones_like(like)
        else:
            counted = (target[:, 0] != -1).to(like.dtype)
            weights = counted
            if how.weight is not None:
                weights = counted * how.weight[target[:, 0].clamp(0, classes - 1)]
        if self.token_weights is not None:
            counted, weights = counted * self.token_weights, weights * self.token_weights
        main = None if smoothing == 1 else (1 - smoothing) * weights
        factors = Factors(
            None if soft else ((1 - smoothing) * weights),
            counted * (smoothing / classes) if smoothing else None,
            main if soft else None,
            counted * self.z_loss if self.z_loss else None,
        )
        return factors, weights.sum()

    def reduce(
        self,
        row_results: RowResults,
        factors: Factors,
        count: torch.Tensor,
        add_up: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> torch.Tensor:
        """Compute the loss of each row, or one number; `add_up` adds the sums of other devices."""
        loss = factors.add(row_results)
        if self.reduction == "none":
            return loss
        total = add_up(loss.sum())
        return total if self.reduction == "sum" else total / count


def check_loss(
    function: str,
    like: torch.Tensor,
    leading: tuple[int, ...],
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    token_weights: torch.Tensor | None,
) -> Loss:
    """Check the settings of a loss whose rows have these leading sizes."""
    arguments.check_choice(function, "reduction", reduction, REDUCTIONS)
    fits = isinstance(label_smoothing, checks.NUMBER) and 0 <= label_smoothing <= 1
    arguments.check_number(function, "label_smoothing", label_smoothing, "0 to 1", fits)
    fits = isinstance(z_loss, checks.NUMBER) and abs(z_loss) < float("inf")
    arguments.check_number(function, "z_loss", z_loss, "a finite number", fits)
    if token_weights is not None:
        arguments.check_tensor(function, "token_weights", token_weights)
        checks.like(function, "token_weights", token_weights, like, "input")
        checks.shaped(function, "token_weights", token_weights, leading, "one weight a row")
        token_weights = token_weights.reshape(-1).to(rows.accumulate_type(like.dtype))
    return Loss(reduction, float(label_smoothing), float(z_loss), token_weights)


class Target(NamedTuple):
    """A target as rows: classes [n, 1], or probabilities [n, V] with classes [n, 0]."""

    classes: torch.Tensor
    probabilities: torch.Tensor | None


def read_target(
    function: str,
    target: Any,
    like: torch.Tensor,
    leading: tuple[int, ...],
    classes: int,
    ignore_index: int,
    flatten: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
) -> Target:
    """The target, checked: classes of the leading sizes, or probabilities of this shape.

    `flatten` makes rows of probabilities.
    """
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        arguments.check_tensor(function, "target", target)
        checks.like(function, "target", target, like, "input")
        checks.shaped(function, "target", target, shape, "one probability a class")
        q = flatten(target)
        return Target(q.new_empty((q.shape[0], 0), dtype=torch.int64), q)
    arguments.check_indices(function, "target", target, like.device)
    checks.shaped(function, "target", target, leading, "one class a row")
    if type(ignore_index) is not int:
        raise ArgumentError(function, "ignore_index", repr(ignore_index), "an integer")
    marked = arguments.mark_ignored(function, target, classes, ignore_index)
    return Target(marked.reshape(-1, 1), None)
