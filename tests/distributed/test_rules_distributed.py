"""Later rules, Muon and Offload on sharded parameters: the bits of one device, and reshards."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import torchweld
from offloading import (
    BUCKET,
    UNCOUNTED,
    WRITERS,
    assert_same_run,
    count_sent,
    loss_of,
    offloaded,
    run_with,
    small_model,
)
from optimizers import ScheduleFreeAdamW
from processes import on, processes
from selection import WHOLE
from sharded_optimizers import (
    CODECS,
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
from torchweld.optim._shards import local_part

CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optim.AdEMAMix, {"alpha_warmup": 4, "beta3_warmup": 4, "weight_decay": 0.1}),
    (optim.AdEMAMix, {"state_dtype": "8bit", "master_weights": "remainder8"}),
    (ScheduleFreeAdamW, {"weight_decay": 0.1, "master_weights": "remainder8"}),
    (ScheduleFreeAdamW, {"state_dtype": "8bit"}),
    (optim.AdamW, {"cautious": True, "cautious_decay": True, "ema_decay": 0.9}),
    (optim.Lion, {"cautious": True, "state_dtype": "8bit", "weight_decay": 0.1}),
    (optim.AdamW, {"ema_decay": 0.9, "master_weights": "remainder8", "state_dtype": "8bit"}),
)
# Four processes have a mesh of one dimension, as two have, and one of two.
COUNTS = [2, 4] if WHOLE else [4]


@pytest.mark.parametrize("count", COUNTS)
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
    cases = [*CASES, *((optim.AdamW, settings) for settings in CODECS)]
    for number, (kind, settings) in enumerate(cases):
        dtype = dtype_of(settings)
        draw = lambda seed, dtype=dtype: [g * 0.1 for g in drawn(seed, dtype)]  # noqa: E731
        start = functools.partial(run, settings, kind=kind)
        go_on(f"{folder}/{number}", count, start, draw, assert_same)
    start = functools.partial(_run_muon, state_dtype="8bit")
    go_on(f"{folder}/muon", count, start, _draw, assert_same_muon)


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


# --- Muon: the bits of one device, and the bytes --------------------------------------------------


# Uneven and empty shards, single rows and columns, a stack, packed rows, and packed columns.
SHAPES = ((65, 30), (64, 64), (1, 50), (41, 1), (4, 20, 30), (96, 24), (24, 96))


def _draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _run_muon(
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


# As in torch, no checkpoint has its count of steps.
assert_same_muon = functools.partial(assert_same, without="step")


@pytest.mark.parametrize("count", COUNTS)
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
    for settings in (
        *({}, {"state_dtype": "8bit", "algorithm": "gram", "ns_dtype": torch.float32}),
        {"cautious": True, "cautious_decay": True, "ema_decay": 0.9},
    ):
        expected = _run_muon(lambda t: t, range(1, 3), **settings)
        for mesh, placements in cases:
            place = functools.partial(
                distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None
            )
            found = _run_muon(place, range(1, 3), **settings)
            assert_same_muon(found, expected)
            sent = torch.tensor(float(found[1]._owners.sent))
            torch.distributed.all_reduce(sent)
            replicas = 2 if isinstance(placements[0], Replicate) else 1
            each = count // replicas
            matrices = 4 * sum(p.numel() for p in expected[0])
            assert 0 < sent <= 2 * 2 * replicas * matrices * (each - 1) / each
    # A stack along its experts does not travel.
    stacked = _run_muon(
        lambda t: distribute_tensor(
            t, flat, [Shard(0) if t.ndim == 3 else Replicate()], src_data_rank=None
        ),
        range(1, 3),
    )
    assert_same_muon(stacked, _run_muon(lambda t: t, range(1, 3)))
    assert stacked[1]._owners.sent == 0


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
    """Ranks have the same data; beyond four, sums of equal numbers round: gradients are given."""
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


# --- Offload under DDP and FSDP2 ------------------------------------------------------------------


ADAMW = {"lr": 1e-2, "master_weights": True}


@on(2, None)
def test_ddp(rank: int) -> None:
    """Gradients leave in step(), with and without DDP's views; the first pass is not reduced."""

    def run(offloads: bool, has_views: bool) -> tuple[Any, Any, int]:
        model = small_model(torch.float32)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=has_views)
        optimizer: Any = optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e3)
        if offloads:
            optimizer = optim.Offload(optimizer, bucket_bytes=BUCKET, threads=1)
        sent = 0
        for step in range(8):
            for micro in range(2):
                ddp.require_backward_grad_sync = micro == 1
                loss_of(ddp, 10 * step + 2 * rank + micro).backward()
            sent += count_sent(optimizer)
            if step == 5:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, sent

    for has_views in (False, True):
        found = run(True, has_views)
        assert_same_run(found[:2], run(False, has_views)[:2])
        assert found[2] == 0


