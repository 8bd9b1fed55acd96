"""Exchanges of column values between processes that share rows. All of it compiles in one graph."""

from __future__ import annotations

from typing import Any

import torch

if torch.distributed.is_available():
    from torch.distributed import _functional_collectives as collectives

    # Its old name, which torch 2.13 warns of.
    _all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def add_up(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of all processes' values; without a group, the values themselves."""
    if group is None:
        return values
    return collectives.wait_tensor(collectives.all_reduce(values, "sum", group))


def gather(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Every process's vector of values, as rows."""
    every = _all_gather(values, 0, group)
    return collectives.wait_tensor(every).view(-1, values.numel())


class _Added(torch.autograd.Function):
    """Every process's result depends on everyone's values, and so do the gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return add_up(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Added.apply(grads[0], ctx.group), None


def add_up_with_gradient(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum, differentiable any number of times."""
    return values if group is None else _Added.apply(values, group)
