"""The step of Lion."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.rule import Rule


class LionSettings(NamedTuple):
    """As csrc/core/lion.h has them."""

    beta1: float
    beta2: float
    weight_decay: float


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: LionSettings,
) -> tuple[torch.Tensor, Tensors]:
    (momentum,) = moments
    ahead = momentum * s.beta1 + g * (1 - s.beta1)
    p = p * (1 - lr * s.weight_decay).to(p.dtype) - ahead.sign() * lr.to(p.dtype)
    return p, [momentum * s.beta2 + g * (1 - s.beta2)]


LION = Rule(
    "lion",
    LionSettings,
    signed=(True,),
    update=_update,
)
