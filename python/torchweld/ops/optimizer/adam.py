"""The step of Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Task, Tensors
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.torchs import stepped


class AdamSettings(NamedTuple):
    """As csrc/core/adam.h has them."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW's weight decay; otherwise it is added to the gradient


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: AdamSettings,
) -> tuple[torch.Tensor, Tensors]:
    step_size = (lr / (1 - s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - s.beta2**t).sqrt()).to(p.dtype)
    if s.decoupled:
        p = p * (1 - lr * s.weight_decay).to(p.dtype)
    elif s.weight_decay != 0:
        g = g + p * s.weight_decay
    exp_avg = moments[0] + (g - moments[0]) * (1 - s.beta1)
    exp_avg_sq = moments[1] * s.beta2 + g * g * (1 - s.beta2)
    new = [exp_avg, exp_avg_sq]
    if len(moments) == 3:  # amsgrad
        new.append(torch.maximum(moments[2], exp_avg_sq))
    # In float64, since torch leaves the last bit of a float32 root to a library.
    root = new[-1].double().sqrt().to(p.dtype)
    return p - exp_avg / (root * root_scale + s.eps) * step_size, new


def _torchs(task: Task) -> bool:
    s = task.settings
    assert isinstance(s, AdamSettings)
    fused = torch._fused_adamw_ if s.decoupled else torch._fused_adam_

    def step(lists: Sequence[Tensors], lr: float, found_inf: torch.Tensor | None) -> None:
        params, grads, first, second, *largest, steps = lists
        fused(
            *(params, grads, first, second, largest[0] if largest else [], steps),
            lr=lr,
            beta1=s.beta1,
            beta2=s.beta2,
            weight_decay=s.weight_decay,
            eps=s.eps,
            amsgrad=bool(largest),
            maximize=False,
            found_inf=found_inf,
        )

    return stepped(task, step)


ADAM = Rule(
    "adam",
    AdamSettings,
    # The third is amsgrad's, the largest second moment so far.
    signed=(True, False, False),
    update=_update,
    torchs=_torchs,
)
