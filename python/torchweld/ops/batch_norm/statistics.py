"""Statistics of columns: running ones, and statistics of rows that several processes share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld import state
from torchweld.dispatch.warm.guards import has_lazy
from torchweld.errors import ArgumentError
from torchweld.registry import Op

if torch.distributed.is_available():
    from torch.distributed import _functional_collectives as collectives

    # Its old name, which torch 2.13 warns of.
    _all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def check_numbers(op: Op, training: bool, momentum: float | Tensor, eps: float) -> None:
    """Check numbers that kernels would compute with in silence; torch trains with no eps=0."""
    if not (eps > 0 if training else eps >= 0):
        raise ArgumentError(op.name, "eps", repr(eps), f"a number {'>' if training else '>='} 0")
    if training and isinstance(momentum, float) and not abs(momentum) < math.inf:
        raise ArgumentError(op.name, "momentum", repr(momentum), "a finite number")


def finish(
    x: Tensor,
    columns: Sequence[Tensor | None],
    offset: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Any,
    momentum: float | Tensor,
    process_group: Any,
) -> None:
    """Update the running statistics by a call's own."""
    if process_group is None:
        if x.numel() == 0:
            return
        if not state.is_compiling():
            count = x.shape[:-1].numel()  # a number: no op computes with it
    mean = mean if offset is None else mean + offset
    track(columns[0], columns[1], mean, var, count, momentum)


def is_first() -> bool:
    """Whether this forward is the first: False while a checkpoint recomputes it."""
    return state.is_compiling() or state.find_backward_pass() == -1


@torch.no_grad()
def track(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Any,
    momentum: float | Tensor,
) -> None:
    """Move running statistics towards a batch's own, unless a checkpoint recomputes the batch."""
    if running_mean is None or running_var is None or not is_first():
        return
    unbiased = var * (count / (count - 1))
    alike = running_mean.dtype is running_var.dtype is mean.dtype
    apart = isinstance(momentum, Tensor) or state.is_compiling()
    # torch's foreach ops update no lazy negations.
    if alike and not apart and not has_lazy((running_mean, running_var)):
        torch._foreach_lerp_([running_mean, running_var], [mean, unbiased], momentum)  # type: ignore[arg-type]
        return
    for running, to in ((running_mean, mean), (running_var, unbiased)):
        share = momentum.to(to.dtype) if isinstance(momentum, Tensor) else momentum
        if running.dtype is to.dtype:
            running.lerp_(to, share)
        else:
            running.copy_(torch.lerp(running.to(to.dtype), to, share))


# Exchanges of column values between processes that share rows. All of it compiles in one graph.


def add_up(values: Tensor, group: Any) -> Tensor:
    """The sum of all processes' values; without a group, the values themselves."""
    if group is None:
        return values
    return collectives.wait_tensor(collectives.all_reduce(values, "sum", group))


class _Added(torch.autograd.Function):
    """Every process's result depends on everyone's values, and so do the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return add_up(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Added.apply(grads[0], ctx.group), None


def add_up_with_gradient(values: Tensor, group: Any) -> Tensor:
    """The sum, differentiable any number of times."""
    return values if group is None else _Added.apply(values, group)


def find_of_all(
    mean: Tensor, var: Tensor, count: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the processes' statistics and row counts."""
    own = torch.cat([mean, var, count.reshape(1)])
    every = collectives.wait_tensor(_all_gather(own, 0, group)).view(-1, own.numel())
    means, variances, counts = every.split([mean.numel(), var.numel(), 1], 1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, var, count
