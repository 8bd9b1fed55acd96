"""tp_plan and its styles: Megatron's two all-reduces, exact results, and no other gathers."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from comparing import whole_of
from processes import on
from torchweld import functional
from torchweld.distributed import CountCollectives, tp_plan
from torchweld.distributed.tensor.styles import (
    FusedColwiseParallel,
    FusedRowwiseParallel,
    GatherInput,
)
from torchweld.errors import ArgumentError

WIDTH, HIDDEN = 24, 48


@on(2)
def test_one_sum_each_way(rank: int) -> None:
    """Column, activation on the shard, row: one all-reduce forward and one backward."""
    mesh = init_device_mesh("cpu", (2,))
    row = FusedRowwiseParallel()
    for build, plan in (
        (torchweld.nn.MLP, {"fc1": FusedColwiseParallel(), "fc2": row}),
        (
            torchweld.nn.GatedMLP,
            {"": GatherInput(Replicate(), "x")}
            | {
                "gate_proj": FusedColwiseParallel(),
                "up_proj": FusedColwiseParallel(),
                "down_proj": row,
            },
        ),
    ):
        torch.manual_seed(0)
        model = build(WIDTH, HIDDEN, dtype=torch.float64)
        x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
        expected = model(x)
        expected.square().sum().backward()
        wanted = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
        model.zero_grad()
        x.grad = None
        parallelize_module(model, mesh, plan)
        with CommDebugMode() as seen, CountCollectives() as forward:
            y = model(x)
        with CommDebugMode() as seen_back, CountCollectives() as backward:
            y.square().sum().backward()
        assert seen.get_total_counts() == seen_back.get_total_counts() == 1  # torch's own count
        assert forward.calls == backward.calls == {"all-reduce": 1}
        assert forward.bytes == backward.bytes == {"all-reduce": x.nbytes}
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, wanted.pop("x"))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name])


@pytest.mark.parametrize("words", [8, 9, 1])
@on(2)
def test_an_embedding_by_rows(rank: int, words: int) -> None:
    """A sharded embedding sums its parts once, and refuses the tokens that a whole one refuses."""
    mesh = init_device_mesh("cpu", (2,))
    for options in ({}, {"padding_idx": 0}, {"padding_idx": -1}):
        torch.manual_seed(0)
        model = torch.nn.Embedding(words, WIDTH, dtype=torch.float64, **options)
        tokens = torch.randint(words, (3, 7))
        expected = model(tokens)
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        wanted = model.weight.grad
        style = FusedRowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, style)
        model.zero_grad()
        with CountCollectives() as forward:
            y = model(tokens)
        assert forward.calls == {"all-reduce": 1}
        assert forward.bytes == {"all-reduce": expected.nbytes}
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        with CountCollectives() as backward:
            y.backward(upstream)
        assert not backward.calls
        torch.testing.assert_close(model.weight.grad.full_tensor(), wanted)
        for token in (-1, words):
            with pytest.raises(IndexError, match="index out of range"):
                model(torch.tensor([[0, token]]))


@on(2)
def test_functions_on_columns_and_rows(rank: int) -> None:
    """linear_gelu on columns sends nothing; mlp one sum, and one for its input's gradient."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    shapes = [(6, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN)]
    placements = [Replicate(), Shard(0), Shard(0), Shard(1)]
    whole = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    parts = [
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip(whole, placements, strict=True)
    ]
    with CountCollectives() as counted:
        y = functional.linear_gelu(*parts[:3])
    assert not counted.calls
    assert y.placements == (Shard(1),)
    for function, order in (
        (functional.mlp, lambda x, w1, b1, w2: (x, w1, b1, w2, None)),
        (functional.gated_mlp, lambda x, w1, _, w2: (x, w1, w1, w2)),
    ):
        results, gradients = [], []
        for tensors in (whole, parts):
            wanted = [t for t in tensors if function is functional.mlp or t.ndim > 1]
            with CountCollectives() as counted:
                results.append(function(*order(*tensors)))
                loss = whole_of(results[-1]).square().mean()
                gradients.append([whole_of(g) for g in torch.autograd.grad(loss, wanted)])
        assert counted.calls["all-reduce"] == 2
        torch.testing.assert_close(results[1].full_tensor(), results[0])
        torch.testing.assert_close(gradients[1], gradients[0])


def test_what_it_does_not_know_is_named() -> None:
    with pytest.raises(ArgumentError, match="model"):
        tp_plan(torch.nn.Linear(2, 2))
