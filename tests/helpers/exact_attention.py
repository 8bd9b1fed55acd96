"""Attention in float64 by plain torch, and how exactly ours has its results and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A leaf with normal numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def attend_exactly(
    qkv: Sequence[torch.Tensor],
    mask: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float = 0,
) -> torch.Tensor:
    """Zeros where nothing is seen; heads may share keys, and a batch too."""
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    z = q @ k.mT * q.shape[-1] ** -0.5
    z = torch.tanh(z / softcap) * softcap if softcap else z
    z = (z if bias is None else z + bias.double()).masked_fill(~mask, -torch.inf)
    none = (z == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(z.masked_fill(none, 0), -1).masked_fill(none, 0) @ v


def assert_as_exact(
    found: torch.Tensor, wanted: Any, leaves: list[torch.Tensor], tolerance: float = 2e-5
) -> None:
    """Sums of some hundred products of numbers around one, in units of the largest of them."""
    grad = draw(*found.shape, seed=5).detach()
    theirs = torch.autograd.grad(wanted, leaves, grad.to(wanted.dtype))
    mine = torch.autograd.grad(found, leaves, grad.to(found.dtype))
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    for leaf, a, b in zip(leaves, mine, theirs, strict=True):
        assert a.dtype == leaf.dtype
        highest = b.abs().max().clamp(1)
        torch.testing.assert_close(a / highest, b / highest, rtol=tolerance, atol=tolerance)
