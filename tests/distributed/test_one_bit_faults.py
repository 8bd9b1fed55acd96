"""1-bit optimizers under DDP, in bfloat16, with scaled losses, and with a failing rank."""

from __future__ import annotations

import copy
import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchweld
from processes import on, starts
from torchweld import optim
from torchweld.collectives.one_bit import Errors
from torchweld.distributed import OneBitAllReduce, one_bit_hook
from torchweld.errors import CollectiveError

KINDS = pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLAMB"])
SHAPES = ((33, 20), (64,), (3,))


def _params(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in SHAPES]


def _draw(params: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def _snapshot(params: list[torch.Tensor], optimizer: Any) -> Any:
    return copy.deepcopy([[p.detach() for p in params], optimizer.state_dict()])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


# --- Faults -------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("fault", ["nan", "inf", "shape", "raises"])
@on(2, None)
def test_a_fault_is_an_error_on_every_rank(rank: int, kind: str, fault: str) -> None:
    """In the warm-up, at its end and after it: an error on every rank, and nothing changed."""
    for steps in (1, 2, 3):
        params = _params()
        optimizer = getattr(optim, kind)(params, freeze_step=2)
        for step in range(steps):
            _draw(params, 10 * step + rank)
            optimizer.step()
        before = _snapshot(params, optimizer)
        _draw(params, 99 + rank)
        message = "NaN or infinity on rank 1"
        if fault in ("nan", "inf"):
            if rank == 1:
                params[0].grad[3, 4] = float(fault)
        elif fault == "shape":
            message = "their number, sizes, order or phase differ"
            if rank == 1:
                params[1].grad = None
        else:
            message = "rank 1 raised an error" if rank == 0 else "a sparse"
            if rank == 1:
                params[0].grad = params[0].grad.to_sparse()
        if fault == "shape" and kind == "OneBitLAMB" and steps >= 2:
            message = "no gradient" if rank == 1 else "rank 1 raised an error"
        with pytest.raises((CollectiveError, torchweld.ArgumentError), match=message):
            optimizer.step()
        assert _same(_snapshot(params, optimizer), before)
        _draw(params, 99 + rank)
        optimizer.step()  # and the next step is taken
        assert optimizer.param_groups[0]["steps_taken"] == steps + 1


@KINDS
@on(2, None)
def test_ranks_must_step_the_same_parameters(rank: int, kind: str) -> None:
    """Each rank has a gradient of another parameter, of the same size."""
    for steps in (0, 2):
        params = [torch.zeros(6, requires_grad=True) for _ in range(2)]
        optimizer = getattr(optim, kind)(params, freeze_step=1)
        for _ in range(steps):
            for p in params:
                p.grad = torch.ones(6)
            optimizer.step()
        before = _snapshot(params, optimizer)
        params[rank].grad, params[1 - rank].grad = torch.ones(6), None
        with pytest.raises((CollectiveError, torchweld.ArgumentError), match=r"differ|no gradient"):
            optimizer.step()
        assert _same([p.detach() for p in params], before[0])


def _dies(rank: int, how: str, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    params = _params()
    optimizer = optim.OneBitAdam(params, freeze_step=2)
    for step in range(3):
        _draw(params, step)
        optimizer.step()
    held = Path(folder, "held")
    if rank == 1:
        while how == "raises" and not held.exists():
            time.sleep(0.05)
        os._exit(0)
    # Only now, so that a slow start is no fault.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
    before = _snapshot(params, optimizer)
    _draw(params, 5)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="rank 0 of 2: an exchange failed") as caught:
        optimizer.step()
    assert time.monotonic() - began < 6
    assert "Nothing was changed" in str(caught.value)
    assert _same(_snapshot(params, optimizer), before)
    held.touch()
    os._exit(0)


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_rank_that_is_gone(how: str, tmp_path: Path) -> None:
    """If a rank ends or never reaches the step, the others raise within the group's timeout."""
    context = starts()
    started = [context.Process(target=_dies, args=(rank, how, str(tmp_path))) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()  # if it waits for one that has failed
    assert (tmp_path / "held").exists()


@on(2, None)
def test_the_collective_refuses_too(rank: int) -> None:
    reducer = OneBitAllReduce()
    reducer.all_reduce(torch.ones(20) + rank)
    before = copy.deepcopy(reducer.state_dict())
    x = torch.ones(20)
    if rank == 1:
        x[3] = torch.nan
    with pytest.raises(CollectiveError, match="NaN or infinity on rank 1"):
        reducer.all_reduce(x)
    assert _same(reducer.state_dict(), before)
    with pytest.raises(CollectiveError, match="differ"):
        OneBitAllReduce().all_reduce(torch.ones(20 + rank))


# --- With DDP -------------------------------------------------------------------------------------


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def _loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return (model(x) - x[:, :3].sum(1, keepdim=True).tanh()).square().mean()


@KINDS
@on(2, None)
def test_ddp_leaves_the_reduction_to_the_optimizer(rank: int, kind: str) -> None:
    """Steps equal those without DDP bit for bit; a step is rejected if DDP would average too."""
    results = []
    for wrapped in (False, True):
        model = _model()
        optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2, freeze_step=5)
        whole = model
        if wrapped:
            whole = DistributedDataParallel(model)
            optimizer.attach(whole)
        for step in range(12):
            optimizer.zero_grad()
            _loss(whole, step, rank).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert _same(*results)
    model = _model()
    twice = DistributedDataParallel(model)
    optimizer = getattr(optim, kind)(model.parameters(), freeze_step=5)
    _loss(twice, 0, rank).backward()
    with pytest.raises(torchweld.ArgumentError, match="attach"):
        optimizer.step()
    with pytest.raises(torchweld.ArgumentError, match="DistributedDataParallel"):
        optimizer.attach(model)


@on(2, None)
def test_the_hook_trains_as_ddp_does(rank: int) -> None:
    losses = {}
    for hook in ("none", "1 bit", "resumed"):
        model, state = _model(), OneBitAllReduce()
        ddp = DistributedDataParallel(model)
        optimizer = torchweld.optim.AdamW(model.parameters(), lr=3e-3)
        if hook != "none":
            ddp.register_comm_hook(state, one_bit_hook)
        for step in range(80):
            optimizer.zero_grad()
            loss = _loss(ddp, step, rank)
            loss.backward()
            optimizer.step()
            if hook == "resumed" and step == 20:
                saved = copy.deepcopy(state.state_dict())
                state.load_state_dict(saved)
                ordered = [e["worker"].numel() for e in saved["errors"]]
                assert sorted(ordered) == sorted(p.numel() for p in model.parameters())
        dist.all_reduce(loss.detach_())
        losses[hook] = loss.item() / 2
        for p in model.parameters():
            other = p.detach().clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, p)
    assert losses["1 bit"] < 1.25 * losses["none"], losses
    assert losses["resumed"] == losses["1 bit"]


