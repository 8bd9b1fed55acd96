"""Adam and AdamW."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer.adam import ADAM, AdamSettings
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import CAUTIOUS, FusedOptimizer, Group, collect_arguments
from torchweld.optim._codecs import SIGNED, UNSIGNED, Moments


class _AdamStep(FusedOptimizer):
    _is_cautious_rule = True
    _varying = frozenset({"betas", "eps", "weight_decay"})

    def _rule(self) -> Rule:
        return ADAM

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        moments = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}
        return moments | {"max_exp_avg_sq": UNSIGNED} if group["amsgrad"] else moments

    def _settings(self, group: Group, batch: Batch) -> AdamSettings:
        beta1, beta2 = map(float, group["betas"])
        eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
        flags = map(group.get, CAUTIOUS, (False, False))
        decoupled = group["decoupled_weight_decay"]
        return AdamSettings(beta1, beta2, eps, weight_decay, decoupled, *flags)

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

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**collect_arguments(locals()))


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW, in one pass over memory, with states of 32 to 8 bits.

    Takes Adam's arguments; weight_decay defaults to 0.01.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**collect_arguments(locals()))
