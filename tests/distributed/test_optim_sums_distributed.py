"""Rules with sums over whole tensors, and clipping, on sharded parameters, with real processes."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchweld
from conftest import PLACES, running_at
from optimizers import threads
from processes import on
from sharded_optimizers import FACTORED, assert_near, drawn, placer, reductions, run, whole_of
from torchweld import optim
from torchweld.optim.adafactor import ADAFACTOR


@on(2, None)
def test_adaptive(rank: int) -> None:
    """Norms are taken over whole tensors, but summed in another order."""
    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.LAMB8bit):
        expected, _ = run({}, lambda t: t, range(1, 3), kind=kind)
        placements = itertools.cycle((Shard(-1), Replicate(), Shard(0)))
        wholes = drawn(0, torch.float32)
        params = [
            torch.nn.Parameter(distribute_tensor(value, mesh, [at]))
            for value, at in zip(wholes, placements, strict=False)
        ]
        optimizer = kind(params, 1e-2)
        for seed in range(1, 3):
            for p, g in zip(params, drawn(seed, torch.float32), strict=True):
                p.grad = distribute_tensor(g * 0.1, mesh, p.placements)
            optimizer.step()
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p.full_tensor(), e, rtol=1e-6, atol=1e-7)


# The dimensions of a matrix that each average runs over; elementwise averages have none.
AVERAGED = {"row_var": -1, "exp_avg_sq_row": -1, "col_var": -2, "exp_avg_sq_col": -2}
AVERAGED |= {"variance": 0, "exp_avg_sq": 0}


def _assert_averages_same(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Bit for bit, if no average runs over a sharded dimension."""
    for p, e in zip(found[0], expected[0], strict=True):
        sharded = {getattr(at, "dim", None) for at in p.placements}  # type: ignore[attr-defined]
        for name, value in expected[1].state[e].items():
            if name in AVERAGED and (not AVERAGED[name] or p.ndim + AVERAGED[name] not in sharded):
                assert torch.equal(whole_of(found[1].state[p][name]), value), name


@contextlib.contextmanager
def _kernels_alone() -> Iterator[None]:
    """A context in which eager torch must not serve Adafactor's steps."""

    def reference(*_: Any) -> None:
        raise AssertionError("eager served")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ADAFACTOR, "_reference", reference)
        yield


@pytest.mark.parametrize("count", [2, 4])
@on("count", None)
def test_factored(rank: int, count: int) -> None:
    """Averages and norms are taken over whole tensors, and stored as shards of whole averages."""
    with _kernels_alone():
        _factored_on(True, None)
        _factored_on(True, 0.5)
    if count == 2:
        with torchweld.use_backend("eager"):
            _factored_on(False, 0.5)


def _factored_on(kernel: bool, limit: float | None) -> None:

    world = torch.distributed.get_world_size()
    grid = init_device_mesh("cpu", (2, world // 2) if world > 2 else (world,))
    placed: Any = [(0,), (None,), (1,), (2,)] if world == 2 else [(0, 1), (1, 1)]
    for kind, settings in FACTORED:
        settings = settings | {"max_grad_norm": limit}
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for dims in placed:
            place = placer(grid, *dims)
            with reductions() as made:
                found = run(settings, place, range(1, 3), kind=kind)
            # A step's sums, the kinds of them, matrices and vectors; and the norm's of two layouts.
            assert len(made) <= 2 * (3 * 4 + (limit is not None) * 2 * len(dims))
            assert_near(found, expected)
            if kernel and limit is None:
                _assert_averages_same(found, expected)
            for p in found[0]:
                for name, value in found[1].state[p].items():
                    assert isinstance(value, DTensor) == (name != "step")
            begun = run(settings, place, range(1, 2), kind=kind)
            saved = ([whole_of(p.detach()) for p in begun[0]], begun[1].state_dict())
            with threads(3 if kernel else 1):
                again = run(settings, place, range(2, 3), saved, kind=kind)
            for p, q in zip(found[0], again[0], strict=True):
                assert torch.equal(p.to_local(), q.to_local())


@on(2, None)
def test_rounded_sums(rank: int) -> None:
    """Rules with sums over whole tensors round as on one device, unless a sum rounds otherwise.

    Another order of a sum moves a parameter by a few roundings of float32. One of bfloat16's is
    2^16 of these, so a step rounds a few elements in 2^16 to the other side.
    """
    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor):
        settings = {"stochastic_rounding": True}
        expected, _ = run(settings, lambda t: t, range(1, 3), kind=kind)
        unrounded, _ = run({"master_weights": True}, lambda t: t, range(1, 3), kind=kind)
        for dim in (0, 1):
            found, _ = run(settings, placer(mesh, dim), range(1, 3), kind=kind)
            others = [
                (whole_of(p.detach()) != e).sum() for p, e in zip(found, expected, strict=True)
            ]
            assert sum(others) <= 1e-3 * sum(e.numel() for e in expected), kind
        # In small parameters few or no elements are rounded to the other side.
        for e, u in zip(expected, unrounded, strict=True):
            assert e.numel() < 100 or (e != u).any()


@on(2, None)
def test_clipping(rank: int) -> None:

    mesh = init_device_mesh("cpu", (2,))
    settings = {"max_grad_norm": 0.5}
    params, whole = run(settings, lambda t: t, range(1, 3))
    found, sharded = run(settings, lambda t: distribute_tensor(t, mesh, [Shard(0)]), range(1, 3))
    torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)
    for p, e in zip(found, params, strict=True):
        torch.testing.assert_close(p.full_tensor(), e, rtol=1e-5, atol=1e-7)
    # Replicas count once, and so do plain tensors among DTensors.
    values = drawn(0, torch.float32)
    mixed = [
        torch.nn.Parameter(distribute_tensor(v, mesh, [Shard(0) if i % 2 else Replicate()]))
        for i, v in enumerate(values[:-1])
    ]
    mixed.append(torch.nn.Parameter(values[-1]))
    optimizer = optim.AdamW(mixed, max_grad_norm=0.5)
    for p, g in zip(mixed, drawn(2, torch.float32), strict=True):
        p.grad = g * 0.1 if p is mixed[-1] else distribute_tensor(g * 0.1, mesh, p.placements)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
@on(4, None)
def test_averages_in_the_emulator(rank: int) -> None:
    """Adafactor's CUDA kernels."""
    mesh = init_device_mesh("cpu", (2, 2))
    for kind, settings in FACTORED:
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for dims in (0, 1), (1, 1):
            place = placer(mesh, *dims)
            with (
                _kernels_alone(),
                pytest.MonkeyPatch.context() as patch,
                running_at("emulator", patch),
            ):
                found = run(settings, place, range(1, 3), kind=kind)
            assert_near(found, expected)
            _assert_averages_same(found, expected)
