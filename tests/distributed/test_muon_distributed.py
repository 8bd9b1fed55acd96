"""Muon on sharded matrices, with real processes: the bits of one device, and the bytes."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from processes import on, processes
from sharded_optimizers import go_on, whole_of
from torchweld import optim

# Uneven and empty shards, single rows and columns, a stack, packed rows, and packed columns.
SHAPES = ((65, 30), (64, 64), (1, 50), (41, 1), (4, 20, 30), (96, 24), (24, 96))


def _draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _run(
    place: Callable[[torch.Tensor], torch.Tensor], steps: range, saved: Any = None, **settings: Any
) -> tuple[list[torch.Tensor], Any]:
    params: list[torch.Tensor] = [
        torch.nn.Parameter(place(v)) for v in (saved[0] if saved else _draw(0))
    ]
    groups = [
        {"params": params[:5]},
        {"params": params[5:6], "heads": (2, 1, 1), "split_sizes": (48, 24, 24)},
        {"params": params[6:], "heads": 4, "split_dim": 1},
    ]
    optimizer = optim.Muon(groups, lr=0.02, min_quantized_size=0, **settings)
    if saved:
        optimizer.load_state_dict(saved[1])
    for seed in steps:
        for p, g in zip(params, _draw(seed), strict=True):
            p.grad = place(g)
        optimizer.step()
    return params, optimizer


def _assert_same(found: Any, expected: Any) -> None:
    for p, e in zip(found[0], expected[0], strict=True):
        assert torch.equal(whole_of(p.detach()), e)
        for name, value in expected[1].state[e].items():
            if name == "step":  # as in torch, no checkpoint has it
                continue
            assert torch.equal(whole_of(found[1].state[p][name]), value), name


@pytest.mark.parametrize("count", [2, 4])
@on("count")
def test_every_placement_has_the_bits_of_one_device(rank: int, count: int) -> None:

    flat = init_device_mesh("cpu", (count,))
    cases: list[tuple[Any, list[Any]]] = [(flat, [Shard(0)]), (flat, [Shard(1)])]
    if count == 4:
        grid = init_device_mesh("cpu", (2, 2))
        cases += [
            (grid, [Shard(0), Shard(1)]),
            (grid, [_StridedShard(0, split_factor=2), Shard(0)]),
            (grid, [Replicate(), Shard(1)]),
        ]
    for settings in ({}, {"state_dtype": "8bit", "algorithm": "gram", "ns_dtype": torch.float32}):
        expected = _run(lambda t: t, range(1, 3), **settings)
        for mesh, placements in cases:
            place = functools.partial(
                distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None
            )
            found = _run(place, range(1, 3), **settings)
            _assert_same(found, expected)
            sent = torch.tensor(float(found[1]._owners.sent))
            torch.distributed.all_reduce(sent)
            replicas = 2 if isinstance(placements[0], Replicate) else 1
            each = count // replicas
            matrices = 4 * sum(p.numel() for p in expected[0])
            assert 0 < sent <= 2 * 2 * replicas * matrices * (each - 1) / each
    # A stack along its experts does not travel.
    stacked = _run(
        lambda t: distribute_tensor(
            t, flat, [Shard(0) if t.ndim == 3 else Replicate()], src_data_rank=None
        ),
        range(1, 3),
    )
    _assert_same(stacked, _run(lambda t: t, range(1, 3)))
    assert stacked[1]._owners.sent == 0


def _save(rank: int, folder: str, count: int) -> None:
    start = functools.partial(_run, state_dtype="8bit")
    go_on(f"{folder}/muon", count, start, _draw, _assert_same)


def test_a_checkpoint_goes_from_four_processes_to_one_and_to_two() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for count in (4, 1, 2):
            with processes(count) as connected:
                connected.run("cpu", _save, folder, count)


class _Odd(torch.nn.Module):
    """Uneven and empty shards, a single row and a single column, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(30, 65), torch.nn.Linear(65, 3), torch.nn.Linear(3, 41)]
        )
        self.row = torch.nn.Parameter(torch.randn(1, 41))
        self.column = torch.nn.Parameter(torch.randn(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.row).sum(-1, keepdim=True) * self.column.mT


@pytest.mark.parametrize("count", [2, 4, 8])
@on("count")
def test_fsdp2_has_the_bits_of_one_device(rank: int, count: int) -> None:
    """Every rank has the same data, so that the mean gradient equals one device's.

    Beyond four ranks sums of equal numbers round, and one device's gradients are used.
    """
    results, grads = [], []
    for shards in (False, True):
        torch.manual_seed(0)
        model = _Odd()
        if shards:
            mesh = init_device_mesh("cpu", (count,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = optim.Muon(
            optim.muon_groups(model, verbose=False), lr=0.02, state_dtype="8bit", cautious=True
        )
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(5, 30)).square().sum().backward()
            for p in model.parameters():
                if not shards:
                    grads.append(p.grad)
                elif count > 4:
                    mesh, placements = p.device_mesh, p.placements
                    p.grad = distribute_tensor(grads.pop(0), mesh, placements, src_data_rank=None)
            optimizer.step()
            optimizer.zero_grad()
        results.append([whole_of(p.detach()) for p in model.parameters()])
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)
