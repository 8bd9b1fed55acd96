"""Experts of a mixture with stacked weights: they are reported, not welded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from torchweld.fusion.modules import is_welded
from torchweld.fusion.proposals import Left
from torchweld.fusion.view import View


def find_experts(module: torch.nn.Module, view: View) -> Iterator[Left]:
    """A module with two or more matrices for each expert, in tensors of three dimensions.

    Experts that are modules of their own are found as gated MLPs.
    """
    own = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    counts = Counter(p.shape[0] for p in own)
    if is_welded(module) or not counts or isinstance(module, torch.nn.modules.conv._ConvNd):
        return
    experts, stacks = counts.most_common(1)[0]
    if stacks >= 2 and "expert" in type(module).__name__.lower():
        reason = f"its {experts} experts' weights are stacked, and no kernel takes grouped matrices"
        yield Left(module, type(module).__name__, reason)