@on(2, None)
def test_fsdp2(rank: int) -> None:
    """Gradients leave during the backward pass, also for rules with collectives."""
    mesh = init_device_mesh("cpu", (2,))

    def run(make: Any, on_host: bool = False, saves: bool = False) -> tuple[Any, Any, int]:
        model = small_model(torch.float32)
        policy: dict[str, Any] = (
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if on_host else {}
        )
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh, **policy)
        optimizer = make(list(model.parameters()))
        sent = 0
        for step in range(3):
            # The weights gathered for a layer do not count as activations.
            with optimizer.activations(1) if saves else contextlib.nullcontext():
                losses = [loss_of(model, 100 * (10 * step + rank) + k) for k in range(2)]
            for loss in losses:
                loss.backward()
            sent += count_sent(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, sent

    def assert_equal(found: Any, expected: Any, states: bool) -> None:
        for p, e in zip(found[0].parameters(), expected[0].parameters(), strict=True):
            assert torch.equal(whole_of(p.detach()), whole_of(e.detach()))
            a, b = found[1].state[p], expected[1].state[e]
            assert not states or list(a) == list(b)
            for name, value in b.items() if states else ():
                assert type(a[name]) is type(value)
                assert torch.equal(whole_of(a[name]), whole_of(value)), name

    for kind, settings in (
        (optim.AdamW, {"max_grad_norm": 1e3}),
        (optim.AdamW, {"state_dtype": "8bit"}),
        (optim.LAMB, {}),
    ):
        make = functools.partial(kind, lr=1e-2, **settings)
        expected = run(make)
        for placement in ("cpu", "auto"):
            found = run(offloaded(make, placement=placement))
            assert_equal(found, expected, True)
            assert placement == "auto" or found[2] > 0

    # With the parameters on the host already, a step there needs no offloading: the same bits.
    adamw = functools.partial(optim.AdamW, lr=1e-2)
    expected = run(adamw)
    for maker, saves in ((adamw, False), (offloaded(adamw), False), (offloaded(adamw), True)):
        found = run(maker, on_host=True, saves=saves)
        assert not saves or found[1].memory()["host"]["activations"] > 0
        assert_equal(found, expected, False)


@on(2, None)
def test_writes_to_sharded_parameters_and_gradients(rank: int) -> None:
    """An operation on a DTensor moves the counter of the DTensor, not that of its part."""
    mesh = init_device_mesh("cpu", (2,))

    def shard(model: Any) -> None:
        fully_shard(model, mesh=mesh)

    make = functools.partial(optim.AdamW, lr=1e-2)
    # A foreach operation moves no counter of a DTensor. Gradients have a checksum.
    counted = WRITERS.keys() - {"foreach"}
    for name, write in (WRITERS | UNCOUNTED).items():
        expected = run_with(write, make, shard)
        found = run_with(write, offloaded(make, trust_versions=name in counted), shard)
        pairs = zip(found[0].parameters(), expected[0].parameters(), strict=True)
        same = [torch.equal(local_part(p.detach()), local_part(q.detach())) for p, q in pairs]
        assert all(same), (name, same)
        assert name not in counted or (found[2] > 0) == (name != "nothing"), name


@on(2, None)
def test_autograd_knows_of_steps(rank: int) -> None:
    """A graph that saved a parameter raises after a step has written it, sharded or not."""
    mesh = init_device_mesh("cpu", (2,))
    for given in (torch.ones(4, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])):
        p = torch.nn.Parameter(given)
        optimizer = optim.Offload(optim.AdamW([p], 1e-2), threads=1)
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on(2, None)
def test_a_mesh_of_gpus(rank: int) -> None:
    """States of DTensors on a mesh of GPUs are DTensors on it with parts on the host."""
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False)
    for settings in CODECS:
        if "stochastic_rounding" in settings:
            continue  # whose bits go by the row of the whole
        dtype = dtype_of(settings)
        part = torch.randn(32, 512, generator=torch.Generator().manual_seed(rank)).to(dtype)
        meta = TensorMeta(torch.Size((64, 512)), (512, 1), dtype)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        sharded = torch.nn.Parameter(DTensor(part.clone(), spec, requires_grad=False))  # type: ignore[call-arg]
        alone = torch.nn.Parameter(part)
        ours = optim.Offload(optim.AdamW([sharded], 1e-2, **settings), threads=1)
        given = optim.AdamW([alone], 1e-2, **settings)
        for step in range(3):
            alone.grad = torch.randn(32, 512, generator=torch.Generator().manual_seed(step)).to(
                dtype
            )
            sharded.grad = DTensor(alone.grad.clone(), spec, requires_grad=False)  # type: ignore[call-arg]
            for optimizer in (ours, given):
                optimizer.step()
            ours.load_state_dict(ours.state_dict())
        assert torch.equal(local_part(sharded), alone)
        for name, value in given.state[alone].items():
            assert torch.equal(local_part(ours.state[sharded][name]), value), name
            assert name == "step" or ours.state[sharded][name].device_mesh is mesh
