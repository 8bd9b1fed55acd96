"""Rows whose classes devices share, which exchange a few numbers a row.

The logits stay where they are computed.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld.ops.loss import rows
from torchweld.ops.loss.arguments import Classes
from torchweld.ops.loss.results import Wanted


def _reduce(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    reduced = ops.all_reduce.default(x.contiguous(), operation, group)
    return ops.wait_tensor.default(reduced)  # type: ignore[no-any-return]


def combine(
    own: Classes,
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    target: torch.Tensor,
    wanted: Wanted,
    soft: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the devices' results into the row kernel's results for the whole vocabulary.

    Devices exchange, for each row, the largest logit; then the sum of exponentials, the targets'
    logits and the other sums that are wanted; then the class of the largest logit, if wanted.
    """
    picked, statistics, argmax = made
    mine = statistics[:, rows.HIGHEST]
    highest = _reduce(mine, "max", own.group)
    # Where both are -inf, their difference is NaN.
    step = torch.where(mine == highest, 0, mine - highest)
    factor, total = step.exp(), statistics[:, rows.SUM]
    sums = {rows.SUM: factor * total}
    if wanted.entropy:
        entropy = factor * (statistics[:, rows.ENTROPY_SUM] + step * total)
        sums[rows.ENTROPY_SUM] = torch.where(factor == 0, 0, entropy)
    if wanted.smooth:
        sums[rows.SMOOTH] = statistics[:, rows.SMOOTH]
    if soft:
        sums[rows.DOT], sums[rows.MASS] = statistics[:, rows.DOT], statistics[:, rows.MASS]
    packed = torch.cat([torch.stack([*sums.values()], 1), picked], 1)
    packed = _reduce(packed, "sum", own.group)
    columns = [torch.zeros_like(mine)] * rows.STATISTICS
    columns[rows.HIGHEST] = highest
    for at, column in enumerate(sums):
        columns[column] = packed[:, at]
    ignored = rows.is_ignored(target)
    whole = torch.where(ignored.unsqueeze(1), statistics, torch.stack(columns, 1))
    if wanted.argmax:
        best = torch.where((mine == highest) & (argmax >= 0), argmax + own.begin, own.whole)
        best = _reduce(best, "min", own.group)
        # No logit of a row with NaN is the largest.
        argmax = torch.where(ignored, -1, torch.where(best == own.whole, 0, best))
    return packed[:, len(sums) :].contiguous(), whole, argmax


def run_both(
    own: Classes,
    logits: torch.Tensor,
    target: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row kernel with this name, whose results are of the whole vocabulary."""
    *given, smooth, argmax = rest
    made = rows.FORWARD.run(logits, target, *given, False, smooth, argmax)
    made = combine(own, made, target, Wanted(smooth=smooth, argmax=argmax), given[1] is not None)
    grads = (made[1], coefficients, grad_picked)
    rows.BACKWARD_IN_PLACE.run(logits, target, *grads, *given)
    return made
