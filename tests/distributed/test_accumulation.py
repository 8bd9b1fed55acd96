"""Gradients of plans: one exchange after the last of several backwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from comparing import NEAR, assert_grads, grads_of, has_neighbours, shares_rows
from processes import on
from stack import MODELS
from stack_seams import keep
from torchweld import optim
from torchweld.distributed import (
    CountCollectives,
    no_sync,
    ring_slice,
    sequence_plan,
    tp_plan,
    zero3,
)
from torchweld.distributed.pipelines import stages
from torchweld.errors import ArgumentError
from transformer import PreNorm, Transformer, make_batch

SETTINGS = replace(MODELS["GPT"], layers=2, dropout=0.0)


def _model() -> Any:
    torch.manual_seed(0)
    return Transformer(SETTINGS).double()


def _sequence(model: Any) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, True))


def _ring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, sequence_plan(model))
    return mesh.get_group(0)


def _tensor_ring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
    parallelize_module(model, mesh, tp_plan(model, True, ring=True))
    return mesh.get_group("ring")


def _sharded(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], tp_plan(model, True))
    zero3(model, mesh["data"])


def _loss(model: Any, number: int, group: Any = None, blocks: bool = True) -> torch.Tensor:
    """The sum over this process's slice of a microbatch; its last one can leave out the blocks."""
    tokens, targets = make_batch(SETTINGS, 2, number)
    first = 0
    if group is not None:
        first = int(ring_slice(torch.arange(SETTINGS.length), 0, group)[0])
        tokens, targets = (ring_slice(x, 1, group) for x in (tokens, targets))
    logits = model(tokens, first) if blocks else model.head(model.norm(model.token(tokens)))
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


ROWS = {_sequence: "TP + SP", _ring: "ring SP", _tensor_ring: "TP + SP x ring SP"}


@pytest.mark.parametrize(
    ("cut", "count", "reduces", "skips"),
    [
        (_sequence, 2, 1, False),
        (_sequence, 2, 1, True),
        pytest.param(_ring, 2, 1, False, marks=shares_rows),
        pytest.param(_ring, 2, 1, True, marks=shares_rows),
        pytest.param(_tensor_ring, 4, 2, False, marks=shares_rows),
    ],
)
@on("count")
def test_one_exchange(
    rank: int, cut: Callable[[Any], Any], count: int, reduces: int, skips: bool
) -> None:
    """The last of three backward passes exchanges; a fourth adds to what was exchanged."""
    one, many = _model(), _model()
    group = cut(many)
    counts, sizes = [], []
    for number in range(4):
        blocks = number != 2 or not skips
        _loss(one, number, blocks=blocks).backward()
        with no_sync(many) if number < 2 else nullcontext(), CountCollectives() as counted:
            _loss(many, number, group, blocks).backward()
        counts.append(counted.calls["all-reduce"])
        sizes.append(counted.bytes["all-reduce"])
        if number > 1:
            assert all(p.grad.placements == p.placements for p in many.parameters())
            assert_grads(many, one, **NEAR)
        if number == 2 and not skips:
            pairs = [
                (p.grad, q.grad) for p, q in zip(many.parameters(), one.parameters(), strict=True)
            ]
            keep(f"three microbatches, {ROWS[cut]}: the last one", pairs, sent=counted.bytes)
    if not skips:
        assert counts == [counts[0], counts[0], counts[0] + reduces, counts[0] + reduces]
        parts = [p for name, p in one.named_parameters() if group is not None or ".norm" in name]
        if cut in (_sequence, _ring):
            assert sizes[2] - sizes[1] == sum(p.nbytes for p in parts)


@on(4)
def test_under_fsdp(rank: int) -> None:
    """no_sync reaches FSDP2's modules too.

    Both replicas have the same microbatches, so the mean of their gradients is one replica's.
    """
    one, many = _model(), _model()
    _sharded(many)
    for number in range(3):
        _loss(one, number).backward()
        with no_sync(many) if number < 2 else nullcontext(), CountCollectives() as counted:
            _loss(many, number).backward()
        of_streams = 4 * SETTINGS.layers
        of_gradients = SETTINGS.layers + 1 if number == 2 else 0
        assert counted.calls["reduce-scatter"] == of_streams + of_gradients
    assert_grads(many, one, **NEAR)


class _Delta(torch.nn.Module):
    """A layer whose weight is a sum of two parameters, whose gradients are one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.delta = (torch.nn.Parameter(torch.eye(width).double()) for _ in "12")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.delta)


@pytest.mark.parametrize("sequence", [False, True])
@on(2)
def test_gradients_are_tensors_of_their_own(rank: int, sequence: bool) -> None:
    one, many = _model(), _model()
    for model in (one, many):
        model.blocks["0"].norm1 = torch.nn.Sequential(_Delta(SETTINGS.width))
    parallelize_module(many, init_device_mesh("cpu", (2,)), tp_plan(many, sequence))
    for number in range(3):
        for model in (one, many):
            with no_sync(model) if number < 2 else nullcontext():
                _loss(model, number).backward()
    assert_grads(many, one, **NEAR)


@on(2)
def test_parts_are_not_stepped(rank: int) -> None:
    """A step inside no_sync is an error, and no step of some rows' gradients."""
    model = _model()
    _sequence(model)
    optimizer = optim.AdamW(model.parameters())
    with no_sync(model):
        _loss(model, 0).backward()
    before = [p.detach().to_local().clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match="a gradient"):
        optimizer.step()
    assert all(
        torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)
    )


@on(2)
def test_offload_waits_for_sums(rank: int) -> None:
    """Parts stay on the device until they are added up, also where gradients leave early."""
    one, many = _model(), _model()
    _sequence(many)
    steps = [
        optim.SGD(one.parameters(), 0.1),
        optim.Offload(optim.SGD(many.parameters(), 0.1), release_gradients=True),
    ]
    for number in range(3):
        for model, optimizer in zip((one, many), steps, strict=True):
            _loss(model, number).div(100).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    # Stages of plain linear layers fail alike.
    "schedule",
    ["1f1b", pytest.param("zbvzerobubble", marks=has_neighbours)],
)
@on(4)
def test_a_pipeline_exchanges_once(rank: int, schedule: stages.Name) -> None:
    """One exchange for all microbatches of a step, and gradients of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    torch.manual_seed(0)
    blocks = [PreNorm(SETTINGS).double() for _ in range(4)]
    whole = copy.deepcopy(torch.nn.Sequential(*blocks))
    stream = torch.randn(8, SETTINGS.length, SETTINGS.width, dtype=torch.float64)
    (whole(stream).square().sum() / 4).backward()
    pipe = stages.pipeline(
        blocks,
        schedule,
        4,
        lambda y, _: y.square().sum(),
        (stream[:2],),
        costs=[1.0] * 4,
        wrap=lambda part: parallelize_module(part, mesh["tensor"], tp_plan(part, True)),
        group=mesh.get_group("pipe"),
    )
    with CountCollectives() as counted:
        pipe.schedule.step(
            *(stream,) if pipe.is_first else (), target=stream if pipe.is_last else None
        )
    wanted = grads_of(whole)
    part: Any
    for part in pipe.parts:
        assert all(p.grad.placements == p.placements for p in part.parameters())
        assert_grads(part, wanted, **NEAR)
    # A number that says whether the batch divides, and the gradients of each part.
    assert counted.calls["all-reduce"] == 1 + len(pipe.parts)
