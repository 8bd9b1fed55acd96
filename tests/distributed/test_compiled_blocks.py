"""Blocks compiled one by one: training is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stack import MODELS
from torchweld.distributed import LayerSeeds
from transformer import Transformer, batch_of, loss_of

SETTINGS = {name: replace(s, layers=2) for name, s in MODELS.items()}


def _loss(name: str, model: Any) -> torch.Tensor:
    tokens, targets = batch_of(SETTINGS[name], 2, 1)
    return loss_of(model(tokens), targets)


# Dynamo reads .grad of every tensor it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["GPT", "sparse GPT"])
def test_a_block_compiles_in_one_graph(name: str) -> None:
    """Each block separately, as FSDP2 needs it; dropout is the same as without the compiler."""
    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = Transformer(SETTINGS[name])
        with torch.no_grad():
            _loss(name, model)  # makes the layout, which must not be traced
        for key, block in model.blocks.items() if compiled else ():
            model.blocks[key] = torch.compile(block, fullgraph=True, backend="aot_eager")
        LayerSeeds(model.blocks.items()).begin(0)
        loss = _loss(name, model)
        loss.backward()
        left.append([loss, *(p.grad for p in model.parameters())])
    for found, wanted in zip(*left, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
