"""fuse() before and after torch.distributed's wrappers leaves results as they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torchweld
from comparing import assert_grads, whole_of
from fusable import WIDTH, FeedForward, Gated, NewGELU, PlainRMSNorm
from processes import on
from torchweld.fusion import Weld

LAYERS = 1
PLAN = {"1.fc1": ColwiseParallel, "1.fc2": RowwiseParallel} | {
    "3.gate": ColwiseParallel,
    "3.up": ColwiseParallel,
    "3.down": RowwiseParallel,
}
_GATHERS: dict[str, Any] = {"output_layouts": Replicate()}


def _layer() -> nn.Module:
    parts = (nn.LayerNorm(WIDTH), FeedForward(NewGELU()).eval(), PlainRMSNorm(), Gated(nn.SiLU()))
    return nn.Sequential(*parts)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[_layer() for _ in range(LAYERS)])


def _sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _sharded_finely(model: Any) -> nn.Module:
    for layer in model:
        for part in layer:
            fully_shard(part)
    return fully_shard(model)


def _tensor_parallel(model: Any) -> nn.Module:
    return _parallel(model, {name: style() for name, style in PLAN.items()})


def _rows_before_the_activation(model: Any) -> nn.Module:
    """Each process has a part of the sums that the activation takes."""
    rows = RowwiseParallel(input_layouts=Replicate())
    return _parallel(model, {"1.fc1": rows, "1.fc2": ColwiseParallel(**_GATHERS)})


def _gathered(model: Any) -> nn.Module:
    return _parallel(model, {"1.fc1": ColwiseParallel(**_GATHERS)})


def _parallel(model: Any, plan: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        parallelize_module(layer, mesh, plan)
    return model


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _welds(model: nn.Module) -> set[str]:
    found = model.named_modules()
    return {name.removeprefix("module.") for name, m in found if isinstance(m, Weld)}


@pytest.mark.parametrize(
    ("distribute", "fuse_first"),
    [
        *itertools.product((_sharded, _replicated, _tensor_parallel), (False, True)),
        (_sharded_finely, False),
        (_rows_before_the_activation, False),
        (_gathered, True),
    ],
)
@on(2)
def test_results_are_as_they_were(rank: int, distribute: Any, fuse_first: bool) -> None:
    x = torch.randn(6, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    plain = _model()
    expected = plain(x)
    expected.square().mean().backward()
    model = distribute(torchweld.fuse(_model()) if fuse_first else _model())
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    torchweld.fuse(model)
    assert _welds(model) == _welds(torchweld.fuse(_model()))
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    y = model(x)
    torch.testing.assert_close(whole_of(y), expected, rtol=1e-4, atol=1e-5)
    y.square().mean().backward()
    assert_grads(model, plain, rtol=1e-4, atol=1e-6)
    before = sum(isinstance(module, FSDPModule) for module in model.modules())
    torchweld.unfuse(model)
    assert not _welds(model)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == before
    torch.testing.assert_close(whole_of(model(x)), expected, rtol=1e-4, atol=1e-5)
