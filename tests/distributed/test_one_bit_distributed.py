"""The 1-bit collective and optimizers on gloo processes, against the papers in numpy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import one_bit
import torchweld
from processes import on, processes
from torchweld import optim
from torchweld.collectives import one_bit as collective
from torchweld.distributed import OneBitAllReduce

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
    with pytest.raises(torchweld.ArgumentError, match="own of 2"):
        OneBitAllReduce().load_state_dict(state | {"rank": rank + 1})


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


@RANKS
@pytest.mark.parametrize("kind", KINDS)
@on("ranks", None)
def test_steps_are_the_papers(rank: int, ranks: int, kind: str, tmp_path: Path) -> None:
    """Saved and resumed in the warm-up, just before the switch and after it."""
    made, oracle = KINDS[kind]
    arguments = {"lr": 1e-2, "freeze_step": 12, "weight_decay": 0.01}
    arrays = [_dyadic(i, shape) for i, shape in enumerate(SHAPES)]
    expected = oracle([a.copy() for a in arrays], ranks, **arguments)
    params = [t.requires_grad_() for t in _tensors(arrays)]
    optimizer = made(params, **arguments)
    for step in range(32):
        if step in (4, 12, 22):
            torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
            optimizer = made(params, **arguments)
            optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        grads = [
            [_dyadic(1000 * step + 10 * w + i, shape) for i, shape in enumerate(SHAPES)]
            for w in range(ranks)
        ]
        for of_rank in grads:  # a row that is never reached in the warm-up
            of_rank[1][5] *= step > 18
        for p, g in zip(params, grads[rank], strict=True):
            p.grad = torch.from_numpy(np.array(g))
        optimizer.step()
        expected.step(grads)
        for p, e in zip(params, expected.params, strict=True):
            np.testing.assert_allclose(p.detach().numpy(), e, rtol=1e-5, atol=1e-5)
    assert optimizer.is_frozen
    assert "exp_avg" not in optimizer.state[params[0]]


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(torch.from_numpy(np.array(x)).bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
@on(2, None)
def test_steps_in_bfloat16_are_the_papers(rank: int, kind: str) -> None:
    """Parameters and gradients of 16 bits; moments and errors are float32."""
    made, oracle, ranks = *KINDS[kind], 2
    arguments = {"lr": 1e-2, "freeze_step": 12, "weight_decay": 0.01}
    arrays = [_bfloat16(_dyadic(i, shape)) for i, shape in enumerate(SHAPES)]
    expected = oracle([a.copy() for a in arrays], ranks, **arguments)
    expected.rounded = _bfloat16
    params = [t.bfloat16().requires_grad_() for t in _tensors(arrays)]
    optimizer = made(params, **arguments)
    for step in range(40):
        grads = [
            [_bfloat16(_dyadic(1000 * step + 10 * w + i, s)) for i, s in enumerate(SHAPES)]
            for w in range(ranks)
        ]
        for p, g in zip(params, grads[rank], strict=True):
            p.grad = torch.from_numpy(np.array(g)).bfloat16()
        optimizer.step()
        expected.step(grads)
        for p, e in zip(params, expected.params, strict=True):  # to the neighbour, at ties
            np.testing.assert_allclose(p.detach().float().numpy(), e, rtol=2**-7, atol=2**-12)
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
        with pytest.raises(torchweld.ArgumentError, match=r"whole_state_dict\(\) of any number"):
            optimizer.load_state_dict(state)
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