class WithoutFeedback(optim.OneBitAdam):
    """1-bit Adam that discards quantisation errors."""

    def _reduce(self, owned: Any) -> Any:
        entries = super()._reduce(owned)
        for _, _, errors in entries:
            for error in errors:
                if error is not None:
                    error.zero_()
        return [(p, packed, Errors(*errors)) for p, packed, errors in entries]


@on(2, None)
def test_the_loss_is_adams_and_feedback_is_why(rank: int) -> None:
    """A GPT's is within 1%: docs/notebook/slow-links.md."""
    losses = {}
    made: Any
    for made in (optim.Adam, optim.OneBitAdam, WithoutFeedback):
        model = _model()
        ddp = DistributedDataParallel(model)
        if made is optim.Adam:
            optimizer: Any = made(model.parameters(), lr=3e-3)
        else:
            optimizer = made(model.parameters(), lr=3e-3, freeze_step=60, bias_correction=True)
            optimizer.attach(ddp)
        total = torch.zeros(())
        for step in range(240):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - step / 240)
            optimizer.zero_grad()
            loss = _loss(ddp, step, rank)
            loss.backward()
            optimizer.step()
            if step >= 180:
                total += loss.detach() / 120
        dist.all_reduce(total)
        losses[made.__name__] = total.item()
    adam, kept, dropped = losses.values()
    assert kept < 1.05 * adam, losses
    assert kept - adam < (dropped - adam) / 2, losses


