"""Blocks compiled one by one, also after tp_plan: training is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from comparing import whole_of
from processes import on
from stack import MODELS
from torchweld.distributed import CountCollectives, LayerSeeds, tp_plan
from transformer import Transformer, compute_loss, make_batch

SETTINGS = {name: replace(s, layers=2) for name, s in MODELS.items()}


def _loss(name: str, model: Any) -> torch.Tensor:
    tokens, targets = make_batch(SETTINGS[name], 2, 1)
    return compute_loss(model(tokens), targets)


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


# --- After tp_plan --------------------------------------------------------------------------------


def _logits(model: Any, tokens: torch.Tensor, has_places: bool) -> torch.Tensor:
    """Without places the embedding's result enters the first block, as with rotary positions."""
    if has_places:
        return model(tokens)  # type: ignore[no-any-return]
    x = model.token(tokens)
    for block in model.blocks.values():
        x = block(x)
    return model.head(model.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sequence", "has_places", "compiler"),
    [
        (False, False, "aot_eager"),
        (True, False, "inductor"),
        (True, True, "aot_eager"),
    ],
)
@on(2)
def test_a_planned_block_compiles(
    rank: int, sequence: bool, has_places: bool, compiler: str
) -> None:
    """Two steps: gradients of one process, and the collectives of blocks that are not compiled."""
    name = "GPT" if has_places else "BERT"
    tokens, targets = make_batch(SETTINGS[name], 2, 1)
    runs, models = [], []
    torch.compiler.reset()  # processes go from one test to the next
    for compiled in (None, False, True):
        torch.manual_seed(0)
        model: Any = Transformer(SETTINGS[name]).double()
        if compiled is not None:
            parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
        with torch.no_grad():
            model(tokens)  # makes the layout
        for key, block in model.blocks.items() if compiled else ():
            model.blocks[key] = torch.compile(block, fullgraph=True, backend=compiler)
        seeds = LayerSeeds(model.blocks.items())
        for step in range(2):
            seeds.begin(step)
            with CountCollectives() as counted:
                logits = _logits(model, tokens, has_places)
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten()
                ).backward()
        models.append([whole_of(p.grad) for p in model.parameters() if p.grad is not None])
        runs.append((dict(counted.calls), dict(counted.bytes)))
    assert runs[1] == runs[2]
    for parallel in models[1:]:
        assert len(parallel) == len(models[0])
        for found, wanted in zip(parallel, models[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
