"""Statistics over the rows of two processes: forward, gradients and buffers equal one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import group

import torchweld
from processes import on
from torchweld.nn import LinearBatchNormAct

WIDTH, FEATURES, BATCHES = 24, 17, 3


def _layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [LinearBatchNormAct(WIDTH, FEATURES), LinearBatchNormAct(FEATURES, FEATURES)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.norm.parameters():
                parameter.normal_()
    return torch.nn.Sequential(*layers).double()


def _shared(among: Any) -> torch.nn.Sequential:
    model: Any = _layers()
    for layer in model:
        layer.process_group = among
    return model  # type: ignore[no-any-return]


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(20, WIDTH, generator=generator).double() + i for i in range(BATCHES)]


def _plain(layers: torch.nn.Sequential) -> torch.nn.Sequential:
    """The same with torch's modules."""
    modules: list[Any] = [[layer.linear, layer.norm, torch.nn.GELU()] for layer in layers]
    return torch.nn.Sequential(*[m for three in modules for m in three])


def _assert_equal(mine: torch.nn.Module, rows: slice, wrapped: Any = None) -> None:
    """Train the model, wrapped or not; its gradients and buffers equal one process's."""
    for x in _batches():
        mine.zero_grad()
        y = (wrapped or mine)(x[rows])
        y.square().sum().backward()
    plain = _plain(_layers())
    for x in _batches():
        plain.zero_grad()
        expected = plain(x)
        expected.square().sum().backward()
    torch.testing.assert_close(y, expected[rows])
    for found, wanted in zip(mine.parameters(), plain.parameters(), strict=True):
        gradient = found.grad.clone()
        torch.distributed.all_reduce(gradient)
        torch.testing.assert_close(gradient, wanted.grad)
    torch.testing.assert_close([*mine.buffers()], [*plain.buffers()])


def _rows(rank: int) -> slice:
    """13 rows here, 7 there."""
    return slice(0, 13) if rank == 0 else slice(13, 20)


def _uneven_batches(rank: int) -> None:
    model = _shared(group.WORLD)
    _assert_equal(model, _rows(rank))
    # In evaluation no process waits for another.
    if rank == 0:
        model.eval()(_batches()[0])


def _all_rows_on_one(rank: int) -> None:
    """The other process has no rows, and its gradients are zero."""
    _assert_equal(_shared(group.WORLD), slice(0, 20) if rank == 0 else slice(0, 0))


def _one_row(rank: int) -> None:
    """Enough together with others' rows; not by itself."""
    x = _batches()[0][rank : rank + 1]
    model = _shared(group.WORLD)
    expected = _plain(_layers())(_batches()[0][:2])
    torch.testing.assert_close(model(x), expected[rank : rank + 1])
    alone = [torch.distributed.new_group([i]) for i in range(2)][rank]
    model[0].process_group = alone
    with pytest.raises(torchweld.ArgumentError, match="more than 1 value"):
        model(x)


def _ddp(rank: int) -> None:
    """Its gradients are the processes' mean."""
    model = _shared(group.WORLD)
    # The averaged value is the same everywhere: twice that is the sum.
    _assert_equal(model, _rows(rank), torch.nn.parallel.DistributedDataParallel(model))


def _converted(rank: int) -> None:
    """torch's own conversion is honoured."""
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(_layers())
    assert type(model[0].norm) is torch.nn.SyncBatchNorm
    _assert_equal(model, _rows(rank))


def _compiled(rank: int) -> None:
    """In one graph, with the exchanges."""
    model = _shared(group.WORLD)
    compiled = torch.compile(copy.copy(model), fullgraph=True, backend="aot_eager")
    _assert_equal(model, _rows(rank), compiled)


def _second_derivatives(rank: int) -> None:
    """Through the exchanges too."""
    gradients = []
    for rows, shared in ((_rows(rank), group.WORLD), (slice(0, 20), None)):
        model = _shared(shared)
        x = _batches()[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x[rows]).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        gradients.append(second[_rows(rank)])
    torch.testing.assert_close(*gradients)


SCENARIOS = (
    *(_uneven_batches, _all_rows_on_one, _one_row, _ddp, _converted),
    *(_compiled, _second_derivatives),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@on(2)
def test_two_processes_equal_one(rank: int, scenario: Callable[[int], None], backend: str) -> None:
    """On the CPU kernels and in eager torch."""
    scenario(rank)
