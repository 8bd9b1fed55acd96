"""The CUDA kernels of optimizers, for parameters whose rows shards cut.

They run in the emulator, on CPU tensors, and on a GPU if there is one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torchweld
from optimizers import CODECS, Room, draw_grads, maker, rules_of, run, same
from torchweld import numerics, optim
from torchweld.ops.optimizer.batch import Task

# Parts of tensors with rows split across devices, and where pieces of blocks begin and end in them:
# single elements, any number, unaligned, whole blocks, and none.
CUT = [
    ((3, 40), (0, 10, 40)),
    ((70, 7), (0, 1, 2, 7)),
    ((4, 515), (0, 3, 259, 515)),
    ((1, 1), (0, 1)),
    ((0, 5), (0, 5)),
    ((4, 1024), (0, 256, 512, 768, 1024)),
    ((3, 0), (0,)),
    ((6, 4, 150), (0, 44, 300, 556, 600)),
    ((40, 8), (0, 3, 8)),
    ((5, 64), (0, 64)),
    # Shorter than a vector, a warp's or a thread's share, as long, and longer.
    *(((2, 3 * i), (0, i, 3 * i)) for i in (1, 3, 4, 5, 8, 9, 16, 30)),
]


def _cut(
    make: Any,
    dtype: torch.dtype,
    device: str,
    offset: int = 0,
    bad: float = 0.0,
    rows: Any = CUT,
) -> tuple[Any, Any, list[torch.Tensor]]:
    """An optimizer after a step, its batch as if rows were cut, and the underlying memory."""
    shapes = [shape for shape, _ in rows]
    params, optimizer = run(make, 1, dtype, shapes, device, backend="eager")
    draw_grads(params, 1)
    ((_, batch),) = optimizer._work()
    generator = torch.Generator().manual_seed(2)
    absmaxes = []
    for shape, edges in rows * (len(batch.moments) // len(params)):
        known = torch.rand(shape[0], len(edges) - 1, generator=generator) + 0.1
        absmaxes.append(known.to(device))
    room = Room(offset)

    def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [room.place(t) for t in tensors]

    for g in batch.grads if bad else ():
        g.view(-1)[::7] = bad
    batch.params, batch.grads = place(batch.params), place(batch.grads)
    batch.masters, batch.moments = place(batch.masters), place(batch.moments)
    batch.absmaxes = place(absmaxes)
    batch.new_absmaxes = place([torch.full_like(known, torch.nan) for known in absmaxes])
    batch.edges = [torch.tensor(edges, device=device) for _, edges in rows]
    return optimizer, batch, [*room.buffers, *batch.steps]


def _task(optimizer: Any, batch: Any, **numbers: Any) -> Task:
    settings = optimizer._settings(optimizer.param_groups[0], batch)
    if batch.companions and optimizer.ema_decay:
        numbers["average_rate"] = torch.tensor(0.1, device=batch.companions[0].device)
    return Task(batch, settings, torch.tensor(0.1), **numbers)


def _step_cut(made: tuple[Any, Any, list[torch.Tensor]]) -> list[torch.Tensor]:
    """The absmax of the local pieces, and a step if other devices have larger ones."""
    optimizer, batch, memory = made
    task = _task(optimizer, batch, grad_factor=torch.tensor(0.5))
    before = [t.clone() for t in memory]
    optimizer._rule.find_absmaxes(task)
    found = [absmax.clone() for absmax in batch.new_absmaxes]
    for absmax, new in zip(batch.new_absmaxes, found, strict=True):
        absmax.fill_(torch.nan)
        assert new.isfinite().all()
    torch.testing.assert_close(memory, before, **numerics.SAME, equal_nan=True)
    generator = torch.Generator().manual_seed(3)
    for absmax, new in zip(batch.new_absmaxes, found, strict=True):
        larger = 1 + torch.rand(new.shape, generator=generator).to(new.device).round() / 4
        absmax.copy_(new * larger)
    optimizer._rule.step(task)
    assert all(p.isfinite().all() for p in batch.params)
    return [*found, *memory]


def _step_both_ways(made: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The kernels' results, and the reference's from a copy."""
    copied = copy.deepcopy(made)
    found = _step_cut(made)
    with torchweld.use_backend("eager"):
        return found, _step_cut(copied)


@pytest.mark.parametrize(("dtype", "masters"), [(d, m) for d, s, m in CODECS if s == "8bit"])
def test_rows_that_shards_cut(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """The reference's bits for every rule; only the local part is written."""
    for kind, settings in rules_of(dtype, "8bit", masters):
        make = maker(kind, settings, "8bit", masters)
        if kind is optim.SGD and "momentum" not in settings:
            continue
        found, expected = _step_both_ways(_cut(make, dtype, cuda_device))
        assert same(found, expected), (kind, settings)


def test_more_cut_rows_than_a_launch_takes(cuda_device: str) -> None:
    rows = [((i, 3 * j), (0, j, 3 * j)) for i in range(1, 10) for j in range(1, 31)]
    made = _cut(maker(optim.LAMB, {}, "8bit"), torch.float32, cuda_device, rows=rows)
    squares = _squares(*made[:2])
    with torchweld.use_backend("eager"):
        torch.testing.assert_close(squares, _squares(*made[:2]), rtol=1e-13, atol=0)
    assert same(*_step_both_ways(made))


def _squares(optimizer: Any, batch: Any) -> torch.Tensor:
    task = _task(optimizer, batch, grad_factor=torch.tensor(0.5))
    optimizer._rule.measure(task)
    assert task.sums is not None
    return task.sums


@pytest.mark.parametrize(
    ("offset", "bad"),
    [(1, 0.0), (2, 0.0), (4, 0.0), (1, torch.nan), (2, torch.inf), (4, 1e30)],
)
def test_cut_rows_that_lie_anywhere(offset: int, bad: float, cuda_device: str) -> None:
    """Only elements that are not finite are skipped there too."""
    for kind in (optim.AdamW, optim.Lion):
        given = (maker(kind, {}, "8bit"), torch.float32, cuda_device, offset, bad)
        found, expected = _step_both_ways(_cut(*given))
        torch.testing.assert_close(found, expected, **numerics.SAME, equal_nan=True)


@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_measures_of_cut_rows(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """Within float64's roundings of the reference; nothing is written."""
    make = maker(optim.LAMB, {"weight_decay": 0.1}, "8bit", masters)
    optimizer, batch, memory = _cut(make, dtype, cuda_device, bad=torch.inf)
    before = [t.clone() for t in memory]
    found = _squares(optimizer, batch)
    torch.testing.assert_close(memory, before, **numerics.SAME, equal_nan=True)
    with torchweld.use_backend("eager"):
        expected = _squares(optimizer, batch)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_cut_rows_under_a_scaler(cuda_device: str) -> None:
    """A step that the scaler skips finds nothing and changes nothing."""
    optimizer, batch, memory = _cut(maker(optim.AdamW, {}, "8bit"), torch.float32, cuda_device)
    task = _task(optimizer, batch, found_inf=torch.tensor(1.0, device=cuda_device))
    before = [t.clone() for t in memory]
    optimizer._rule.find_absmaxes(task)
    optimizer._rule.step(task)
    torch.testing.assert_close(memory, before, **numerics.SAME, equal_nan=True)
