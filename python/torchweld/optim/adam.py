"""Adam and AdamW."""

from __future__ import annotations

import torch

from torchweld.ops.optimizer.adam import ADAM, AdamSettings
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import FusedOptimizer, Group
from torchweld.optim._codecs import SIGNED, UNSIGNED, Moments


class _AdamStep(FusedOptimizer):
    def _rule(self) -> Rule:
        return ADAM

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        moments = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}
        return moments | {"max_exp_avg_sq": UNSIGNED} if group["amsgrad"] else moments

    def _settings(self, group: Group, batch: Batch) -> AdamSettings:
        beta1, beta2 = map(float, group["betas"])
        eps, weight_decay = float(group["eps"]), float(group["weight_decay"])
        return AdamSettings(beta1, beta2, eps, weight_decay, group["decoupled_weight_decay"])


class Adam(_AdamStep, torch.optim.Adam):
    """torch.optim.Adam, in one pass over memory, with states of 32 to 8 bits.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable: as in torch.optim.Adam;
            foreach and fused are accepted and have no effect, differentiable must be False.
        state_dtype: dtype of the moments: torch.float32, torch.bfloat16 or "8bit"; per group.
        master_weights: for 16-bit parameters. False: no masters. True: float32 masters, from which
            parameters are rounded. "remainder": for bfloat16 parameters, the 16 bits that complete
            them to float32, with the same trajectory as masters.
        stochastic_rounding: for bfloat16 parameters without masters: steps too small to change the
            nearest number still count on average. Nothing is drawn from torch's generators: the
            rounding depends only on the numbers of step, parameter and element, on every rank.
        min_quantized_size: smaller tensors, and vectors, keep float32 moments.
        max_grad_norm: gradients are used as if clipped by torch.nn.utils.clip_grad_norm_;
            `grad_norm` is their norm before clipping, as a tensor.

    A gradient that is not finite has the same effect as in torch, except with 8-bit moments: then
    the element is skipped and its moments are reset.
    """


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW, in one pass over memory, with states of 32 to 8 bits.

    Takes Adam's arguments; weight_decay defaults to 0.01.
    """
