"""AdEMAMix."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer.ademamix import ADEMAMIX, AdemamixSettings
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer, split_defaults
from torchweld.optim._codecs import SIGNED, UNSIGNED, Moments

_DEFAULTS = ("lr", "betas", "alpha", "beta3_warmup", "alpha_warmup", "eps", "weight_decay")


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
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        state_dtype, master_weights, min_quantized_size, stochastic_rounding, max_grad_norm,
            ema_decay: as in Adam.
    """

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
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
    ) -> None:
        super().__init__(**split_defaults(locals(), *_DEFAULTS))

    _varying = frozenset({"betas", "alpha", "eps", "weight_decay"})

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):
            _check(type(self).__name__, self.defaults | param_group)
        super().add_param_group(param_group)

    def _rule(self) -> Rule:
        return ADEMAMIX

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return {"exp_avg_fast": SIGNED, "exp_avg_slow": SIGNED, "exp_avg_sq": UNSIGNED}

    def _settings(self, group: Group, batch: Batch) -> AdemamixSettings:
        numbers = (*group["betas"], group["alpha"], group["eps"], group["weight_decay"])
        warmups = (group[name] or 0 for name in ("alpha_warmup", "beta3_warmup"))
        return AdemamixSettings(*map(float, (*numbers, *warmups)))


def _check(function: str, group: Group) -> None:
    betas, alpha = group["betas"], group["alpha"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 3:
        raise ArgumentError(function, "betas", repr(betas), "three numbers in [0, 1)")
    if not alpha >= 0:
        raise ArgumentError(function, "alpha", repr(alpha), "a number >= 0")
    for name in ("beta3_warmup", "alpha_warmup"):
        steps = group[name]
        if steps is not None and (not isinstance(steps, int) or steps < 0):
            raise ArgumentError(function, name, repr(steps), "an int >= 0 or None")
    if group["beta3_warmup"] and betas[0] == 0:
        raise ArgumentError(function, "beta3_warmup", "given", "None if betas[0] is 0")
