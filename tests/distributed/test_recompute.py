"""Checkpointed blocks: exact under dropout, and their policy saves GEMMs and attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
from oracle import saved_bytes
from stack import MODELS
from torchweld.distributed import LayerSeeds, recompute
from transformer import Transformer, batch_of, loss_of

SETTINGS = {name: replace(s, layers=2) for name, s in MODELS.items()}


def _model(name: str, how: str) -> Any:
    torch.manual_seed(0)
    model = Transformer(SETTINGS[name])
    if how != "none":
        for key, block in model.blocks.items():
            model.blocks[key] = recompute(block, how == "selective")
    return model


def _loss(name: str, model: Any) -> torch.Tensor:
    tokens, targets = batch_of(SETTINGS[name], 2, 1)
    return loss_of(model(tokens), targets)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("name", SETTINGS)
def test_exact_under_dropout(name: str, how: str) -> None:
    """Bit by bit, and torch's generator goes on from where it would."""
    left = []
    for kind in ("none", how):
        model = _model(name, kind)
        LayerSeeds(model.blocks.items()).begin(0)
        _loss(name, model).backward()
        left.append([p.grad for p in model.parameters()] + [torch.rand(3)])
    for found, wanted in zip(*left, strict=True):
        assert torch.equal(found, wanted)


class _Runs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_the_policy_saves_what_is_dear() -> None:
    """Attention runs once in each block, a norm twice."""
    runs = {}
    for how in ("none", "full", "selective"):
        model = _model("GPT", how)
        with torchweld.use_backend("cpu"), _Runs() as runs[how]:
            _loss("GPT", model).backward()
    attention, norm = "torchweld::block_sparse_attention", "torchweld::dropout_add_layer_norm"
    assert [runs[how].of[attention] for how in runs] == [2, 4, 2]
    assert [runs[how].of[norm] for how in runs] == [2, 4, 4]
    gemms = [runs[how].of["aten::addmm"] for how in runs]
    assert gemms[0] == gemms[2] < gemms[1]


def test_saves_less() -> None:
    sizes = [
        saved_bytes(lambda how=how: _loss("GPT", _model("GPT", how)))
        for how in ("none", "selective", "full")
    ]
    assert sizes[2] < sizes[0]


# Dynamo asks every tensor that it meets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["GPT", "sparse GPT"])
def test_a_block_compiles_in_one_graph(name: str) -> None:
    """Each block apart, as FSDP2 wants them; it drops what it drops without the compiler."""
    left = []
    for compiled in (False, True):
        model = _model(name, "none")
        with torch.no_grad():
            _loss(name, model)  # makes the layout, which is no part of a graph
        for key, block in model.blocks.items() if compiled else ():
            model.blocks[key] = torch.compile(block, fullgraph=True, backend="aot_eager")
        LayerSeeds(model.blocks.items()).begin(0)
        loss = _loss(name, model)
        loss.backward()
        left.append([loss, *(p.grad for p in model.parameters())])
    for found, wanted in zip(*left, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
