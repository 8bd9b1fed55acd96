"""Declarations that are not one, ZeRO-1 with groups, and what is counted of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import torchweld
from processes import on, processes
from torchweld.distributed import CountCollectives, Parallel, checkpoint, memory_estimate, zero3
from torchweld.errors import ArgumentError


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        ({"tensor": {"size": 2, "sequence": "no"}}, "sequence"),
        ({"tensor": {"size": 2, "sequence": 1}}, "sequence"),
        ({"tensor": {"mode": ["1d"]}}, "mode"),
        ({"tensor": True}, "tensor"),
        ({"pipeline": True}, "pipeline"),
        ({"ring": 1.5}, "ring"),
        ({"data": {}}, "data"),
        ({"data": None}, "data"),
        (None, "config"),
        ("no [parallel] table", "config"),
        (["ddp"], "config"),
    ],
)
def test_what_is_no_declaration(config: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Parallel.from_config(config, 4)
    assert raised.value.argument == argument


# --- ZeRO-1 with groups of their own settings -----------------------------------------------------


def _grouped(rank: int, folder: str) -> None:
    """A run that is saved and resumed equals one that goes on; and one process."""

    def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
        some, others = [[*model[i].parameters()] for i in (0, 1)]
        others += [*model[2].parameters()]
        return [{"params": some, "weight_decay": 0.3}, {"params": others, "lr": 3e-2}]

    def step(model: Any, optimizer: Any, seed: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def training() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        kind = torch.distributed.optim.ZeroRedundancyOptimizer
        return wrapped, kind(grouped(model), torchweld.optim.AdamW, lr=1e-2)

    one = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    model, optimizer = training()
    one.load_state_dict(model.module.state_dict())
    single = torchweld.optim.AdamW(grouped(one), lr=1e-2)
    for seed in range(3):
        step(model, optimizer, seed)
        step(one, single, seed)
    checkpoint.save(folder, model, optimizer, 3)
    model, optimizer = training()
    assert checkpoint.load(folder, model, optimizer) == 3
    for seed in range(3, 5):
        step(model, optimizer, seed)
        step(one, single, seed)
    for found, wanted in zip(model.module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_zero1_with_groups(tmp_path: Path) -> None:
    with processes(2) as two:
        two.run("cpu", _grouped, str(tmp_path / "checkpoint"))


# --- What is counted ------------------------------------------------------------------------------


def _waited(result: Any) -> Any:
    """What an asynchronous collective returns is annotated as a plain tensor."""
    return result.wait()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on(2)
def test_each_kind_is_counted(rank: int) -> None:
    x, pair = torch.ones(8), [torch.ones(4), torch.ones(4)]  # 32 bytes
    group, whole = dist.group.WORLD, torch.ones(16)
    root = rank == 0
    cases = [
        ("all-reduce", 64, lambda: dist.all_reduce_coalesced([x, x.clone()])),
        ("all-gather", 64, lambda: dist.all_gather([x.clone(), x.clone()], x)),
        ("all-gather", 64, lambda: _waited(functional.all_gather_tensor(x, 0, group))),
        ("reduce-scatter", 32, lambda: dist.reduce_scatter(pair[0].clone(), pair)),
        ("all-to-all", 32, lambda: dist.all_to_all_single(x.clone(), x)),
        ("all-to-all", 32, lambda: _waited(functional.all_to_all_single(x, None, None, group))),
        ("reduce", 32, lambda: dist.reduce(x.clone(), 0)),
        (
            "gather",
            64 if root else 32,
            lambda: dist.gather(x, [x.clone(), x.clone()] * root or None),
        ),
        (
            "scatter",
            64 if root else 32,
            lambda: dist.scatter(x.clone(), [*whole.chunk(2)] * root or None),
        ),
        ("broadcast", 32, lambda: dist.broadcast(x.clone(), 0)),
    ]
    for kind, size, collective in cases:
        with CountCollectives() as counted:
            collective()
        assert (dict(counted.calls), dict(counted.bytes)) == ({kind: 1}, {kind: size}), kind


# --- Gradients that FSDP2 only adds up ------------------------------------------------------------


@on(2)
def test_gradients_that_are_accumulated(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    zero3(model, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    whole = torch.nn.Linear(16, 16)
    optimizer = torchweld.optim.SGD(whole.parameters())
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.ones(2, 16)).sum().backward()
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    parameters = state._fsdp_param_group.fsdp_params
    held = sum(p.unsharded_param.grad.nbytes for p in parameters)
    one, more = (
        memory_estimate(whole, optimizer, "zero3", 2, accumulates=each).gradients
        for each in (False, True)
    )
    assert more - one == held > 0
