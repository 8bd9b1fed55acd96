"""The step of LAMB."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.ops.optimizer.rule import Rule, Tensors


def _direction(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    averaged: bool,
) -> tuple[torch.Tensor, Tensors]:
    exp_avg = moments[0] * beta1 + g * (1 - beta1 if averaged else 1)
    exp_avg_sq = moments[1] * beta2 + g * g * (1 - beta2)
    corrected = 1 if bias_correction else 0
    scale = (1 / (1 - corrected * beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - corrected * beta2**t).sqrt()).to(p.dtype)
    # In float64, since torch leaves the last bit of a float32 root to a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    u = exp_avg * scale / (root * root_scale + eps) + p * weight_decay
    return u, [exp_avg, exp_avg_sq]


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, Tensors]:
    u, moments = _direction(p, g, moments, t, *settings)
    return p - u * (lr * ratio).to(p.dtype), moments


LAMB = Rule(
    "lamb",
    "float beta1, float beta2, float eps, float weight_decay, bool bias_correction, bool averaged",
    signed=(True, False),
    update=_update,
    direction=_direction,
)
