"""AdEMAMix."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld import checks
from torchweld.ops.optimizer.batch import Batch, Stepped, Tensor, Tensors
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer
from torchweld.optim._options import OwnOptions, takes


class AdemamixSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/ademamix.h."""

    beta1: float
    beta2: float
    beta3: float
    alpha: float
    eps: float
    weight_decay: float
    alpha_warmup: float  # in steps; 0: none
    beta3_warmup: float


def _half_life(beta: float) -> float:
    return math.log(0.5) / math.log(beta + 1e-8) - 1


def _slow_beta(t: torch.Tensor, s: AdemamixSettings) -> torch.Tensor:
    if s.beta3_warmup == 0:
        return torch.full_like(t, s.beta3)
    part = t / s.beta3_warmup
    half_life = (1 - part) * _half_life(s.beta1) + part * _half_life(s.beta3)
    growing = torch.pow(0.5, 1 / (half_life + 1))
    return torch.where(t < s.beta3_warmup, growing, s.beta3)


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, s: AdemamixSettings
) -> Stepped:
    beta3, alpha = _slow_beta(t, s), torch.full_like(t, s.alpha)
    if s.alpha_warmup:
        alpha = torch.where(t < s.alpha_warmup, s.alpha * (t / s.alpha_warmup), alpha)
    scale = (1 / (1 - s.beta1**t)).to(p.dtype)
    root_scale = (1 / (1 - s.beta2**t).sqrt()).to(p.dtype)
    fast = moments[0] * s.beta1 + g * (1 - s.beta1)
    slow = moments[1] * beta3.to(p.dtype) + g * (1 - beta3).to(p.dtype)
    exp_avg_sq = moments[2] * s.beta2 + g * g * (1 - s.beta2)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    u = (fast * scale + slow * alpha.to(p.dtype)) / (root * root_scale + s.eps)
    p = p * (1 - lr * s.weight_decay).to(p.dtype) - u * lr.to(p.dtype)
    return p, [fast, slow, exp_avg_sq]


ADEMAMIX = Rule(
    "ademamix",
    AdemamixSettings,
    moments={"exp_avg_fast": True, "exp_avg_slow": True, "exp_avg_sq": False},
    update=_update,
)


class AdEMAMix(OwnOptimizer):
    """AdEMAMix (Pagliardini et al. 2024): AdamW with a second, slower average of gradients.

    The states have the names of the authors' implementation.

    Args:
        params, lr, eps: as in torch.optim.AdamW.
        betas: decay rates of the fast average, of the squares, and of the slow average.
        alpha: the weight of the slow average in a step.
        beta3_warmup: the number of steps over which betas[2] grows from betas[0]; None: none.
        alpha_warmup: the number of steps over which alpha grows from 0; None: none.
        weight_decay: decoupled, as in AdamW.
        options: as in torch.optim and Adam.
    """

    @takes(OwnOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        beta3_warmup: int | None = None,
        alpha_warmup: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[OwnOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""

    _varying = frozenset({"betas", "alpha", "eps", "weight_decay"})

    _rule = ADEMAMIX

    def _check_settings(self, group: Group) -> None:
        name, betas = type(self).__name__, group["betas"]
        fits = isinstance(betas, (tuple, list)) and len(betas) == 3
        checks.fits(name, "betas", betas, fits, "three numbers in [0, 1)")
        for warmup in ("beta3_warmup", "alpha_warmup"):
            steps = group[warmup]
            fits = steps is None or (isinstance(steps, int) and steps >= 0)
            checks.fits(name, warmup, steps, fits, "an int >= 0 or None")
        fits = betas[0] != 0 or not group["beta3_warmup"]
        checks.fits(name, "beta3_warmup", group["beta3_warmup"], fits, "None if betas[0] is 0")

    def _settings(self, group: Group, batch: Batch) -> AdemamixSettings:
        warmups = {name: group[name] or 0 for name in ("alpha_warmup", "beta3_warmup")}
        return ADEMAMIX.read_settings(group | warmups)
