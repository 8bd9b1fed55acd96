"""1-bit Adam."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.optim._one_bit import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (Tang et al. 2021): Adam whose momentum is exchanged and stored as bits.

    For `freeze_step` steps gradients are averaged in float32 and the step is Adam's. Then second
    moments are frozen, and processes average their momenta as signs with error feedback.
    A step is p - lr * (m / (sqrt(v) + eps) + weight_decay * p).

    The optimizer averages gradients itself. Under DistributedDataParallel call attach(ddp) before
    the first backward pass; the first step refuses a model whose gradients would be averaged twice.
    Without a process group it is the same algorithm in one process.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: the number of warm-up steps. The paper has no default: take 15 to 25 % of all
            steps, and more than the warm-up of lr.
        bias_correction: whether moments are corrected for their start at zero; not in DeepSpeed.
        group: a process group; None: the default group, or only this process.
        error_dtype: dtype of the errors: torch.float32 or torch.bfloat16.
        others: maximize, foreach, fused, capturable, as in torch.optim; master_weights and
            stochastic_rounding, as in AdamW.

    An element without any gradient in the warm-up does not move after it. With a GradScaler, all
    processes skip a step together. `bytes_sent` counts the bytes this process has sent.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        bias_correction: bool = False,
        **others: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "freeze_step": freeze_step,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, **others)
