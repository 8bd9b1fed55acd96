"""The step of Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Task, Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.torchs import take_torchs_step


class AdamSettings(NamedTuple):
    """The fields of the struct in csrc/core/adam.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW's weight decay; otherwise it is added to the gradient
    cautious: bool = False  # step only where the first moment and the gradient agree
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    s: AdamSettings,
) -> tuple[torch.Tensor, Tensors]:
    step_size = (lr / (1 - s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - s.beta2**t).sqrt()).to(p.dtype)
    g, new = _take_in(p, g, moments, s)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = new[-1].double().sqrt().to(p.dtype)
    u = new[0] / (root * root_scale + s.eps)
    if s.cautious:
        u = torch.where(agree(new[0], g), u * ratio.to(p.dtype), 0.0)
    if s.decoupled:
        decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
        p = torch.where(oppose(u, p), p, decayed) if s.cautious_decay else decayed
    return p - u * step_size, new


def _agreement(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, t: torch.Tensor, s: AdamSettings
) -> tuple[torch.Tensor, Tensors]:
    """1 where a cautious step moves."""
    g, new = _take_in(p, g, moments, s)
    return agree(new[0], g).to(p.dtype), new


def _take_in(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, s: AdamSettings
) -> tuple[torch.Tensor, Tensors]:
    if not s.decoupled and s.weight_decay != 0:
        g = g + p * s.weight_decay
    exp_avg = moments[0] + (g - moments[0]) * (1 - s.beta1)
    exp_avg_sq = moments[1] * s.beta2 + g * g * (1 - s.beta2)
    new = [exp_avg, exp_avg_sq]
    if len(moments) == 3:  # amsgrad
        new.append(torch.maximum(moments[2], exp_avg_sq))
    return g, new


def _torchs(task: Task) -> bool:
    s = task.settings
    assert isinstance(s, AdamSettings)
    if s.cautious or s.cautious_decay:
        return False
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

    return take_torchs_step(task, step)


ADAM = Rule(
    "adam",
    AdamSettings,
    # The third is amsgrad's, the largest second moment so far.
    signed=(True, False, False),
    update=_update,
    direction=_agreement,
    torchs=_torchs,
)
