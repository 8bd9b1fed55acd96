"""Modules of ops with dropout; in eval() they drop nothing."""

from __future__ import annotations

import torch

from torchweld import functional


class SoftmaxDropout(torch.nn.Module):
    """Attention probabilities from scores: scale, mask, softmax and dropout in one pass.

    Args:
        p: probability of an element to be dropped while training.
        scale: multiplies the scores, 1 / sqrt(head size) in attention.
        causal: the last query sees every key, each one before it one key less.
    """

    def __init__(self, p: float = 0.0, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        self.p, self.scale, self.causal = p, scale, causal

    def forward(self, scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return functional.softmax_dropout(
            scores,
            mask,
            scale=self.scale,
            causal=self.causal,
            p=self.p,
            training=self.training,
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, scale={self.scale}, causal={self.causal}"
