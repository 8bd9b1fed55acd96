"""The step of SGD, with or without momentum; with ratios, the step of LARS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchweld.ops.optimizer.batch import Task, Tensors
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.torchs import take_torchs_step


class SgdSettings(NamedTuple):
    """The fields of the struct in csrc/core/sgd.h."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    ratio: torch.Tensor,
    s: SgdSettings,
) -> tuple[torch.Tensor, Tensors]:
    if s.weight_decay != 0:
        g = g + p * s.weight_decay
    g = g * ratio.to(p.dtype)
    if moments:
        # The first gradient is the first momentum, undampened.
        rate = torch.where(t == 1, torch.ones_like(t), 1 - s.dampening).to(p.dtype)
        buffer = moments[0] * s.momentum + g * rate
        moments = [buffer]
        g = g + buffer * s.momentum if s.nesterov else buffer
    return p - g * lr.to(p.dtype), moments


def _gradient(
    p: torch.Tensor, g: torch.Tensor, moments: Tensors, *_: Any
) -> tuple[torch.Tensor, Tensors]:
    """The gradient with its weight decay, whose norm LARS measures."""
    return g, moments


def _torchs(task: Task) -> bool:
    s = task.settings
    assert isinstance(s, SgdSettings)
    if s.dampening and task.batch.moments:
        return False  # the first step is undampened, and only the GPU knows the step's number

    def step(lists: Sequence[Tensors], lr: float, found_inf: torch.Tensor | None) -> None:
        params, grads, *momentum, _ = lists
        torch._fused_sgd_(
            *(params, grads, momentum[0] if momentum else []),
            weight_decay=s.weight_decay,
            momentum=s.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=s.nesterov,
            maximize=False,
            is_first_step=False,  # equivalent, since momenta start at zero
            found_inf=found_inf,
        )

    return take_torchs_step(task, step)


SGD = Rule(
    "sgd",
    SgdSettings,
    signed=(True,),
    update=_update,
    direction=_gradient,
    torchs=_torchs,
)
