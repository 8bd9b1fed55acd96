"""SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.ops.optimizer.batch import Stepped, Task, Tensor, Tensors
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.torchs import take_torchs_step
from torchweld.optim._base import FusedOptimizer, Group, moments_of
from torchweld.optim._codecs import STEP, Moments, State
from torchweld.optim._options import StateOptions, takes
from torchweld.state import can_read


class SgdSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/sgd.h."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, ratio: Tensor, s: SgdSettings
) -> Stepped:
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


RULE = Rule(
    "sgd",
    SgdSettings,
    moments={"momentum_buffer": True},
    update=_update,
    direction=_gradient,
    torchs=_torchs,
)


class SgdStep(FusedOptimizer):
    """The step of SGD and LARS."""

    _rule = RULE

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return moments_of(RULE) if group["momentum"] != 0 else {}

    def _begin_moments(self, state: State) -> None:
        # The first gradient of a momentum is not dampened, so the momentum's own steps are counted.
        state["step"].zero_()


class SGD(SgdStep, torch.optim.SGD):
    """torch.optim.SGD, in one pass over memory, with a momentum of 32 to 8 bits.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD;
            foreach and fused are accepted and have no effect, differentiable must be False. Sparse
            gradients are converted to dense.
        state_dtype, master_weights, stochastic_rounding, min_quantized_size, max_grad_norm: as in
            Adam.
    """

    _takes_sparse = True

    @takes(StateOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | torch.Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[StateOptions],
    ) -> None:
        """As in torch.optim."""

    def _saves_count(self, group: Group, p: torch.Tensor, state: State) -> bool:
        if self._codec_of(p).rounds(p):
            return True
        # The first gradient is not dampened.
        step = state.get(STEP) if group["dampening"] != 0 else None
        return step is not None and can_read(step) and bool(step == 0)
