"""Offloaded steps under DDP and FSDP2, with real processes: the same bits as without."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

from offloading import (
    BUCKET,
    UNCOUNTED,
    WRITERS,
    assert_same_run,
    backward,
    count_sent,
    loss_of,
    offloaded,
    part_of,
    run_with,
    small_model,
)
from processes import on
from sharded_optimizers import CODECS, dtype_of, whole_of
from torchweld import optim

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

    for kind, settings in (
        (optim.AdamW, {"max_grad_norm": 1e3}),
        (optim.AdamW, {"state_dtype": "8bit"}),
        (optim.LAMB, {}),
    ):

        def make(params: Any, kind: Any = kind, settings: Any = settings) -> Any:
            return kind(params, 1e-2, **settings)

        expected = run(make)
        for placement in ("cpu", "auto"):
            found = run(offloaded(make, placement=placement))
            for p, e in zip(found[0].parameters(), expected[0].parameters(), strict=True):
                assert torch.equal(whole_of(p.detach()), whole_of(e.detach()))
                a, b = found[1].state[p], expected[1].state[e]
                assert list(a) == list(b)
                for name, value in b.items():
                    assert type(a[name]) is type(value)
                    assert torch.equal(whole_of(a[name]), whole_of(value)), name
            assert placement == "auto" or found[2] > 0

    # With the parameters on the host already, a step there needs no offloading: the same bits.
    def adamw(params: Any) -> Any:
        return optim.AdamW(params, 1e-2)

    for maker, saves in ((adamw, False), (offloaded(adamw), False), (offloaded(adamw), True)):
        found = run(maker, on_host=True, saves=saves)
        assert not saves or found[1].memory()["host"]["activations"] > 0
        expected = run(adamw)
        pairs = zip(found[0].parameters(), expected[0].parameters(), strict=True)
        assert all(torch.equal(whole_of(p.detach()), whole_of(e.detach())) for p, e in pairs)


@on(2, None)
def test_writes_to_sharded_parameters_and_gradients(rank: int) -> None:
    """An operation on a DTensor moves the counter of the DTensor, not that of its part."""
    mesh = init_device_mesh("cpu", (2,))

    def shard(model: Any) -> None:
        fully_shard(model, mesh=mesh)

    def make(params: Any) -> Any:
        return optim.AdamW(params, 1e-2)

    # A foreach operation moves no counter of a DTensor. Gradients have a checksum.
    counted = WRITERS.keys() - {"foreach"}
    for name, write in (WRITERS | UNCOUNTED).items():
        expected = run_with(write, make, shard)
        found = run_with(write, offloaded(make, trust_versions=name in counted), shard)
        pairs = zip(found[0].parameters(), expected[0].parameters(), strict=True)
        same = [torch.equal(part_of(p.detach()), part_of(q.detach())) for p, q in pairs]
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
def test_distributed_checkpoints(rank: int, tmp_path: Path) -> None:
    """torch's distributed checkpoint, from an offloaded run to a plain one and back."""
    mesh = init_device_mesh("cpu", (2,))

    def new(is_offloaded: bool) -> tuple[Any, Any]:
        model = small_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)

        def make(params: Any) -> Any:
            return optim.AdamW(params, **ADAMW)

        return model, (offloaded(make) if is_offloaded else make)(list(model.parameters()))

    for saves in (True, False):
        first = new(saves)
        for step in range(3):
            backward(first[0], 10 * step + rank)
            first[1].step()
            first[1].zero_grad()
        weights, states = get_state_dict(*first)
        at = tmp_path / str(saves)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=at)
        second = new(not saves)
        weights, states = get_state_dict(*second)
        saved = {"model": weights, "optimizer": states}
        dcp.load(saved, checkpoint_id=at)
        set_state_dict(*second, model_state_dict=weights, optim_state_dict=states)
        for model, optimizer in (first, second):
            for step in (7, 8):
                backward(model, 10 * step + rank)
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(first[0].parameters(), second[0].parameters(), strict=True)
        assert all(torch.equal(whole_of(p.detach()), whole_of(q.detach())) for p, q in pairs)


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
        assert torch.equal(part_of(sharded), alone)
        for name, value in given.state[alone].items():
            assert torch.equal(part_of(ours.state[sharded][name]), value), name
            assert name == "step" or ours.state[sharded][name].device_mesh is mesh
