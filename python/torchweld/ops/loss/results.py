"""The results of rows of logits, from their statistics or by plain torch, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchweld.ops.loss import rows
from torchweld.ops.loss.arguments import Settings
from torchweld.ops.loss.rows import LossTransform


class Outputs(NamedTuple):
    """Per-row results to compute in addition to log-probabilities and log-sum-exp."""

    entropy: bool = False
    smooth: bool = False
    argmax: bool = False


class RowResults(NamedTuple):
    """Results of rows; a result that was not wanted is empty."""

    log_probabilities: torch.Tensor  # [n, K]; 0 for ignored targets
    lse: torch.Tensor
    entropy: torch.Tensor
    smooth: torch.Tensor  # the sum over the classes of w * -log p
    soft: torch.Tensor  # the sum over the classes of w * q * -log p
    argmax: torch.Tensor


def find(
    made: Sequence[torch.Tensor], target: torch.Tensor, how: LossTransform, wanted: Outputs
) -> RowResults:
    """Compute the results from the row kernel's results."""
    picked, statistics, argmax = made
    highest, total, _, smooth, dot, mass = statistics.unbind(1)
    log_sum = total.log()
    lse = highest + log_sum
    log_p = (picked - highest.unsqueeze(1)) - log_sum.unsqueeze(1)
    nothing = statistics.new_empty  # an autograd function returns no tensor twice
    return RowResults(
        torch.where(target == -1, 0.0, log_p),
        lse,
        _entropy(statistics) if wanted.entropy else nothing(0),
        lse * how.get_whole_weight() - smooth if wanted.smooth else nothing(0),
        nothing(0) if how.probabilities is None else mass * lse - dot,
        argmax,
    )


def _add_targets(x: torch.Tensor) -> torch.Tensor:
    """The sum over the targets of each row: without a launch if there is one."""
    return x.squeeze(1) if x.shape[1] == 1 else x.sum(1)


def _entropy(statistics: torch.Tensor) -> torch.Tensor:
    total = statistics[:, rows.SUM]
    return total.log() - statistics[:, rows.ENTROPY_SUM] / total


