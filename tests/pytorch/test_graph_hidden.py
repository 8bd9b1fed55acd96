"""Operations that once hid a whole graph from fuse(), or ended its capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from torchweld import numerics
from words import list_ops

pytestmark = pytest.mark.usefixtures("own_graphs")

WIDTH = 16


class Part(nn.Module):
    """A norm of a linear layer's result, and what comes before it."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.before = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.before(x)))


def _mask_by_vmap(x: torch.Tensor) -> torch.Tensor:
    """As transformers 4.56 makes masks: Gemma 2 and 3 had no weld at all."""

    def may_see(row: Any, column: Any) -> Any:
        return (column <= row) & (column > row - 2)

    rows = torch.arange(x.shape[1])
    both = torch.vmap(torch.vmap(may_see, in_dims=(None, 0)), in_dims=(0, None))
    return both(rows, rows).to(x.dtype) @ x


def _mark(x: torch.Tensor) -> torch.Tensor:
    """As the caches of transformers' linear attention: Nemotron-H was captured in pieces."""
    state = torch.zeros_like(x)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(state)
    return x + state


def _split_by_numbers(x: torch.Tensor) -> torch.Tensor:
    """As GraniteMoe in transformers 4.56, which had no weld."""
    sizes = x[0, :, 0].argsort().tolist()
    parts = x.flatten(0, 1)[: sum(sizes)].split(sizes)
    return torch.cat(parts).sum(0) + x


@pytest.mark.parametrize("before", [_mask_by_vmap, _mark, _split_by_numbers])
def test_a_norm_is_welded(before: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    want = Part(before)
    got = torchweld.fuse(copy.deepcopy(want))
    for seed in (0, 1):
        x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
        results = []
        for part in (got, want):
            y = part(x)
            results.append([y.detach(), *torch.autograd.grad(y.pow(3).sum(), [*part.parameters()])])
        for a, b in zip(*results, strict=True):
            largest = b.abs().max()
            torch.testing.assert_close(a / largest, b / largest, **numerics.SUMMED)
    assert set(list_ops(got)) == {"layer_norm"}
    captured: Any = type(got)
    (slot,) = captured.weld_captures.slots.values()
    assert slot.reason == ""