# --- Storage --------------------------------------------------------------------------------------


@KINDS
@on(2, None)
def test_momentum_is_stored_as_bits(rank: int, kind: str) -> None:
    """Momentum as bits is momentum as floats, to the bit; and bfloat16 parameters with masters."""
    params, kept = _params(), _params()
    one, other = (getattr(optim, kind)(ps, lr=1e-2, freeze_step=3) for ps in (params, kept))
    for step in range(10):
        for ps, optimizer in ((params, one), (kept, other)):
            _draw(ps, 10 * step + rank)
            optimizer.step()
        if other.is_frozen and kind == "OneBitAdam" and step >= 3:
            for p in kept:  # the same in float32
                momentum = other._momentum_of(p)
                for name in ("exp_avg_bits", "exp_avg_scale"):
                    del other.state[p][name]
                other.state[p]["exp_avg"] = momentum
        assert _same([p.detach() for p in params], [p.detach() for p in kept])
    table = one.bytes_per_parameter()
    assert table["exp_avg_bits"] < 0.14
    assert table["exp_avg_sq"] == table["worker_error"] == 4
    assert "exp_avg" not in table
    low = _params(torch.bfloat16)
    small = getattr(optim, kind)(
        low, lr=1e-2, freeze_step=3, error_dtype=torch.bfloat16, master_weights=True
    )
    for step in range(10):
        _draw(low, 10 * step + rank)
        small.step()
    assert small.bytes_per_parameter()["worker_error"] == 2
    for p in low:
        assert small.state[p]["master"].dtype == torch.float32
        assert torch.equal(p.detach(), small.state[p]["master"].bfloat16())
        assert p.isfinite().all()
    # Within what bfloat16's gradients and errors change of steps of at most lr * 1 / sqrt(1 - b2).
    for p, q in zip(params, low, strict=True):
        assert (p - q.float()).abs().mean() < 10 * 1e-2


@on(2, None)
def test_a_scaled_step_is_left_out_together(rank: int) -> None:
    """An infinity in one rank's scaled gradients makes both skip the step."""
    params = _params()
    optimizer = optim.OneBitAdam(params, freeze_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        loss = sum((p * (step + rank + 1)).sum() for p in params)
        scaler.scale(loss).backward()
        is_bad = step in (1, 4)
        if is_bad and rank == 1:
            params[0].grad[0, 0] = torch.inf
        before = _snapshot(params, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert _same(_snapshot(params, optimizer), before) == is_bad
    assert optimizer.param_groups[0]["steps_taken"] == 4


BAD = {
    "freeze_step": {"freeze_step": 0},
    "state_dtype": {"freeze_step": 2, "state_dtype": "8bit"},
    "max_grad_norm": {"freeze_step": 2, "max_grad_norm": 1.0},
    "error_dtype": {"freeze_step": 2, "error_dtype": torch.float16},
}


@KINDS
@pytest.mark.parametrize("argument", BAD)
def test_arguments_are_named(kind: str, argument: str) -> None:
    with pytest.raises(torchweld.ArgumentError) as caught:
        getattr(optim, kind)(_params(), **BAD[argument])
    assert caught.value.argument == argument


@on(2, None)
def test_shards_are_refused(rank: int) -> None:
    """FSDP2 reduces their gradients."""
    model = _model()
    fully_shard(model)
    with pytest.raises(torchweld.ArgumentError, match="LowPrecisionReduceScatter"):
        optim.OneBitAdam(model.parameters(), freeze_step=2)
