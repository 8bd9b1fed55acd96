"""CrossEntropyLoss, and LinearCrossEntropy with the layer before it."""

from __future__ import annotations

from typing import Any, cast

import torch

from torchweld import checks, functional
from torchweld.names import Reduction


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss, computed by torchweld.functional.cross_entropy.

    Its options beyond torch's, such as z_loss, are arguments of the function.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=cast(Reduction, self.reduction),
            label_smoothing=self.label_smoothing,
        )


class LinearCrossEntropy(torch.nn.Linear):
    """torch.nn.Linear(in_features, num_classes) and the cross entropy of its logits.

    Its parameters have the layer's names, `weight` and `bias`, so that it can replace a language
    model's head. Arguments after `bias` are passed to torchweld.functional.linear_cross_entropy.
    """

    class_weight: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: torch.Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        memory: int | None = None,
    ) -> None:
        for argument, size in (("in_features", in_features), ("num_classes", num_classes)):
            checks.count("LinearCrossEntropy", argument, size)
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.register_buffer("class_weight", weight, persistent=False)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.memory = memory

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        return functional.linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            memory=self.memory,
        )
