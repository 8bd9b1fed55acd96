"""The 1-bit collective and optimizers on gloo processes: the papers in numpy, DDP, and faults."""

from __future__ import annotations

import copy
import datetime
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import one_bit
import torchweld
from processes import on, processes, starts
from refusing import refuses
from torchweld import optim
from torchweld.collectives.one_bit import exchange as collective
from torchweld.collectives.one_bit.exchange import Errors
from torchweld.distributed import OneBitAllReduce, one_bit_hook
from torchweld.errors import CollectiveError

SHAPES = ((7,), (33, 20), (), (5, 3, 2), (64,))
RANKS = pytest.mark.parametrize("ranks", [2, 4])
KINDS = {"adam": (optim.OneBitAdam, one_bit.Adam), "lamb": (optim.OneBitLAMB, one_bit.Lamb)}


def _dyadic(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of few bits, with exact sums in any order of ranks."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(np.round(drawn * 256) / 256, dtype=np.float32)


def _tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(a)) for a in arrays]


# --- The collective -----------------------------------------------------------------------------


@on("ranks", None)
def _average(rank: int, ranks: int, sizes: list[int], bucket: int, is_async: bool) -> None:
    collective.BUCKET, kept = bucket, collective.BUCKET
    try:
        reducer = OneBitAllReduce()
        expected = [one_bit.Compressed(ranks, size) for size in sizes]
        for step in range(4):
            of_ranks = [
                [_dyadic(97 * step + 7 * w + i, (size,)) for i, size in enumerate(sizes)]
                for w in range(ranks)
            ]
            tensors = _tensors(of_ranks[rank])
            work = reducer.all_reduce(tensors, async_op=is_async)
            if work is not None:
                work.wait()
            for i, t in enumerate(tensors):
                mean = expected[i].mean([of_rank[i] for of_rank in of_ranks])
                np.testing.assert_allclose(t.numpy(), mean, rtol=1e-6, atol=0)
        # x + error before = result + error after, of the workers and of the chunk.
        for i, errors in enumerate(reducer.state_dict()["errors"]):
            np.testing.assert_allclose(errors["worker"], expected[i].worker[rank], atol=2e-6)
            np.testing.assert_allclose(errors["server"], expected[i].server[rank], atol=2e-6)
    finally:
        collective.BUCKET = kept


@settings(max_examples=8)
@given(
    ranks=st.sampled_from([2, 4]),
    sizes=st.lists(st.integers(0, 70) | st.sampled_from([1000, 9001]), min_size=1, max_size=4),
    bucket=st.sampled_from([1, 100, 1 << 20]),
    is_async=st.booleans(),
)
def test_the_mean_of_any_lengths(**drawn: Any) -> None:
    """As in numpy, with errors, in one bucket or many, synchronous or not."""
    _average(**drawn)


