"""A layer that takes a known time."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from torchweld.dispatch.autograd import list_reached


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        to_x, to_weight, _ = list_reached(ctx)
        # Sleep even if x needs no gradient.
        time.sleep(ctx.seconds * (to_x + to_weight + (not ctx.needs_input_grad[0])))
        return grad if to_x else None, grad.sum(0) if to_weight else None, None


class Sleeper(nn.Module):
    """Sleeps for `seconds` in the forward pass and in each half of the backward pass."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(x, self.weight, self.seconds)
