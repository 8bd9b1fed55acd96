"""The step of SGD, with or without momentum; with ratios it is that of LARS."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.ops.optimizer.rule import Rule, Tensors


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[torch.Tensor, Tensors]:
    if weight_decay != 0:
        g = g + p * weight_decay
    g = g * ratio.to(p.dtype)
    if moments:
        # The first gradient is the first momentum, undampened.
        rate = torch.where(t == 1, torch.ones_like(t), 1 - dampening).to(p.dtype)
        buffer = moments[0] * momentum + g * rate
        moments = [buffer]
        g = g + buffer * momentum if nesterov else buffer
    return p - g * lr.to(p.dtype), moments


def _gradient(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, *_: Any
) -> tuple[torch.Tensor, Tensors]:
    """What LARS measures."""
    return g, moments


SGD = Rule(
    "sgd",
    "float momentum, float dampening, float weight_decay, bool nesterov",
    signed=(True,),
    update=_update,
    direction=_gradient,
)
