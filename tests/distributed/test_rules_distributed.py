"""Later rules and options on sharded parameters: the bits of one device, and reshards."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import functools
import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchweld
from optimizers import ScheduleFreeAdamW
from processes import on, processes
from sharded_optimizers import (
    assert_same,
    drawn,
    dtype_of,
    go_on,
    placer,
    reductions,
    run,
    whole_of,
)
from torchweld import optim

CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optim.AdEMAMix, {"alpha_warmup": 4, "beta3_warmup": 4, "weight_decay": 0.1}),
    (optim.AdEMAMix, {"state_dtype": "8bit", "master_weights": "remainder8"}),
    (ScheduleFreeAdamW, {"weight_decay": 0.1, "master_weights": "remainder8"}),
    (ScheduleFreeAdamW, {"state_dtype": "8bit"}),
    (optim.AdamW, {"cautious": True, "cautious_decay": True, "ema_decay": 0.9}),
    (optim.Lion, {"cautious": True, "state_dtype": "8bit", "weight_decay": 0.1}),
    (optim.AdamW, {"ema_decay": 0.9, "master_weights": "remainder8", "state_dtype": "8bit"}),
)


@pytest.mark.parametrize("count", [2, 4])
@on("count")
def test_shards_have_the_bits_of_one_device(rank: int, count: int) -> None:

    flat = init_device_mesh("cpu", (count,))
    places = [placer(flat, 0), placer(flat, 1)]
    if count == 4:
        grid = init_device_mesh("cpu", (2, 2))
        places = [placer(grid, 0, 1), placer(grid, None, 0)]
    for kind, settings in CASES:
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for place in places:
            with reductions() as made:
                found = run(settings, place, range(1, 3), kind=kind)
            assert_same(found, expected)
            if settings.get("cautious") and "state_dtype" not in settings:
                # One number per tensor travels; tensors of one placement travel together.
                assert set(made) == {torch.distributed.ReduceOp.SUM}


@pytest.mark.parametrize("count", [2, 4])
@on("count")
def test_options_of_muon(rank: int, count: int) -> None:

    results = []
    for place in (lambda t: t, placer(init_device_mesh("cpu", (count,)), 0)):
        params = [torch.nn.Parameter(place(v)) for v in drawn(0, torch.float32) if v.ndim > 1]
        optimizer = optim.Muon(params, 0.02, cautious=True, cautious_decay=True, ema_decay=0.9)
        for seed in (1, 2):
            drawn_grads = [g for g in drawn(seed, torch.float32) if g.ndim > 1]
            for p, g in zip(params, drawn_grads, strict=True):
                p.grad = place(g)
            optimizer.step()
        results.append([whole_of(t) for p in params for t in (p, optimizer.state[p]["ema"])])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@on(2)
def test_modes(rank: int) -> None:

    place = placer(init_device_mesh("cpu", (2,)), 0)
    for settings in ({}, {"master_weights": "remainder8"}):
        whole, of_whole = run(settings, lambda t: t, range(1, 3), kind=ScheduleFreeAdamW)
        parts, of_parts = run(settings, place, range(1, 3), kind=ScheduleFreeAdamW)
        trained = [p.detach().clone() for p in whole]
        for mode in ("eval", "train"):
            getattr(of_whole, mode)()
            getattr(of_parts, mode)()
            assert all(torch.equal(whole_of(p), q) for p, q in zip(parts, whole, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(trained, whole, strict=True))


def _save(rank: int, folder: str, count: int) -> None:
    for number, (kind, settings) in enumerate(CASES):
        dtype = dtype_of(settings)
        draw = lambda seed, dtype=dtype: [g * 0.1 for g in drawn(seed, dtype)]  # noqa: E731
        start = functools.partial(run, settings, kind=kind)
        go_on(f"{folder}/{number}", count, start, draw, assert_same)


def test_checkpoints_go_from_four_processes_to_one_and_to_two() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for count in (4, 1, 2):
            with processes(count) as connected:
                connected.run("cpu", _save, folder, count)


@on(2)
def test_gradients_are_released_under_fsdp2(rank: int) -> None:
    """FSDP2's hooks come with reduced gradients; the trajectory equals whole steps'."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for releases in (False, True):
        torch.manual_seed(0)
        linear = torch.nn.Linear
        blocks = [torch.nn.Sequential(linear(9, 33), linear(33, 9)) for _ in range(2)]
        model = torch.nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = optim.AdamW(model.parameters(), 1e-2, state_dtype="8bit", ema_decay=0.9)
        release = optim.release_gradients(model, optimizer, bucket_bytes=1) if releases else None
        torch.manual_seed(rank)
        for _ in range(3):
            first, second = torch.randn(2, 4, 9)
            with release.accumulate() if release else contextlib.nullcontext():
                model(first).square().sum().backward()
            model(second).square().sum().backward()
            assert all((p.grad is None) == releases for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.full_tensor() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
    for refused in (optim.LAMB, optim.Muon):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        with pytest.raises(torchweld.ArgumentError, match="sharded parameters"):
            optim.release_gradients(model, refused(matrices))
