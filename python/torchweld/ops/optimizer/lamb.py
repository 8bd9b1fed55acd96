"""The step of LAMB."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.rule import Rule


class LambSettings(NamedTuple):
    """The fields of the struct in csrc/core/lamb.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    averaged: bool  # whether a gradient enters the first moment times 1 - beta1, or unscaled


def _direction(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    s: LambSettings,
) -> tuple[torch.Tensor, Tensors]:
    exp_avg = moments[0] * s.beta1 + g * (1 - s.beta1 if s.averaged else 1)
    exp_avg_sq = moments[1] * s.beta2 + g * g * (1 - s.beta2)
    corrected = 1 if s.bias_correction else 0
    scale = (1 / (1 - corrected * s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - corrected * s.beta2**t).sqrt()).to(p.dtype)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    u = exp_avg * scale / (root * root_scale + s.eps) + p * s.weight_decay
    return u, [exp_avg, exp_avg_sq]


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    s: LambSettings,
) -> tuple[torch.Tensor, Tensors]:
    u, moments = _direction(p, g, moments, t, s)
    return p - u * (lr * ratio).to(p.dtype), moments


LAMB = Rule(
    "lamb",
    LambSettings,
    signed=(True, False),
    update=_update,
    direction=_direction,
)
