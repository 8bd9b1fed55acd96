"""LAMB."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.ops.optimizer.batch import Stepped, Tensor, Tensors
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer, RatiosOf
from torchweld.optim._options import OwnOptions, takes


class LambSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/lamb.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool  # whether a gradient enters the first moment times 1 - beta1, or unscaled


def _direction(p: Tensor, g: Tensor, moments: Tensors, t: Tensor, s: LambSettings) -> Stepped:
    exp_avg = moments[0] * s.beta1 + g * (1 - s.beta1 if s.grad_averaging else 1)
    exp_avg_sq = moments[1] * s.beta2 + g * g * (1 - s.beta2)
    corrected = 1 if s.bias_correction else 0
    scale = (1 / (1 - corrected * s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - corrected * s.beta2**t).sqrt()).to(p.dtype)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    u = exp_avg * scale / (root * root_scale + s.eps) + p * s.weight_decay
    return u, [exp_avg, exp_avg_sq]


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, ratio: Tensor, s: LambSettings
) -> Stepped:
    u, moments = _direction(p, g, moments, t, s)
    return p - u * (lr * ratio).to(p.dtype), moments


RULE = Rule(
    "lamb",
    LambSettings,
    moments={"exp_avg": True, "exp_avg_sq": False},
    update=_update,
    direction=_direction,
)


class LAMB(OwnOptimizer):
    """LAMB (You et al. 2020): Adam's step, weight decay included, at each tensor's own scale.

    A tensor p moves by lr * |p| / |u| * u, where u is Adam's direction plus weight_decay * p, or by
    lr * u if either norm is zero. Norms are taken over the whole tensor, sharded or not.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: whether moments are corrected for their start at zero.
        grad_averaging: whether a gradient enters the first moment times 1 - beta1, or unscaled.
        trust_clip: bounds of |p| / |u|, least and largest; DeepSpeed's are (0.01, 10).
        always_adapt: whether parameters without weight decay are adapted too; Apex has False, and
            max_grad_norm=1.0.
        options: as in torch.optim and Adam.

    An infinite gradient leaves its tensor unchanged, except for elements that become NaN.
    """

    @takes(OwnOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_clip: tuple[float, float] | None = None,
        always_adapt: bool = True,
        **options: Unpack[OwnOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""

    _rule = RULE

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf | None:
        if group["weight_decay"] == 0 and not group["always_adapt"]:
            return None
        return find_trust_ratios(group["trust_clip"])


def find_trust_ratios(clip: tuple[float, float] | None) -> RatiosOf:
    """Make the function of |p| / |u|, and 1 where either is zero."""

    def ratios_of(of_param: torch.Tensor, of_step: torch.Tensor) -> torch.Tensor:
        ratios = torch.where((of_param > 0) & (of_step > 0), of_param / of_step, 1.0)
        return ratios if clip is None else ratios.clamp(*clip)

    return ratios_of