def make_coefficients(
    grads: Sequence[torch.Tensor | None],
    target: torch.Tensor,
    how: LossTransform,
    statistics: torch.Tensor | None = None,
    on_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient kernel's coefficients and grad_picked, from the gradients of the fields.

    A gradient of entropy needs the statistics. `on_lse` is a factor of lse in its own gradient.
    """
    of_log_p, of_lse, of_entropy, of_smooth, of_soft = [
        None if grad is None or grad.numel() == 0 else grad.to(how.kind) for grad in grads[:5]
    ]
    columns = {}
    on_p = nothing = target.new_zeros(target.shape[0], dtype=how.kind)
    if of_log_p is None:
        grad_picked = target.new_zeros(target.shape, dtype=how.kind)
    else:
        grad_picked = torch.where(target == -1, 0.0, of_log_p)
        on_p = on_p - _add_targets(grad_picked)
    if of_lse is not None:
        on_p = on_p + of_lse
    if of_entropy is not None and statistics is not None:
        columns[rows.ON_ENTROPY] = -of_entropy
        # An entropy that nothing depends on may be NaN.
        on_p = on_p - torch.where(of_entropy == 0, 0.0, of_entropy * _entropy(statistics))
    if of_smooth is not None:
        columns[rows.ON_SMOOTH] = -of_smooth
        on_p = on_p + of_smooth * how.get_whole_weight()
    if of_soft is not None:
        columns[rows.ON_DOT] = -of_soft
    if on_lse is not None:
        columns[rows.ON_LSE] = on_lse
    columns[rows.ON_P] = on_p
    # Not written in place: vmap may batch some columns.
    each = [columns.get(at, nothing) for at in range(rows.COEFFICIENTS)]
    return torch.stack(each, 1), grad_picked


class LossFactors(NamedTuple):
    """The factors of the terms of each row's loss, [n]; None: the term is absent."""

    target: torch.Tensor | None  # of -log p of the target
    smooth: torch.Tensor | None
    soft: torch.Tensor | None
    lse_squared: torch.Tensor | None

    def find_outputs(self) -> Outputs:
        """Find the results that the terms need."""
        return Outputs(smooth=self.smooth is not None)

    def divide(self, by: torch.Tensor) -> LossFactors:
        """The factors of a loss that is divided by a number."""
        return LossFactors(*[None if factor is None else factor / by for factor in self])

    def add(self, row_results: RowResults) -> torch.Tensor:
        """The loss of each row."""
        terms = []
        if self.target is not None:
            terms.append(-_add_targets(row_results.log_probabilities) * self.target)
        if self.smooth is not None:
            terms.append(row_results.smooth * self.smooth)
        if self.soft is not None:
            terms.append(row_results.soft * self.soft)
        if self.lse_squared is not None:
            terms.append(row_results.lse.square() * self.lse_squared)
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def add_up(self, row_results: RowResults) -> torch.Tensor:
        """The sum of the rows' losses."""
        return self.add(row_results).sum()

    def make_coefficients(
        self, target: torch.Tensor, how: LossTransform
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient kernel's coefficients and grad_picked of the sum."""
        picked = None if self.target is None else -self.target.unsqueeze(1)
        on_lse = None if self.lse_squared is None else 2 * self.lse_squared
        grads = (picked, None, None, self.smooth, self.soft)
        return make_coefficients(grads, target, how, on_lse=on_lse)


def make_factors(
    settings: Settings, target: torch.Tensor, how: LossTransform, token_weights: torch.Tensor | None
) -> tuple[LossFactors, torch.Tensor]:
    """Make the factors of a row's terms, and the divisor of a mean."""
    soft, smoothing, classes = how.probabilities is not None, settings.label_smoothing, how.classes
    if soft:
        counted = weights = target.new_ones(target.shape[:1], dtype=how.kind)
    else:
        counted = weights = (target[:, 0] != -1).to(how.kind)
        if how.weight is not None:
            weights = counted * how.weight[target[:, 0].clamp(0, classes - 1)]
    if token_weights is not None:
        token_weights = token_weights.reshape(-1).to(how.kind)
        if not soft:  # an ignored row's weight gets no gradient, even that of a mean of no rows
            token_weights = torch.where(target[:, 0] == -1, 0.0, token_weights)
        counted, weights = counted * token_weights, weights * token_weights
    main = (1 - smoothing) * weights if smoothing else weights
    factors = LossFactors(
        None if soft else main,
        counted * (smoothing / classes) if smoothing else None,
        main if soft and smoothing < 1 else None,
        counted * settings.z_loss if settings.z_loss else None,
    )
    return factors, weights.sum()


def reduce(
    settings: Settings,
    factors: LossFactors,
    row_results: RowResults,
    count: torch.Tensor,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """Compute the loss of each row, or one number; `add_up` adds the sums of other devices."""
    loss = factors.add(row_results)
    if settings.reduction == "none":
        return loss.reshape(settings.leading)
    total = add_up(loss.sum())
    return total if settings.reduction == "sum" else total / count


def reference(
    logits: torch.Tensor, target: torch.Tensor, how: LossTransform, wanted: Outputs
) -> RowResults:
    """The results by plain torch, which differentiates them any number of times."""
    ignored = rows.is_ignored(target)
    # An ignored row gets no gradient, whatever its logits are.
    u = rows.transform(torch.where(ignored.unsqueeze(1), 0.0, logits), how)
    log_p = torch.log_softmax(u, 1)
    inside = (target >= 0) & (target < u.shape[1])
    absent = torch.where(target == -1, 0.0, torch.nan).to(u.dtype)
    picked = absent
    if u.shape[1]:
        picked = torch.where(inside, log_p.gather(1, torch.where(inside, target, 0)), absent)
    nothing = u.new_empty(0)
    entropy = smooth = soft = nothing
    if wanted.entropy:
        finite = torch.where(log_p == -torch.inf, 0.0, log_p)
        entropy = -(log_p.exp() * finite).sum(1)
    if wanted.smooth:
        smooth = -(log_p if how.weight is None else log_p * how.weight).sum(1)
    if how.probabilities is not None:
        mass = how.probabilities.to(u.dtype)
        mass = mass if how.weight is None else mass * how.weight
        soft = -torch.where(mass == 0, 0.0, mass * log_p).sum(1)
    best = target.new_empty(0)
    if wanted.argmax and u.shape[1]:
        best = torch.where(ignored, -1, u.argmax(1))
    elif wanted.argmax:
        best = target.new_full((u.shape[0],), -1)
    made = (torch.logsumexp(u, 1), entropy, smooth, soft)
    lse, entropy, smooth, soft = (
        torch.where(ignored, 0.0, result) if result.numel() else result for result in made
    )
    return RowResults(picked, lse, entropy, smooth, soft, best)
