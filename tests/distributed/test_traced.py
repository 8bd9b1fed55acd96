"""Training graphs recorded by torch.export or the pipeline's tracer: eager's gradients, bitwise."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import SplitPoint, pipeline

import torchweld
from stack import MODELS
from transformer import Transformer, compute_loss, make_batch

Forward = Callable[[torch.Tensor], torch.Tensor]
Recorded = tuple[Forward, Iterable[torch.nn.Module]]


def _exported(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    module = torch.export.export(model, (tokens,)).module()
    return module, [module]


def _loaded(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens,)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    return module, [module]


def _compiled(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    module = torch.export.export(model, (tokens,)).module()
    return torch.compile(module, backend="aot_eager"), [module]


def _staged(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    pipe = pipeline(model, (tokens,), split_spec={"blocks.1": SplitPoint.BEGINNING})
    stages = [pipe.get_stage_module(number) for number in range(2)]
    return lambda tokens: stages[1](stages[0](tokens)), stages


def _step(forward: Forward, modules: Iterable[torch.nn.Module], batch: Any) -> dict[str, Any]:
    """The loss, and the gradients of a step."""
    tokens, targets = batch
    torch.manual_seed(1)  # both drop the same
    loss = compute_loss(forward(tokens), targets)
    loss.backward()
    named = [pair for module in modules for pair in module.named_parameters()]
    found = {"loss": loss.detach()} | {name: p.grad for name, p in named}
    for _, parameter in named:
        parameter.grad = None
    return found


# torch's own: of pytrees, and torch 2.11's of the buffers that it loads.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("how", [_exported, _loaded, _compiled, _staged])
@pytest.mark.parametrize("name", MODELS)
def test_a_step(name: str, how: Callable[..., Recorded]) -> None:
    torch.manual_seed(0)
    settings = replace(MODELS[name], layers=2)
    model, batch = Transformer(settings), make_batch(settings, 2, 0)
    with torchweld.use_backend("cpu"):
        found = _step(*how(model, batch[0]), batch)
        expected = _step(model, [model], batch)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] is not None, f"{key} has no gradient"
        assert torch.equal(found[key], value), key
