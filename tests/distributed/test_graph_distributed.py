"""fuse() with DDP, FSDP2 and tensor plans in two processes, next to the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchweld
from comparing import whole_of
from processes import on
from torchweld import numerics
from torchweld.distributed.tensor.head import HeadParallel
from torchweld.distributed.tensor.styles import ActivationParallel
from words import WIDTH, compare, list_ops, make_ids, make_words, step


def _shard(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _split(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def _split_norms(model: Any) -> Any:
    """Also the norms, which run on DTensors, and the head."""
    mesh, norms = init_device_mesh("cpu", (2,)), {"norm": ActivationParallel(Replicate())}
    for layer in model.layers:
        parallelize_module(layer, mesh, norms)
    return parallelize_module(_split(model), mesh, {**norms, "head": HeadParallel()})


_WAYS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _shard,
    "tensors": _split,
    "tensors, norms": _split_norms,
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("way", _WAYS)
@on(2)
def test_processes(rank: int, way: str, is_late: bool) -> None:
    """Fused before or after the model is wrapped."""
    torch.compiler.reset()
    plain = make_words()
    model = copy.deepcopy(plain)
    prepare = _WAYS[way]
    if is_late:
        wrapped = prepare(model)
        torchweld.fuse(model)
    else:
        wrapped = prepare(torchweld.fuse(model))
    want = prepare(plain)
    for rows in (2, 2, 3):
        ids = make_ids(rows + 2 * (0 if way.startswith("tensors") else rank))
        compare(step(wrapped, ids), step(want, ids))
    wanted = {"rms_norm", "linear_cross_entropy"} if "norms" in way else set()
    assert {"gated_act", *wanted} <= {*list_ops(model)}


class _Columns(torch.nn.Module):
    """A norm of DTensors, whose result goes on as this device's part."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.mesh, self.place = init_device_mesh("cpu", (2,)), place
        weight = 1 + torch.arange(WIDTH) / WIDTH
        self.weight = torch.nn.Parameter(distribute_tensor(weight, self.mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()])
        y: Any = whole.redistribute(placements=[self.place])
        y = self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
        return y.to_local().square().sum(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
@on(2)
def test_parts_of_a_norm(rank: int, dim: int | None) -> None:
    """Where our op would leave a device with another part than torch's ops do, torch's stay."""
    torch.compiler.reset()
    want = _Columns(Replicate() if dim is None else Shard(dim))
    got = torchweld.fuse(copy.deepcopy(want))
    x = torch.randn(2, 6, WIDTH)
    results = []
    for model in (got, want):
        given = x.clone().requires_grad_()
        y = model(given)
        y.sum().backward()
        results.append([y.detach(), given.grad, whole_of(model.weight.grad)])
    torch.testing.assert_close(*results, **numerics.CHAINED)
    assert ("rms_norm" in list_ops(got)) == (dim != 2)
