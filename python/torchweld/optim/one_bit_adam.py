"""1-bit Adam."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.optim._one_bit import OneBitOptimizer
from torchweld.optim._options import OwnStorageOptions, takes


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
        bias_correction: whether moments are corrected for their start at zero; DeepSpeed has none.
        group: a process group; None: the default group, or only this process.
        error_dtype: dtype of the errors: torch.float32 or torch.bfloat16.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        master_weights, stochastic_rounding: as in AdamW. state_dtype must be torch.float32 and
            max_grad_norm None: the momentum is bits, and no process has the mean gradient.

    An element that never has a gradient in the warm-up does not change after it. With a GradScaler,
    all processes skip a step together. `bytes_sent` counts the bytes this process has sent.
    """

    @takes(OwnStorageOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        bias_correction: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
        error_dtype: torch.dtype = torch.float32,
        **options: Unpack[OwnStorageOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""
