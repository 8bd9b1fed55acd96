"""Plain linear layers and attention in 16 bits by float32 GEMMs, under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchweld
from processes import on
from torchweld.ops.gemm import product
from torchweld.registry import processor

WIDTH = 64


def _make() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, 8))


def _draw(rank: int) -> torch.Tensor:
    return torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(rank))


def _step(model: nn.Module, *inputs: torch.Tensor, casts: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = sum(model(x).float().square().sum() for x in inputs) / len(inputs)
    loss.backward()


def _find_error(model: nn.Module, exact: nn.Module) -> float:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    found = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]
    pairs = list(zip(found, (p.grad for p in exact.parameters()), strict=True))
    return float(torch.cat([(a - b).flatten() for a, b in pairs if b is not None]).norm())


def _distribute(model: nn.Module) -> tuple[nn.Module, bool]:
    return DistributedDataParallel(model), True


def _shard(model: nn.Module) -> tuple[nn.Module, bool]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.children(), model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    return model, False


@pytest.mark.parametrize("spread", [_distribute, _shard], ids=["DDP", "FSDP2"])
@on(2)
def test_data_parallel(rank: int, spread: Callable[[nn.Module], tuple[nn.Module, bool]]) -> None:
    """Gradients are as exact as torch's, none of whose products in 16 bits is left."""
    with (
        mock.patch.object(processor, "_find", return_value=False),
        mock.patch.object(product, "_SMALLEST", 0),
    ):
        exact = _make()
        _step(exact, _draw(0), _draw(1), casts=False)
        fused = torchweld.fuse(_make())
        errors = []
        for model in (fused, _make()):
            spreads, casts = spread(model)
            _step(spreads, _draw(rank), casts=casts)  # captures, on fake tensors
            spreads.zero_grad()
            with torch.profiler.profile() as profile:
                _step(spreads, _draw(rank), casts=casts)
            names = {event.name for event in profile.events()}
            is_ours = model is fused
            assert ("torchweld::product" in names) == is_ours
            assert bool(names & {"aten::mm", "aten::addmm", "aten::bmm"}) != is_ours
            errors.append(_find_error(spreads, exact))
    assert 0 < errors[0] <= 1.1 * errors[1]
