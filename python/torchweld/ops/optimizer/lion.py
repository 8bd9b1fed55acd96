"""The step of Lion."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.rule import Rule


class LionSettings(NamedTuple):
    """The fields of the struct in csrc/core/lion.h."""

    beta1: float
    beta2: float
    weight_decay: float
    cautious: bool = False  # step only where the step and the gradient agree
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    s: LionSettings,
) -> tuple[torch.Tensor, Tensors]:
    (momentum,) = moments
    ahead = momentum * s.beta1 + g * (1 - s.beta1)
    if s.cautious:
        ahead = torch.where(agree(ahead, g), ahead, 0.0)
    decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
    p = torch.where(oppose(ahead, p), p, decayed) if s.cautious_decay else decayed
    p = p - ahead.sign() * (lr * ratio).to(p.dtype)
    return p, [momentum * s.beta2 + g * (1 - s.beta2)]


def _agreement(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, t: torch.Tensor, s: LionSettings
) -> tuple[torch.Tensor, Tensors]:
    """1 where a cautious step moves."""
    (momentum,) = moments
    ahead = momentum * s.beta1 + g * (1 - s.beta1)
    return agree(ahead, g).to(p.dtype), [momentum * s.beta2 + g * (1 - s.beta2)]


LION = Rule(
    "lion",
    LionSettings,
    signed=(True,),
    update=_update,
    direction=_agreement,
)
