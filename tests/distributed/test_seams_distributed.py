"""Seams inside pipelines that split the backward, and in tensor parallelism, on two processes."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchweld
from processes import processes
from seams import splits_backwards
from torchweld import functional

WIDTH, HIDDEN, ROWS, MICROBATCHES = 48, 64, 8, 4


def _stages() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    kinds = [torchweld.nn.MLP, torchweld.nn.GatedMLP, torchweld.nn.MLP, torchweld.nn.GatedMLP]
    return [kind(WIDTH, HIDDEN) for kind in kinds]


def _batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)


def _split_backward(rank: int, schedule: type) -> None:
    """Stages 0 and 3 on the first process, 1 and 2 on the second: a V."""
    at = (0, 3) if rank == 0 else (1, 2)
    modules = _stages()
    stages = [
        pipelining.PipelineStage(modules[i], i, 4, torch.device("cpu"), _batch()[:ROWS]) for i in at
    ]
    run = schedule(stages, MICROBATCHES, loss_fn=lambda y, target: (y - target).square().mean())
    if rank == 0:
        run.step(_batch(), target=_batch())
    else:
        run.step()
    whole = torch.nn.Sequential(*_stages())
    losses = [(whole(part) - part).square().mean() / MICROBATCHES for part in _batch().split(ROWS)]
    sum(losses).backward()
    for i in at:
        for found, wanted in zip(modules[i].parameters(), whole[i].parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)


def _zero_bubble(rank: int) -> None:
    _split_backward(rank, pipelining.ScheduleZBVZeroBubble)


def _dual_pipe(rank: int) -> None:
    _split_backward(rank, pipelining.ScheduleDualPipeV)


def _tensor_parallel(rank: int) -> None:
    """Columns of the first weight and rows of the second on each process."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    shapes = [(ROWS, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN)]
    placements = [Replicate(), Shard(0), Shard(0), Shard(1)]
    whole = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    parts = [
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(whole, placements, strict=True)
    ]
    for function, order in (
        (functional.mlp, lambda x, w1, b1, w2: (x, w1, b1, w2, None)),
        (functional.gated_mlp, lambda x, w1, _, w2: (x, w1, w1, w2)),
    ):
        results, gradients = [], []
        for tensors in (whole, parts):
            wanted = [t for t in tensors if function is functional.mlp or t.ndim > 1]
            results.append(function(*order(*tensors)))
            gradients.append(torch.autograd.grad(results[-1].square().mean(), wanted))
        torch.testing.assert_close(results[1].full_tensor(), results[0])
        for found, expected in zip(gradients[1], gradients[0], strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(_zero_bubble, marks=splits_backwards),
        pytest.param(_dual_pipe, marks=splits_backwards),
        _tensor_parallel,
    ],
)
def test_two_processes_equal_one(scenario: Callable[[int], None]) -> None:
    with processes(2) as two:
        two.run("cpu", scenario)
