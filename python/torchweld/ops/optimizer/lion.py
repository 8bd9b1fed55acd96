"""The step of Lion."""

from __future__ import annotations

import torch

from torchweld.ops.optimizer.rule import Rule, Tensors


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[torch.Tensor, Tensors]:
    (momentum,) = moments
    ahead = momentum * beta1 + g * (1 - beta1)
    p = p * (1 - lr * weight_decay).to(p.dtype) - ahead.sign() * lr.to(p.dtype)
    return p, [momentum * beta2 + g * (1 - beta2)]


LION = Rule(
    "lion",
    "float beta1, float beta2, float weight_decay",
    signed=(True,),
    update=_update,
)
