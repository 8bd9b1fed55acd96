"""Pipelines whose stages share a parameter, end in a view, or get a batch of a wrong size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torchweld
from processes import on
from seams import splits_backwards
from stack_seams import keep
from torchweld.distributed import grad_norm
from torchweld.distributed.pipelines import stages
from torchweld.errors import ArgumentError, CollectiveError

WIDTH, WORDS, MICROBATCHES, ROWS, LENGTH = 8, 12, 4, 2, 6
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
_TIED = ("0.weight", "5.weight")
SCHEDULES = [
    pytest.param(s, marks=splits_backwards) if s in _SPLIT else s for s in get_args(stages.Name)
]


def _blocks() -> list[nn.Module]:
    """An embedding whose weight is the head's, and blocks that end in views."""
    torch.manual_seed(0)
    blocks: list[Any] = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)]
    blocks += [
        torchweld.nn.MLP(WIDTH, 16),
        nn.Linear(WIDTH, WIDTH),
        torchweld.nn.GatedMLP(WIDTH, 16),
    ]
    blocks += [nn.Linear(WIDTH, WORDS, bias=False)]
    blocks[-1].weight = blocks[0].weight
    return [block.double() for block in blocks]


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (ROWS * MICROBATCHES, LENGTH), generator=generator)


def _part(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A microbatch's part of the mean. torch's scale_grads would scale earlier batches again."""
    return _loss(y, target) / MICROBATCHES


@pytest.mark.parametrize("schedule", SCHEDULES)
@on(2)
def test_a_shared_parameter_and_views(rank: int, schedule: stages.Name) -> None:
    """Two batches are accumulated for each of two steps; the copies stay the same."""
    whole = nn.Sequential(*_blocks())
    pipe = stages.pipeline(
        _blocks(),
        schedule,
        MICROBATCHES,
        _part,
        (_tokens(0)[:ROWS],),
        costs=[1.0] * 6,
        scale_grads=False,
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (whole, pipe.parts)]
    for step in range(2):
        for seed in (2 * step, 2 * step + 1):
            tokens = _tokens(seed)
            _loss(whole(tokens), tokens).backward()
            inputs = (tokens,) if pipe.is_first else ()
            pipe.schedule.step(*inputs, target=tokens if pipe.is_last else None)
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        for part in pipe.parts:
            for name, p in part.named_parameters(remove_duplicate=False):
                torch.testing.assert_close(
                    p.grad, wanted[name].grad, msg=lambda m, n=name: f"{n}: {m}"
                )
            found = [*part.named_parameters(remove_duplicate=False)]
            bubble = "zero bubble" if schedule in _SPLIT else "the other schedules"
            for row, is_tied in (
                ("a tied embedding and head, PP of all schedules", True),
                (f"stages that end in linear layers, PP of {bubble}", False),
            ):
                of_row = [(p.grad, wanted[n].grad) for n, p in found if (n in _TIED) == is_tied]
                keep(row, of_row)
        norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        mine = grad_norm(pipe.parts.parameters(), torch.distributed.group.WORLD)
        torch.testing.assert_close(mine, norm.float())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for part in pipe.parts:
            for name, p in part.named_parameters(remove_duplicate=False):
                torch.testing.assert_close(p, wanted[name])


@splits_backwards
@on(2)
def test_gradients_are_added_in_the_same_order_on_all_devices(rank: int) -> None:
    """torch iterates over a set: its order differs between devices, whose sums may collide."""
    taken: list[list[int]] = []
    original = torch_stage.stage_backward_weight

    def record(weights: Iterator[nn.Parameter], groups: list[Any], *args: Any, **kw: Any) -> Any:
        listed = [*weights]
        numbers = {get_gradient_edge(p).node: i for i, p in enumerate(listed)}
        taken.extend([numbers[node] for node in group["params"]] for group in groups)
        return original(iter(listed), groups, *args, **kw)

    with mock.patch.object(torch_stage, "stage_backward_weight", record):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
        x = torch.randn(8, LENGTH, WIDTH)
        pipe = stages.pipeline(
            blocks, "zbvzerobubble", 8, nn.functional.mse_loss, (x[:1],), costs=[1.0] * 4
        )
        pipe.schedule.step(*((x,) if pipe.is_first else ()), target=x if pipe.is_last else None)
    assert len(taken) >= 16
    assert all(numbers in ([0, 1], [2, 3]) for numbers in taken), taken


@on(2)
def test_a_batch_that_does_not_divide(rank: int) -> None:
    """Every rank raises an error before anything is sent, and can go on."""
    pipe = stages.pipeline(
        _blocks(), "1f1b", MICROBATCHES, _loss, (_tokens(0)[:ROWS],), costs=[1.0] * 6
    )
    for rows in (7, 4):
        tokens = _tokens(0)[:rows]
        inputs = (tokens,) if pipe.is_first else ()
        with pytest.raises((ArgumentError, CollectiveError), match="microbatches"):
            pipe.schedule.step(*inputs, target=tokens if pipe.is_last else None)
    tokens = _tokens(0)
    pipe.schedule.step(
        *((tokens,) if pipe.is_first else ()), target=tokens if pipe.is_last else None
    )


@on(2)
def test_the_norm_of_partial_gradients(rank: int) -> None:
    """They are added before they are squared."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    values = torch.randn(2, 6, 4, dtype=torch.float64)
    kinds = (Replicate(), Shard(0), Partial(), Partial("avg"))
    parameters, square = [], torch.zeros((), dtype=torch.float64)
    for kind in kinds:
        p = nn.Parameter(
            distribute_tensor(torch.zeros(6, 4, dtype=torch.float64), mesh, [Replicate()])
        )
        grad = distribute_tensor(values[0], mesh, [kind if not kind.is_partial() else Replicate()])
        whole = values[0]
        if kind.is_partial():
            grad = type(grad).from_local(values[rank], mesh, [kind], run_check=False)
            whole = values.sum(0) if kind.reduce_op == "sum" else values.mean(0)
        p.grad = grad
        parameters.append(p)
        square += whole.square().sum()
    torch.testing.assert_close(grad_norm(parameters), square.sqrt().float())
