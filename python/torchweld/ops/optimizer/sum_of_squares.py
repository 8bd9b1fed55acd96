"""The sum of squares of gradients; its root is the norm for clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.dispatch.bare import BareOp
from torchweld.ops.optimizer.batch import (
    MOST_SAMPLED,
    choose_few,
    has_kernel_dtype,
    is_foreign_to_kernels,
)
from torchweld.ops.optimizer.rule import BACKENDS


def _reference(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.double().square().sum() for g in grads]).sum()


_OP = BareOp(
    "sum_of_squares",
    "(Tensor[] grads) -> Tensor",
    lambda grads: grads[0].new_empty((), dtype=torch.float64),
    BACKENDS,
    reference=_reference,
    sample=lambda grads: ([grads[i].flatten()[:MOST_SAMPLED] for i in choose_few(grads)],),
)


def find_sum(grads: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], Any] | None:
    """What sums the squares of such gradients in one call; None if that takes more than one."""
    first = grads[0]
    if any(g.dtype != first.dtype or not g.is_cpu or is_foreign_to_kernels(g) for g in grads):
        return None
    return _OP.find_for_all(first)[0] if has_kernel_dtype(first) else None


def sum_of_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, as a float64 tensor; gradients of one device."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for dtype in dict.fromkeys(g.dtype for g in grads):
        same = [g for g in grads if g.dtype == dtype]
        serves = has_kernel_dtype(same[0]) and not any(map(is_foreign_to_kernels, same))
        total = total + (_OP.run if serves else _reference)(same)
    return total
