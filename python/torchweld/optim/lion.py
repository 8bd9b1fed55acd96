"""Lion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.ops.optimizer.batch import Stepped, Tensor, Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import OwnOptimizer
from torchweld.optim._options import CautiousOptions, takes


class LionSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/lion.h."""

    beta1: float
    beta2: float
    weight_decay: float
    cautious: bool = False  # step only where the step and the gradient agree
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, ratio: Tensor, s: LionSettings
) -> Stepped:
    (momentum,) = moments
    ahead = momentum * s.beta1 + g * (1 - s.beta1)
    if s.cautious:
        ahead = torch.where(agree(ahead, g), ahead, 0.0)
    decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
    p = torch.where(oppose(ahead, p), p, decayed) if s.cautious_decay else decayed
    p = p - ahead.sign() * (lr * ratio).to(p.dtype)
    return p, [momentum * s.beta2 + g * (1 - s.beta2)]


def _agreement(p: Tensor, g: Tensor, moments: Tensors, t: Tensor, s: LionSettings) -> Stepped:
    """1 where a cautious step moves."""
    (momentum,) = moments
    ahead = momentum * s.beta1 + g * (1 - s.beta1)
    return agree(ahead, g).to(p.dtype), [momentum * s.beta2 + g * (1 - s.beta2)]


LION = Rule(
    "lion",
    LionSettings,
    moments={"exp_avg": True},
    update=_update,
    direction=_agreement,
)


class Lion(OwnOptimizer):
    """Lion (Chen et al. 2023): steps of lr in the direction of a momentum's sign.

    Args:
        params: parameters, or groups of them, as in torch.optim.
        lr: the size of a step; a tenth of AdamW's is usual.
        betas: decay rates of the momentum that a step follows, and of the one that is stored.
        weight_decay: decoupled, as in AdamW; ten times AdamW's is usual.
        options: as in torch.optim and Adam.
    """

    @takes(CautiousOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[CautiousOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""

    _is_cautious_rule = True
    _varying = frozenset({"betas", "weight_decay"})

    _rule = LION
