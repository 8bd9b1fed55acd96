"""Lion."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.lion import LION, LionSettings
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer
from torchweld.optim._codecs import SIGNED, Moments


class Lion(OwnOptimizer):
    """Lion (Chen et al. 2023): steps of lr in the direction of a momentum's sign.

    Args:
        params: parameters, or groups of them, as in torch.optim.
        lr: the size of a step; a tenth of AdamW's is usual.
        betas: decay rates of the momentum that a step follows, and of the one that is stored.
        weight_decay: decoupled, as in AdamW; ten times AdamW's is usual.
        others: maximize, foreach, fused, capturable, as in torch.optim; state_dtype,
            master_weights, stochastic_rounding, min_quantized_size, max_grad_norm, as in Adam.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **others)

    def _rule(self) -> Rule:
        return LION

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return {"exp_avg": SIGNED}

    def _settings(self, group: Group, batch: Batch) -> LionSettings:
        beta1, beta2 = group["betas"]
        return LionSettings(float(beta1), float(beta2), float(group["weight_decay"]))
