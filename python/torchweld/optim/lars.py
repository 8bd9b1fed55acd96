"""LARS."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.optim._base import Group, OwnOptimizer, RatiosOf
from torchweld.optim._options import OwnOptions, takes
from torchweld.optim.sgd import SgdStep


class LARS(SgdStep, OwnOptimizer):
    """LARS (You et al. 2017): SGD with gradients rescaled to each tensor's own scale.

    The gradient of a tensor p, weight decay included, is multiplied by
    trust_coefficient * |p| / (|g| + weight_decay * |p| + eps) before it enters the momentum;
    it is unchanged if either norm is zero. Norms are taken over whole tensors, sharded or not.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        trust_coefficient, eps: constants of the ratio.
        clip: whether lr times the ratio is at most lr, as by default in Apex's LARC.
        options: as in torch.optim and Adam.
    """

    @takes(OwnOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-1,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        clip: bool = False,
        **options: Unpack[OwnOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf:
        def ratios_of(of_param: torch.Tensor, of_grad: torch.Tensor) -> torch.Tensor:
            below = of_grad + group["weight_decay"] * of_param + group["eps"]
            ratios = group["trust_coefficient"] * of_param / below
            if group["clip"]:
                ratios = (ratios / lr.to(ratios.device)).clamp(max=1.0)
            return torch.where((of_param > 0) & (of_grad > 0), ratios, 1.0)

        return ratios_of
