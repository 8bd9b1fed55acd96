"""The step of AdEMAMix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.rule import Rule


class AdemamixSettings(NamedTuple):
    """The fields of the struct in csrc/core/ademamix.h."""

    beta1: float
    beta2: float
    beta3: float
    alpha: float
    eps: float
    weight_decay: float
    alpha_warmup: float  # in steps; 0: none
    beta3_warmup: float


def _half_life(beta: float) -> float:
    return math.log(0.5) / math.log(beta + 1e-8) - 1


def _slow_beta(t: torch.Tensor, s: AdemamixSettings) -> torch.Tensor:
    if s.beta3_warmup == 0:
        return torch.full_like(t, s.beta3)
    part = t / s.beta3_warmup
    half_life = (1 - part) * _half_life(s.beta1) + part * _half_life(s.beta3)
    growing = torch.pow(0.5, 1 / (half_life + 1))
    return torch.where(t < s.beta3_warmup, growing, s.beta3)


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: AdemamixSettings,
) -> tuple[torch.Tensor, Tensors]:
    beta3, alpha = _slow_beta(t, s), torch.full_like(t, s.alpha)
    if s.alpha_warmup:
        alpha = torch.where(t < s.alpha_warmup, s.alpha * (t / s.alpha_warmup), alpha)
    scale = (1 / (1 - s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - s.beta2**t).sqrt()).to(p.dtype)
    fast = moments[0] * s.beta1 + g * (1 - s.beta1)
    slow = moments[1] * beta3.to(p.dtype) + g * (1 - beta3).to(p.dtype)
    exp_avg_sq = moments[2] * s.beta2 + g * g * (1 - s.beta2)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    u = (fast * scale + slow * alpha.to(p.dtype)) / (root * root_scale + s.eps)
    p = p * (1 - lr * s.weight_decay).to(p.dtype) - u * lr.to(p.dtype)
    return p, [fast, slow, exp_avg_sq]


ADEMAMIX = Rule(
    "ademamix",
    AdemamixSettings,
    signed=(True, True, False),
    update=_update,
)
