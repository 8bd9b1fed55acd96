"""What ops of batch norms share: their columns, checks, and eager torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.ops import activation as activations
from torchweld.registry import (
    Op,
    constant,
    parameter,
    variance,
)
from torchweld.registry import activation as activation_spec

SOURCES = {
    "cpu": ("csrc/cpu/batch_norm.cpp",),
    "triton": ("triton_kernels/batch_norm.py",),
}


def rows_of(x: Tensor) -> Tensor:
    """x as [rows, width]; no size is inferred, since one of them may be 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def wide(tensor: Tensor) -> Tensor:
    """In the dtype of the arithmetic."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def unlike(x: Tensor, *columns: Tensor | None) -> bool:
    """Whether any differs from x in dtype or width; `check_columns` decides whether it may."""
    width = x.shape[-1:]
    return any(t is not None and (t.dtype is not x.dtype or t.shape != width) for t in columns)


def are_running(x: Tensor, shape: Sequence[int], *running: Tensor | None) -> bool:
    """Whether running statistics are given and fit; no kernel checks this."""
    tensors = [t for t in running if t is not None]
    return len(tensors) == len(running) and all(
        t.shape == shape and t.dtype in checks.parameters_beside(x) and t.dtype is tensors[0].dtype
        for t in tensors
    )


def present(statistic: Tensor | None) -> Tensor:
    """A running statistic that evaluation needs; the op's check then says which one is missing."""
    if statistic is None:
        raise ValueError("evaluation needs running statistics")
    return statistic


def normalize(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The definition, with the result in x's dtype."""
    z = (x - mean) * torch.rsqrt(wide(var) + eps)
    z = z if weight is None else z * weight
    return (z if bias is None else z + bias).to(x.dtype)


def by_torch(
    op: Op,
    x: Tensor,
    columns: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    *kind: str,
) -> Tensor:
    """Eager torch on [rows, width]; training updates the running statistics."""
    running_mean, running_var, weight, bias = columns
    if x.numel() == 0:  # torch has no batch_norm without columns
        z = normalize(x, present(running_mean), present(running_var), weight, bias, eps)
        return activations.activate(op, z, *kind)
    if weight is None and bias is not None:  # torch has no second derivative of a bias only
        weight = torch.ones_like(bias)
    # torch would differentiate running statistics, or raise.
    if running_mean is not None and running_var is not None:
        running_mean, running_var = running_mean.detach(), running_var.detach()
    running, columns = (running_mean, running_var), (running_mean, running_var, weight, bias)
    if unlike(x, *columns):  # torch then accepts only float32
        running_mean, running_var, weight, bias = [None if t is None else wide(t) for t in columns]
    # On the CPU torch's backward (2.13) reads columns as if they were packed:
    #     x = torch.randn(8, 4, requires_grad=True)
    #     mean, var, weight = torch.zeros(4), torch.ones(4), torch.randn(8)[::2]
    #     y = torch.nn.functional.batch_norm(x, mean, var, weight)
    #     torch.autograd.grad(y, x, torch.ones_like(y))  # expected: every row about weight
    weight = weight if weight is None else weight.contiguous()
    if not training:
        running_mean = present(running_mean).contiguous()
        running_var = present(running_var).contiguous()
    z = torch.nn.functional.batch_norm(
        rows_of(x), running_mean, running_var, weight, bias, training, momentum, eps
    )
    if training:
        for original, updated in zip(running, (running_mean, running_var), strict=True):
            if original is not None and updated is not None and original is not updated:
                original.copy_(updated)
    # torch returns a contiguous tensor, but its fake has x's strides.
    return activations.activate(op, z, *kind).contiguous().view(x.shape)


def check(op: Op, x: Any, eps: Any, kind: Sequence[Any], *pairs: dict[str, Any]) -> None:
    """Check a tensor and the vectors of its columns."""
    checks.dense(op.name, "input", x, op.dtypes)
    if x.ndim == 0:
        raise ArgumentError(op.name, "input", "0-dimensional", "[*, width]")
    check_columns(op, x, x.shape[-1:], "the last size of input", eps, kind, *pairs)


def check_columns(
    op: Op,
    x: Tensor,
    shape: Sequence[int],
    meaning: str,
    eps: Any,
    kind: Sequence[Any],
    *pairs: dict[str, Any],
) -> None:
    """Check pairs of tensors of this shape; each may be None, and a pair has one dtype."""
    for pair in pairs:
        tensors = {name: value for name, value in pair.items() if value is not None}
        for name, value in tensors.items():
            checks.dense(op.name, name, value, checks.parameters_beside(x), "input")
            checks.like(op.name, name, value, x, "input")
            checks.shaped(op.name, name, value, shape, meaning)
        if len({value.dtype for value in tensors.values()}) > 1:
            first, second = tensors
            actual = f"of {tensors[second].dtype}"
            accepted = f"that of {first}, {tensors[first].dtype}"
            raise ArgumentError(op.name, second, actual, accepted)
    checks.epsilon(op.name, eps)
    activations.check(op.name, *kind)


def size(leading: tuple[int, ...], row: tuple[int, ...], *rest: Any) -> tuple[Any, ...]:
    """The tensors of both ops, then the other arguments."""
    width = row[-1]
    columns = (constant(width), variance(width), parameter(width), parameter(width))
    return (activation_spec(*leading, *row), *columns, *rest, "gelu", "none")
