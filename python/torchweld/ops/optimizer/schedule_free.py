"""The step of schedule-free AdamW."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.rule import Rule


class ScheduleFreeSettings(NamedTuple):
    """The fields of the struct in csrc/core/schedule_free.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    weight: float  # of z in the average
    number: float  # of the step of all parameters, from 1


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: ScheduleFreeSettings,
) -> tuple[torch.Tensor, Tensors]:
    exp_avg_sq, z = moments
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * (1 - s.beta2)
    root_scale = (1 / torch.full_like(t, 1 - s.beta2**s.number).sqrt()).to(p.dtype)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    d = g / (root * root_scale + s.eps) + p * s.weight_decay
    of_y = (lr * (1 - s.beta1 * (1 - s.weight))).to(p.dtype)
    y = p + (z - p) * s.weight - d * of_y
    return y, [exp_avg_sq, z - d * lr.to(p.dtype)]


SCHEDULE_FREE = Rule(
    "schedule_free",
    ScheduleFreeSettings,
    signed=(False,),
    update=_update,
    has_companion=True,
)
