"""LAMB."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.lamb import LAMB as RULE
from torchweld.ops.optimizer.lamb import LambSettings
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer, RatiosOf, split_defaults
from torchweld.optim._codecs import SIGNED, UNSIGNED, Moments

_DEFAULTS = (
    *("lr", "betas", "eps", "weight_decay"),
    *("bias_correction", "grad_averaging", "trust_clip", "always_adapt"),
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
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        state_dtype, master_weights, min_quantized_size, stochastic_rounding, max_grad_norm: as in
            Adam.

    An infinite gradient leaves its tensor unchanged, except for elements that become NaN.
    """

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
        arguments = split_defaults(locals(), *_DEFAULTS)
        if trust_clip is not None and not 0 <= trust_clip[0] <= trust_clip[1]:
            accepted = "two numbers, 0 <= least <= largest, or None"
            raise ArgumentError(type(self).__name__, "trust_clip", repr(trust_clip), accepted)
        super().__init__(**arguments)

    def _rule(self) -> Rule:
        return RULE

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}

    def _settings(self, group: Group, batch: Batch) -> LambSettings:
        beta1, beta2 = map(float, group["betas"])
        numbers = beta1, beta2, float(group["eps"]), float(group["weight_decay"])
        return LambSettings(*numbers, group["bias_correction"], group["grad_averaging"])

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf | None:
        if group["weight_decay"] == 0 and not group["always_adapt"]:
            return None

        def ratios_of(of_param: torch.Tensor, of_step: torch.Tensor) -> torch.Tensor:
            ratios = torch.where((of_param > 0) & (of_step > 0), of_param / of_step, 1.0)
            return ratios if group["trust_clip"] is None else ratios.clamp(*group["trust_clip"])

        return ratios_of
