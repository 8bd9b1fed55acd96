"""LAMB."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.lamb import LAMB as RULE
from torchweld.ops.optimizer.lamb import LambSettings
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer, RatiosOf
from torchweld.optim._codecs import SIGNED, UNSIGNED, Moments


class LAMB(OwnOptimizer):
    """LAMB (You et al. 2020): Adam's step, weight decay included, at each tensor's own scale.

    A tensor p moves by lr * |p| / |u| * u, where u is Adam's direction plus weight_decay * p, or by
    lr * u if either norm is zero. Norms are those of the whole tensor, sharded or not.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        bias_correction: whether moments are corrected for their start at zero.
        grad_averaging: whether a gradient enters the first moment times 1 - beta1, or unscaled.
        trust_clip: bounds of |p| / |u|, least and largest; DeepSpeed's are (0.01, 10).
        always_adapt: whether parameters without weight decay are adapted too; Apex has False, and
            max_grad_norm=1.0.
        others: maximize, foreach, fused, capturable, as in torch.optim; state_dtype,
            master_weights, stochastic_rounding, min_quantized_size, max_grad_norm, as in Adam.

    An infinite gradient leaves its tensor unchanged, except for elements that become NaN.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_clip: tuple[float, float] | None = None,
        always_adapt: bool = True,
        **others: Any,
    ) -> None:
        if trust_clip is not None and not 0 <= trust_clip[0] <= trust_clip[1]:
            accepted = "two numbers, 0 <= least <= largest, or None"
            raise ArgumentError(type(self).__name__, "trust_clip", repr(trust_clip), accepted)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "trust_clip": trust_clip,
            "always_adapt": always_adapt,
        }
        super().__init__(params, defaults, **others)

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
