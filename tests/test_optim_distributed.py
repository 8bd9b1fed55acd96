"""Optimizers on sharded parameters, with real processes: the bits that one device would have."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import torchweld
from torchweld import optim

# A row of 300 is two blocks; 65 rows do not divide by two; one row is left to a single process.
SHAPES = ((65, 300), (64, 64), (300,), (1, 5000), (4, 40, 30))
CODECS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "8bit"},
    {"state_dtype": torch.bfloat16, "amsgrad": True},
    {"state_dtype": "8bit", "master_weights": "remainder"},
    {"master_weights": True},
)


def _values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _dtype(settings: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if "master_weights" in settings else torch.float32


def _run(
    settings: dict[str, Any],
    place: Callable[[torch.Tensor], torch.Tensor],
    steps: range,
    saved: Any = None,
    kind: Any = optim.AdamW,
) -> tuple[list[torch.Tensor], Any]:
    """A run, or its second half from what was saved: parameters and optimizer."""
    dtype = _dtype(settings)
    params = [torch.nn.Parameter(place(v)) for v in (saved[0] if saved else _values(0, dtype))]
    optimizer = kind(params, 1e-2, **settings)
    if saved:
        optimizer.load_state_dict(saved[1])
    for seed in steps:
        for p, g in zip(params, _values(seed, dtype), strict=True):
            p.grad = place(g * 0.1)
        optimizer.step()
    return params, optimizer


def _whole(t: Any) -> Any:
    if not hasattr(t, "full_tensor"):
        return t
    if t.dtype != torch.int16:
        return t.full_tensor()
    # Which neither gloo nor NCCL can gather.
    from torch.distributed.tensor import DTensor

    layout = {"shape": t.shape, "stride": t.stride()}
    bits = DTensor.from_local(
        t.to_local().view(torch.float16), t.device_mesh, t.placements, **layout
    )
    return bits.full_tensor().view(torch.int16)


def _assert_same(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Parameters and all that is kept of them, bit for bit."""
    for p, e in zip(found[0], expected[0], strict=True):
        assert torch.equal(_whole(p.detach()), e)
        for name, value in expected[1].state[e].items():
            whole = _whole(found[1].state[p][name])
            assert whole.dtype == value.dtype
            assert torch.equal(whole, value), name


def _shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for settings in CODECS:
        expected = _run(settings, lambda t: t, range(1, 5))
        quantized = settings.get("state_dtype") == "8bit"
        for placement in (Shard(0), Replicate(), *([] if quantized else [Shard(1)])):

            def place(t: torch.Tensor, placement: Any = placement) -> torch.Tensor:
                along = Shard(0) if placement == Shard(1) and t.ndim == 1 else placement
                return distribute_tensor(t, mesh, [along])

            found = _run(settings, place, range(1, 5))
            _assert_same(found, expected)
            assert all(
                isinstance(value, DTensor)
                for p in found[0]
                for name, value in found[1].state[p].items()
                if name != "step"
            )
            # What one saved, another goes on from.
            half = _run(settings, place, range(1, 3))
            saved = ([_whole(p.detach()) for p in half[0]], half[1].state_dict())
            _assert_same(_run(settings, place, range(3, 5), saved), expected)

    wide = torch.nn.Parameter(distribute_tensor(torch.zeros(64, 128), mesh, [Shard(1)]))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(torchweld.ArgumentError, match="first dimension"):
        optim.AdamW([wide], state_dtype="8bit").step()
    wide.grad = torch.ones(64, 128)
    with pytest.raises(torchweld.ArgumentError, match="a gradient"):
        optim.AdamW([wide]).step()


