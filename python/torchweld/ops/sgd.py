"""The step of SGD, with or without momentum."""

from __future__ import annotations

import torch

from torchweld.ops._optimizer import Rule, Tensors


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[torch.Tensor, Tensors]:
    if weight_decay != 0:
        g = g + p * weight_decay
    if moments:
        # The first gradient is the first momentum, undampened.
        rate = torch.where(t == 1, 1.0, 1 - dampening).to(p.dtype)
        buffer = moments[0] * momentum + g * rate
        moments = [buffer]
        g = g + buffer * momentum if nesterov else buffer
    return p - g * lr.to(p.dtype), moments


SGD = Rule(
    "sgd",
    "float momentum, float dampening, float weight_decay, bool nesterov",
    signed=(True,),
    update=_update,
)
