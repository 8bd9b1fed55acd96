"""The step of SGD, with or without momentum; with ratios it is that of LARS."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.rule import Rule


class SgdSettings(NamedTuple):
    """As csrc/core/sgd.h has them."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    s: SgdSettings,
) -> tuple[torch.Tensor, Tensors]:
    if s.weight_decay != 0:
        g = g + p * s.weight_decay
    g = g * ratio.to(p.dtype)
    if moments:
        # The first gradient is the first momentum, undampened.
        rate = torch.where(t == 1, torch.ones_like(t), 1 - s.dampening).to(p.dtype)
        buffer = moments[0] * s.momentum + g * rate
        moments = [buffer]
        g = g + buffer * s.momentum if s.nesterov else buffer
    return p - g * lr.to(p.dtype), moments


def _gradient(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, *_: Any
) -> tuple[torch.Tensor, Tensors]:
    """What LARS measures."""
    return g, moments


SGD = Rule(
    "sgd",
    SgdSettings,
    signed=(True,),
    update=_update,
    direction=_gradient,
)