def _adaptive(rank: int) -> None:
    """Norms are those of whole tensors, summed in another order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.LAMB8bit):
        quantized = kind is optim.LAMB8bit
        expected, _ = _run({}, lambda t: t, range(1, 5), kind=kind)
        last = Replicate() if quantized else Shard(-1)
        placements = itertools.cycle((Shard(0), Replicate(), last))
        wholes = _values(0, torch.float32)
        params = [
            torch.nn.Parameter(distribute_tensor(value, mesh, [at]))
            for value, at in zip(wholes, placements, strict=False)
        ]
        optimizer = kind(params, 1e-2)
        for seed in range(1, 5):
            for p, g in zip(params, _values(seed, torch.float32), strict=True):
                p.grad = distribute_tensor(g * 0.1, mesh, p.placements)
            optimizer.step()
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p.full_tensor(), e, rtol=1e-6, atol=1e-7)


def _clipping(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    settings = {"max_grad_norm": 0.5}
    params, whole = _run(settings, lambda t: t, range(1, 3))
    found, sharded = _run(settings, lambda t: distribute_tensor(t, mesh, [Shard(0)]), range(1, 3))
    torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)
    for p, e in zip(found, params, strict=True):
        torch.testing.assert_close(p.full_tensor(), e, rtol=1e-5, atol=1e-7)
    # Replicas count once, and plain tensors beside DTensors too.
    values = _values(0, torch.float32)
    mixed = [
        torch.nn.Parameter(distribute_tensor(v, mesh, [Shard(0) if i % 2 else Replicate()]))
        for i, v in enumerate(values[:-1])
    ]
    mixed.append(torch.nn.Parameter(values[-1]))
    optimizer = optim.AdamW(mixed, max_grad_norm=0.5)
    for p, g in zip(mixed, _values(2, torch.float32), strict=True):
        p.grad = g * 0.1 if p is mixed[-1] else distribute_tensor(g * 0.1, mesh, p.placements)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)


def _fsdp2(rank: int) -> None:
    """Trained under fully_shard, saved by torch's state dict functions, as one process would."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def make(sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64))
        if sharded:
            fully_shard(model)
        return model, optim.AdamW(model.parameters(), 1e-3, state_dtype="8bit")

    plain, sharded = make(False), make(True)
    train(*plain, range(3))
    train(*sharded, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    whole = get_optimizer_state_dict(*sharded, options=options)
    if rank == 0:
        kept = whole["state"]["0.weight"]
        assert kept["exp_avg_codes"].shape == (256, 128)
        assert kept["exp_avg_absmax"].shape == (256, 1)
    again = make(True)
    again[0].load_state_dict(sharded[0].state_dict())
    own = copy.deepcopy(get_optimizer_state_dict(*sharded))
    set_optimizer_state_dict(*again, own)
    train(*sharded, range(3, 5))
    train(*again, range(3, 5))
    train(*plain, range(3, 5))
    for a, b, c in zip(*(m.parameters() for m, _ in (sharded, again, plain)), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
        # Their gradients are averaged over two processes: the same numbers to rounding.
        torch.testing.assert_close(a.full_tensor(), c, rtol=1e-3, atol=1e-4)


def _zero(rank: int) -> None:
    """ZeroRedundancyOptimizer, each process with the state of its share: the same bits."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    expected, _ = _run({"state_dtype": "8bit"}, lambda t: t, range(1, 5))
    params = [torch.nn.Parameter(v) for v in _values(0, torch.float32)]
    optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-2, state_dtype="8bit")
    for seed in range(1, 5):
        for p, g in zip(params, _values(seed, torch.float32), strict=True):
            p.grad = g * 0.1
        optimizer.step()
    assert 0 < len(optimizer.optim.state) < len(params)
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=True))


# Stages of a run: each on so many processes, sharded in some way, from the last one's checkpoint.
STAGES = (1, 2, 4, 1)


def _stage(rank: int, stage: int, directory: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (STAGES[stage],))
    for name, settings in enumerate(CODECS):
        quantized = settings.get("state_dtype") == "8bit"
        dtype = _dtype(settings)

        def place(t: torch.Tensor, quantized: bool = quantized) -> torch.Tensor:
            other = Replicate() if quantized or t.ndim == 1 else Shard(1)
            return distribute_tensor(t, mesh, [Shard(0) if stage % 2 else other])

        values = [place(v) for v in _values(0, dtype)]
        model = torch.nn.ParameterList([torch.nn.Parameter(v) for v in values])
        optimizer = optim.AdamW(model.parameters(), 1e-2, **settings)
        if stage:
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(saved, checkpoint_id=directory / f"{name}-{stage - 1}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
            )
        for seed in (2 * stage + 1, 2 * stage + 2):
            for p, g in zip(model, _values(seed, dtype), strict=True):
                p.grad = place(g * 0.1)
            optimizer.step()
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=directory / f"{name}-{stage}")
        if stage == len(STAGES) - 1:
            expected = _run(settings, lambda t: t, range(1, 2 * len(STAGES) + 1))
            _assert_same((list(model), optimizer), expected)


def _worker(
    rank: int, scenario: Callable[..., None], store: str, world: int = 2, *given: Any
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    try:
        scenario(rank, *given)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("scenario", [_shards, _adaptive, _clipping, _fsdp2, _zero])
def test_two_processes_equal_one(scenario: Callable[[int], None], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_worker, args=(scenario, str(tmp_path / "store")), nprocs=2)


def test_checkpoints_are_resharded_bit_for_bit(tmp_path: Path) -> None:
    """On disk, from 1 process to 2, 4 and back: the run is that of one device without a break."""
    for stage, world in enumerate(STAGES):
        store = str(tmp_path / f"store{stage}")
        torch.multiprocessing.spawn(
            _worker, args=(_stage, store, world, stage, tmp_path), nprocs=world
        )
