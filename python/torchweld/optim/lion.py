"""Lion."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from torchweld.names import StateName
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.lion import LION, LionSettings
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import CAUTIOUS, Group, OwnOptimizer, split_defaults
from torchweld.optim._codecs import SIGNED, Moments


class Lion(OwnOptimizer):
    """Lion (Chen et al. 2023): steps of lr in the direction of a momentum's sign.

    Args:
        params: parameters, or groups of them, as in torch.optim.
        lr: the size of a step; a tenth of AdamW's is usual.
        betas: decay rates of the momentum that a step follows, and of the one that is stored.
        weight_decay: decoupled, as in AdamW; ten times AdamW's is usual.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        state_dtype, master_weights, min_quantized_size, stochastic_rounding, max_grad_norm: as in
            Adam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
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
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**split_defaults(locals(), "lr", "betas", "weight_decay"))

    _is_cautious_rule = True
    _varying = frozenset({"betas", "weight_decay"})

    def _rule(self) -> Rule:
        return LION

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return {"exp_avg": SIGNED}

    def _settings(self, group: Group, batch: Batch) -> LionSettings:
        beta1, beta2 = map(float, group["betas"])
        flags = (group.get(name, False) for name in CAUTIOUS)
        return LionSettings(beta1, beta2, float(group["weight_decay"]), *flags)
