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
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable: as torch.optim.Adam's;
            foreach and fused are accepted and choose nothing, differentiable has to be False.
        state_dtype: of the moments: torch.float32, torch.bfloat16 or "8bit", for each group.
        master_weights: for 16-bit parameters. False: they are all there is. True: float32 masters,
            which parameters are rounded from. "remainder": of bfloat16 parameters, the 16 bits that
            complete them to float32, with the same trajectory as masters.
        stochastic_rounding: of bfloat16 parameters without masters: steps that are too small for
            the nearest number to change count on average. Nothing is drawn from torch's generators:
            a step rounds by its number, the parameter's and the element's, on every rank alike.
        min_quantized_size: smaller tensors, and vectors, keep float32 moments.
        max_grad_norm: gradients are used as torch.nn.utils.clip_grad_norm_ would have clipped them;
            `grad_norm` is their norm before, as a tensor.

    A gradient that is not finite goes the way it does in torch, but for 8-bit moments: such an
    element is skipped and its moments start anew.
    """


class AdamW(_AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW, in one pass over memory, with states of 32 to 8 bits.

    Takes what Adam takes; weight_decay is 0.01 unless it is given.
    """
