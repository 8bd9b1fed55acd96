"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Stepped, Task, Tensor, Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.torchs import take_torchs_step
from torchweld.optim._base import FusedOptimizer, Group, moments_of
from torchweld.optim._codecs import Moments
from torchweld.optim._options import CautiousOptions, takes


class AdamSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/adam.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool  # AdamW's weight decay; otherwise it is added to the gradient
    cautious: bool = False  # step only where the first moment and the gradient agree
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, ratio: Tensor, s: AdamSettings
) -> Stepped:
    step_size = (lr / (1 - s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - s.beta2**t).sqrt()).to(p.dtype)
    g, new = _take_in(p, g, moments, s)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = new[-1].double().sqrt().to(p.dtype)
    u = new[0] / (root * root_scale + s.eps)
    if s.cautious:
        u = torch.where(agree(new[0], g), u * ratio.to(p.dtype), 0.0)
    if s.decoupled_weight_decay:
        decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
        p = torch.where(oppose(u, p), p, decayed) if s.cautious_decay else decayed
    return p - u * step_size, new


def _agreement(p: Tensor, g: Tensor, moments: Tensors, t: Tensor, s: AdamSettings) -> Stepped:
    """1 where a cautious step moves."""
    g, new = _take_in(p, g, moments, s)
    return agree(new[0], g).to(p.dtype), new


def _take_in(p: Tensor, g: Tensor, moments: Tensors, s: AdamSettings) -> Stepped:
    if not s.decoupled_weight_decay and s.weight_decay != 0:
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
    fused = torch._fused_adamw_ if s.decoupled_weight_decay else torch._fused_adam_

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
    # The third is amsgrad's: the largest second moment so far.
    moments={"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False},
    update=_update,
    direction=_agreement,
    torchs=_torchs,
)


class _AdamStep(FusedOptimizer):
    _is_cautious_rule = True
    _varying = frozenset({"betas", "eps", "weight_decay"})

    _rule = ADAM

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return moments_of(ADAM, 3 if group["amsgrad"] else 2)

    def _with_flags(self, group: Group) -> Group:
        group = super()._with_flags(group)
        both = self.defaults | group
        if both.get("cautious_decay") and not both["decoupled_weight_decay"]:
            accepted = "decoupled weight decay, as AdamW's; Adam's is a part of the gradient"
            raise ArgumentError(type(self).__name__, "cautious_decay", "True", accepted)
        return group


class Adam(_AdamStep, torch.optim.Adam):
    """torch.optim.Adam, in one pass over memory, with states of 32 to 8 bits.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable: as in torch.optim.Adam;
            foreach and fused are accepted and have no effect, differentiable must be False.
        state_dtype: dtype of the moments: torch.float32, torch.bfloat16 or "8bit"; per group.
        master_weights: for 16-bit parameters. False: no masters. True: float32 masters, from which
            parameters are rounded. "remainder": for bfloat16 parameters, the 16 bits that complete
            them to float32, with the same trajectory as masters. "remainder8": for bfloat16
            parameters, 8 bits that complete them to floats of 24 bits.
        stochastic_rounding: for bfloat16 parameters without masters. Steps that are too small to
            change the nearest number still count on average. torch's generators are not used: the
            rounding depends only on the numbers of step, parameter and element, on every rank.
        min_quantized_size: smaller tensors, and vectors, keep float32 moments.
        max_grad_norm: gradients are used as if clipped by torch.nn.utils.clip_grad_norm_;
            `grad_norm` is their norm before clipping, as a tensor.
        ema_decay: keep moving averages of parameters, which a step multiplies by this number;
            `ema_weights()` shows them. They start at the parameters, and are float32 for 16-bit
            parameters.
        cautious: move only elements whose step and gradient agree in sign, divided by their share
            in the whole tensor (Liang et al. 2024); per group.
        cautious_decay: leave out weight decay where the step moves an element away from zero (Chen
            et al. 2025); per group.

    A gradient that is not finite has the same effect as in torch, except with 8-bit moments: then
    the element is skipped and its moments are reset.
    """

    @takes(CautiousOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[CautiousOptions],
    ) -> None:
        """As in torch.optim."""


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW, in one pass over memory, with states of 32 to 8 bits.

    Takes Adam's arguments; weight_decay defaults to 0.01.
    """

    @takes(CautiousOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[CautiousOptions],
    ) -> None:
        """As in torch.optim."""
