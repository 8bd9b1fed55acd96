"""fuse() with DDP, FSDP2 and tensor plans in two processes, next to the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchweld
from processes import on
from words import compare, list_ops, make_ids, make_words, step


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


_WAYS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _shard,
    "tensors": _split,
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
        ids = make_ids(rows + 2 * (rank if way != "tensors" else 0))
        compare(step(wrapped, ids), step(want, ids))
    assert list_ops(model), "nothing is welded"
