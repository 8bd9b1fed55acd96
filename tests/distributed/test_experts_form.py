"""Experts of transformers under a plan take their own arguments, and refuse others by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refusing import refuses
from torchweld import numerics
from torchweld.distributed.tensor.experts import _run_form
from torchweld.fusion.experts import run_experts
from torchweld.ops.experts.grouped import Form


class Experts(nn.Module):
    """Stacked experts whose own forward takes more by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8) / 4)
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6) / 4)

    def forward(self, x: Any, indices: Any, weights: Any, **more: Any) -> Any: ...


def test_names_and_unknown_names() -> None:
    """A keyword that the form does not know was dropped."""
    module, form = Experts(), Form("silu", "none", True, False, False, False, None, 0.0)
    given = {
        "x": torch.randn(5, 8),
        "indices": torch.tensor([[0, 3]] * 5),
        "weights": torch.rand(5, 2),
    }
    expected = run_experts(module, form, *given.values())
    torch.testing.assert_close(_run_form(module, form, **given), expected, **numerics.SAME)
    refuses("capacity is given", _run_form, module, form, **given, capacity=3)
