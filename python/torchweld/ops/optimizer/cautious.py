"""Cautious steps (Liang et al. 2024) and cautious weight decay (Chen et al. 2025).

A cautious step moves only elements whose step and gradient have the same sign. The moves are
divided by the share of these elements in the whole tensor, or by 1/1000 if it is less. Cautious
weight decay leaves out elements that the step moves away from zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchweld.ops.optimizer.batch import Batch

_LEAST = 1e-3


def agree(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two numbers have the same sign; a product could underflow."""
    return ((a > 0) & (b > 0)) | ((a < 0) & (b < 0))


def oppose(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two numbers have opposite signs."""
    return ((a > 0) & (b < 0)) | ((a < 0) & (b > 0))


def cautious_ratios(batch: Batch) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function that computes the factors of a batch's steps from the roots of counts."""
    sizes = [p.numel() * (2 if p.is_complex() else 1) for p in batch.wholes]

    def ratios_of(_: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        of_all = torch.tensor(sizes, dtype=torch.float64, device=root.device).clamp(min=1)
        # Counts are exact in float64, but the squares of their roots are not.
        return of_all / torch.maximum((root * root).round(), of_all * _LEAST)

    return ratios_of