@RANKS
@on("ranks", None)
def test_bytes_on_the_wire(rank: int, ranks: int) -> None:
    size = 1 << 20
    reducer = OneBitAllReduce()
    reducer.all_reduce(torch.randn(size))
    ring = 2 * (ranks - 1) * 4 * size // ranks  # of a float32 all-reduce
    assert reducer.bytes_sent * 30 <= ring
    # Bits both ways, and scales; and four numbers of the agreement.
    chunk = collective.chunk_of(size, ranks)
    assert reducer.bytes_sent == (ranks - 1) * (2 * (chunk // 8 + 4) + 32)


def _saves(rank: int, folder: str) -> None:
    reducer = OneBitAllReduce()
    for step in range(3):
        reducer.all_reduce(_tensors([_dyadic(step + 10 * rank, (n,)) for n in (100, 9)]))
    state = reducer.state_dict()
    torch.save(reducer.whole_state_dict(), f"{folder}/whole-{rank}.pt")
    torch.save(state, f"{folder}/{rank}.pt")
    again = OneBitAllReduce()
    again.load_state_dict(copy.deepcopy(state))
    for mine in (reducer, again):
        tensors = _tensors([_dyadic(5 + rank, (n,)) for n in (100, 9)])
        mine.all_reduce(tensors)
        torch.save([*tensors, mine.state_dict()], f"{folder}/{mine is again}-{rank}.pt")
    one, other = (torch.load(f"{folder}/{again}-{rank}.pt") for again in (False, True))
    assert all(map(torch.equal, one[:2], other[:2]))
    for errors, others in zip(one[2]["errors"], other[2]["errors"], strict=True):
        assert all(torch.equal(errors[side], others[side]) for side in ("worker", "server"))
    refuses("own of 2", OneBitAllReduce().load_state_dict, state | {"rank": rank + 1})


def _owed(states: list[dict[str, Any]], i: int, size: int) -> np.ndarray:
    """The error of the mean of tensor i over these ranks."""
    workers = np.mean([s["errors"][i]["worker"].double().numpy() for s in states], axis=0)
    servers = [s["errors"][i]["server"] for s in states if s["errors"][i]["server"] is not None]
    return workers + (torch.cat(servers).numpy() if servers else np.zeros(size))


def _loads(rank: int, folder: str) -> None:
    reducer = OneBitAllReduce()
    reducer.load_state_dict(torch.load(f"{folder}/whole-0.pt"))
    torch.save(reducer.state_dict(), f"{folder}/new-{rank}.pt")


@pytest.mark.parametrize("ranks", [1, 4])
def test_nothing_is_dropped_where_the_number_of_ranks_changes(ranks: int, tmp_path: Any) -> None:
    with processes(2) as group:
        group.run(None, _saves, str(tmp_path))
    if ranks == 1:
        _loads(0, str(tmp_path))
    else:
        with processes(ranks) as group:
            group.run(None, _loads, str(tmp_path))
    old = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    new = [torch.load(tmp_path / f"new-{rank}.pt") for rank in range(ranks)]
    for i, size in enumerate((100, 9)):
        np.testing.assert_allclose(_owed(new, i, size), _owed(old, i, size), atol=1e-6)


# --- The optimizers -----------------------------------------------------------------------------


def _exact(x: np.ndarray) -> np.ndarray:
    return x


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(torch.from_numpy(np.array(x)).bfloat16().float())


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), (4, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
@on("ranks", None)
def test_steps_are_the_papers(rank: int, ranks: int, dtype: str, kind: str, tmp_path: Path) -> None:
    """Saved and resumed in the warm-up, just before the switch and after it."""
    made, oracle = KINDS[kind]
    rounded, of_dtype = (_exact if dtype == "float32" else _bfloat16), getattr(torch, dtype)
    arguments = {"lr": 1e-2, "freeze_step": 12, "weight_decay": 0.01}
    arrays = [rounded(_dyadic(i, shape)) for i, shape in enumerate(SHAPES)]
    expected = oracle([a.copy() for a in arrays], ranks, **arguments)
    expected.rounded = rounded
    params = [t.to(of_dtype).requires_grad_() for t in _tensors(arrays)]
    optimizer = made(params, **arguments)
    for step in range(32 if dtype == "float32" else 40):
        if step in (4, 12, 22):
            torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
            optimizer = made(params, **arguments)
            optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        grads = [
            [rounded(_dyadic(1000 * step + 10 * w + i, s)) for i, s in enumerate(SHAPES)]
            for w in range(ranks)
        ]
        for of_rank in grads if dtype == "float32" else ():  # a row not reached in the warm-up
            of_rank[1][5] *= step > 18
        for p, g in zip(params, grads[rank], strict=True):
            p.grad = torch.from_numpy(np.array(g)).to(of_dtype)
        optimizer.step()
        expected.step(grads)
        # In bfloat16 to the neighbour, at ties.
        near = (1e-5, 1e-5) if dtype == "float32" else (2**-7, 2**-12)
        for p, e in zip(params, expected.params, strict=True):
            np.testing.assert_allclose(p.detach().float().numpy(), e, *near)
    assert optimizer.is_frozen
    assert "exp_avg" not in optimizer.state[params[0]]
    assert all(optimizer.state[p]["exp_avg_sq"].dtype == torch.float32 for p in params)


def _moves_on(rank: int, kind: str, folder: str, save: bool) -> None:
    params = [t.requires_grad_() for t in _tensors([_dyadic(i, s) for i, s in enumerate(SHAPES)])]
    optimizer = KINDS[kind][0](params, freeze_step=2)
    if not save:
        optimizer.load_state_dict(torch.load(f"{folder}/whole.pt"))
    for step in range(5 if save else 1):
        for i, p in enumerate(params):
            p.grad = torch.from_numpy(_dyadic(7 * step + i + 100 * rank, SHAPES[i]))
        optimizer.step()
    if save:
        whole = optimizer.whole_state_dict()
        torch.save(whole, f"{folder}/whole.pt")
        state = optimizer.state_dict()
        state["param_groups"][0]["errors_of"] = [rank, 3]
        refuses(r"whole_state_dict\(\) of any number", optimizer.load_state_dict, state)
    else:
        assert optimizer.is_frozen
        assert optimizer.param_groups[0]["steps_taken"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_among_more_ranks(kind: str, tmp_path: Any) -> None:
    with processes(2) as group:
        group.run(None, _moves_on, kind, str(tmp_path), True)
    with processes(4) as group:
        group.run(None, _moves_on, kind, str(tmp_path), False)
    _moves_on(0, kind, str(tmp_path), False)


# --- Faults -------------------------------------------------------------------------------------


EACH_KIND = pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLAMB"])
FEW = ((33, 20), (64,), (64,), (3,))


def _params(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in FEW]


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


@EACH_KIND
@pytest.mark.parametrize("fault", ["nan", "inf", "shape", "raises", "another"])
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
        elif fault == "another":  # each rank has no gradient of one parameter, of the same size
            message = "differ|no gradient"
            params[1 + rank].grad = None
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


@EACH_KIND
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
    refuses("attach", optimizer.step)
    refuses("DistributedDataParallel", optimizer.attach, model)


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


@EACH_KIND
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


@on(2, None)
def test_shards_are_refused(rank: int) -> None:
    """FSDP2 reduces their gradients."""
    model = _model()
    fully_shard(model)
    refuses("LowPrecisionReduceScatter", optim.OneBitAdam, model.parameters(), freeze_step=2)
