"""A ring and a parameter server from sends: equal to all_reduce, and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from by_hand import ring_all_gather, ring_all_reduce, ring_reduce_scatter, server_step
from processes import on
from torchweld import optim
from torchweld.distributed import CountCollectives
from torchweld.errors import ArgumentError

COUNT = 4


@on(COUNT)
def test_rings(rank: int) -> None:
    """Whole numbers, whose sums have no rounding."""
    for shape in ((8, 16), (5, 3), (1,), (0, 4)):
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * (rank + 1)
        wanted = x.clone()
        dist.all_reduce(wanted)
        with CountCollectives() as counted:
            found = ring_all_reduce(x)
        assert torch.equal(found, wanted)
        each = 4 * -(-x.numel() // COUNT)
        assert counted.calls == {"send": 2 * (COUNT - 1)}
        assert counted.bytes == {"send": 2 * (COUNT - 1) * each}
    x = torch.full((8,), float(rank))
    with CountCollectives() as first:
        part = ring_reduce_scatter(x)
    with CountCollectives() as second:
        ring_all_gather(part)
    assert first.bytes == second.bytes == {"send": (COUNT - 1) * x.nbytes // COUNT}


@on(COUNT)
def test_a_server(rank: int) -> None:
    torch.manual_seed(0)
    layer, other = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    other.load_state_dict(layer.state_dict())
    optimizer = optim.AdamW(layer.parameters()) if rank == 0 else None
    alone = optim.AdamW(other.parameters())
    size = 4 * sum(p.numel() for p in layer.parameters())
    for step in range(3):
        x = torch.full((2, 8), float(rank + step))
        for module in (layer, other):
            module.zero_grad()
            module(x).sum().backward()
        with CountCollectives() as counted:
            server_step([*layer.parameters()], optimizer)
        for p in other.parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad /= COUNT
        alone.step()
        for mine, wanted in zip(layer.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, wanted)
        # The server sends to all others. A ring's process would send 2 (n - 1) / n of the size.
        assert counted.bytes == {"send": (COUNT - 1) * size if rank == 0 else size}
    wrong = None if rank == 0 else alone
    with pytest.raises(ArgumentError, match=r"optimizer is .*; accepted: one in process 0"):
        server_step([*layer.parameters()], wrong)


# --- What is counted of torch's own ---------------------------------------------------------------


def _waited(result: Any) -> Any:
    """What an asynchronous collective returns is annotated as a plain tensor."""
    return result.wait()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on(2)
def test_each_kind_is_counted(rank: int) -> None:
    x, pair = torch.ones(8), [torch.ones(4), torch.ones(4)]  # 32 bytes
    group, whole = dist.group.WORLD, torch.ones(16)
    root = rank == 0
    of_root = 64 if root else 32
    cases = [
        ("all-reduce", 64, lambda: dist.all_reduce_coalesced([x, x.clone()])),
        ("all-gather", 64, lambda: dist.all_gather([x.clone(), x.clone()], x)),
        ("all-gather", 64, lambda: _waited(functional.all_gather_tensor(x, 0, group))),
        ("reduce-scatter", 32, lambda: dist.reduce_scatter(pair[0].clone(), pair)),
        ("all-to-all", 32, lambda: dist.all_to_all_single(x.clone(), x)),
        ("all-to-all", 32, lambda: _waited(functional.all_to_all_single(x, None, None, group))),
        ("reduce", 32, lambda: dist.reduce(x.clone(), 0)),
        ("gather", of_root, lambda: dist.gather(x, [x.clone(), x.clone()] * root or None)),
        ("scatter", of_root, lambda: dist.scatter(x.clone(), [*whole.chunk(2)] * root or None)),
        ("broadcast", 32, lambda: dist.broadcast(x.clone(), 0)),
    ]
    for kind, size, collective in cases:
        with CountCollectives() as counted:
            collective()
        assert (dict(counted.calls), dict(counted.bytes)) == ({kind: 1}, {kind: size}), kind
