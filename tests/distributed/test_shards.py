"""Contract 9: ops, plans and fused models on shards, exactly, with declared collectives only."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import torchweld
from comparing import assert_grads, assert_whole, differentiate, shares_rows, whole_of
from fusable import WIDTH as FUSABLE
from fusable import FeedForward, Gated, NewGELU, PlainRMSNorm
from oracle import TORCH, is_floating
from processes import on
from torchweld import functional, numerics
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.distributed import CountCollectives
from torchweld.distributed.tensor.styles import (
    FusedColwiseParallel,
    FusedRowwiseParallel,
    GatherInput,
)
from torchweld.errors import ArgumentError
from torchweld.fusion.graph.regions import Region
from torchweld.registry import OPS, materialize
from torchweld.sparse import BlockBias, BlockLayout
from words import list_ops

# Batch norms are left out: their documentation says what one of a shard computes.
# Tokens are routed all at once: experts_mlp gathers shards.
WHOLE = {"batch_norm_act", "linear_batch_norm_act", "experts_mlp"}
NAMES = sorted(OPS.keys() - WHOLE)
GEMMS = {"linear_act", "mlp", "gated_mlp"}


def _with_gradients(op: Any, inputs: list[Any], place: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Results, gradients, and what both directions sent, of arguments that `place` places."""
    given = list(inputs)
    leaves = []
    for at, value in enumerate(inputs):
        name = op.forward_signature.arguments[at]
        if isinstance(value, torch.Tensor) and name != "seed":
            given[at] = place(value.detach())
            if is_floating(value) and name in op.differentiable:
                given[at] = given[at].requires_grad_()
                leaves.append(given[at])
    with CountCollectives() as forward:
        results = as_tuple(call(op, *given))
    parts = [r.to_local() if isinstance(r, DTensor) else r for r in results]
    total = sum(part.square().sum() for part in parts if part.requires_grad)
    with CountCollectives() as backward:
        gradients = torch.autograd.grad(total, leaves)
    return results, gradients, (forward, backward)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=shares_rows if n in GEMMS else ()) for n in NAMES]
)
@on(2)
def test_shards_need_no_collective(rank: int, name: str) -> None:
    mesh, op = init_device_mesh("cpu", (2,)), OPS[name]
    inputs = materialize(op.sized((4, 6), (16,)), torch.float64)
    if op.seed_at is not None:
        assert op.draws(inputs)
    x = inputs[0]
    rows = x.ndim - op.sharding.columns(*inputs)
    assert rows > 0
    expected, wanted, _ = _with_gradients(op, inputs, lambda value: value)
    for dim in range(rows):

        def place(value: torch.Tensor, dim: int = dim) -> Any:
            at = dim - (x.ndim - value.ndim)
            cut = at >= 0 and value.shape[at] == x.shape[dim]
            return distribute_tensor(value, mesh, [Shard(at) if cut else Replicate()])

        found, gradients, sent = _with_gradients(op, inputs, place)
        forward, backward = sent
        assert not forward.calls, f"dimension {dim}: {dict(forward.calls)}"
        # A replicated argument has a partial gradient; GEMMs inside an op leave reducing it to the
        # caller.
        sums = [g for g in gradients if g.placements != (Shard(dim),)]
        assert backward.calls.keys() <= {"all-reduce"}
        assert backward.calls["all-reduce"] <= len(sums)
        assert backward.bytes["all-reduce"] <= sum(8 * g.numel() for g in sums)
        assert all(result.placements == (Shard(dim),) for result in found)
        assert_whole([*found, *gradients], [*expected, *wanted])


@on(2)
def test_parts_of_rows_are_gathered(rank: int) -> None:
    """Norms do not serve parts of a row: torch's own gathers them too."""
    mesh, op = init_device_mesh("cpu", (2,)), OPS["layer_norm"]
    inputs = materialize(op.sized((4, 6), (16,)), torch.float32)
    inputs[0] = distribute_tensor(inputs[0], mesh, [Shard(2)])
    with CountCollectives() as counted:
        y = as_tuple(call(op, *inputs))[0]
    assert y.placements == (Replicate(),)
    assert counted.calls == {"all-gather": 1}


# --- Options, and placements of torch's own -------------------------------------------------------

# The CPU kernels, and the automatic choice.
BACKENDS = pytest.mark.parametrize("backend", ["cpu", None])
WIDTH, ROWS = 256, 64


@BACKENDS
@on(2)
def test_dropout_on_shards(rank: int, backend: str | None) -> None:
    """Sharded by heads, queries or batches, dropout equals one device's, also if causal."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(2)) > 0.2
    bias = torch.randn(4, 1, 9, generator=torch.Generator().manual_seed(3))

    def run(scores: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        biased = torchweld.functional.softmax_dropout(scores, bias, causal=True, p=0.4)
        return biased + torchweld.functional.softmax_dropout(scores, mask, scale=0.5, p=0.3)

    expected = differentiate(run, [whole])
    for placement in (Shard(0), Shard(1), Shard(2), Shard(3), Replicate()):
        y, grad = differentiate(run, [distribute_tensor(whole, mesh, [placement])])
        assert y.placements == ((Replicate(),) if placement == Shard(3) else (placement,))
        assert_whole([y, grad], expected)


@BACKENDS
@on(4)
def test_strided_shards_equal_one_process(rank: int, backend: str | None) -> None:
    """As made by FSDP2 over tensor parallelism, and with gaps; norms too."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        dropped = torchweld.functional.softmax_dropout(x, p=0.4)
        return torchweld.functional.layer_norm(dropped, [16])

    expected = differentiate(run, [whole])
    strided = _StridedShard(0, split_factor=2)
    layouts = [[strided, Shard(0)]]
    if TORCH >= (2, 13):  # older ones cannot redistribute shards with gaps
        layouts += [[strided, Replicate()], [strided, Shard(1)]]
    for placements in layouts:
        y, grad = differentiate(run, [distribute_tensor(whole, mesh, placements)])
        cut = [getattr(placement, "dim", None) for placement in y.placements]
        assert cut == [getattr(placement, "dim", None) for placement in placements]
        assert_whole([y, grad], expected)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torchweld.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torchweld.nn.RMSNorm(WIDTH),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05).add_(0.1)
    return model


def _batch() -> torch.Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@BACKENDS
@on(2)
def test_norms_of_a_sharded_sequence(rank: int, backend: str | None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    plan = {"1": SequenceParallel(), "3": SequenceParallel()}
    norms = parallelize_module(model, mesh, plan)
    x = model[0](_batch())
    y = norms[1](DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    z = norms[3](DTensor.from_local(model[2](y.full_tensor()).chunk(2, 1)[rank], mesh, [Shard(1)]))
    assert z.placements == (Shard(1),)
    expected = _model()
    reference = expected(_batch())
    torch.testing.assert_close(z.full_tensor(), reference, **numerics.SUMMED)
    # The last norm's gradient is a sum over shards.
    z.full_tensor().square().mean().backward()
    reference.square().mean().backward()
    gradient = norms[3].weight.grad.full_tensor()
    torch.testing.assert_close(gradient, expected[3].weight.grad, rtol=1e-4, atol=1e-6)


# --- Attention over a layout ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@on(2)
def test_shards_are_parts_of_the_whole(rank: int, backend: str) -> None:
    """Heads with their own layouts, sinks and slopes, keys shared by heads; dropout too."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    sinks, slopes = torch.randn(4, generator=generator), torch.rand(4, generator=generator)
    padding = torch.rand(2, 50, generator=generator) < 0.2
    layouts = [
        BlockLayout.bigbird(50, block=16, num_heads=4, different_layout_per_head=True),
        BlockLayout.sliding_window(50, window_size=(20, 0), block=16),
        BlockLayout.from_scores(
            torch.rand(2, 4, 4, 4, generator=generator), 2, block=16, seq_len=50
        ),
    ]

    def run(*x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        options = {"sinks": sinks, "alibi_slopes": slopes, "key_padding_mask": padding}
        attention: Any = torchweld.functional.block_sparse_attention
        parts = [attention(*x, layout, dropout_p=0.3, **options) for layout in layouts]
        return parts[0] + parts[1] + parts[2]

    for key_heads in (4, 2):
        shapes = [(2, heads, 50, 8) for heads in (4, key_heads, key_heads)]
        whole = [torch.randn(s, generator=generator) for s in shapes]
        expected, *wanted = differentiate(run, whole)
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            parts = [distribute_tensor(x, mesh, [placement]) for x in whole]
            y, *grads = differentiate(run, parts)
            kept = Replicate() if placement == Shard(2) else placement
            assert y.placements == (kept,)
            torch.testing.assert_close(y.full_tensor(), expected)
            assert_whole(grads, wanted, **numerics.CHAINED_SMALL)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@on(2)
def test_shards_with_biases(rank: int, backend: str) -> None:
    """Numbers of pairs and tables, sharded by heads and replicated, and layouts by key head."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    attention: Any = torchweld.functional.block_sparse_attention
    blocks = torch.rand(2, 2, 4, 4, generator=generator) < 0.6
    layout = BlockLayout.from_blocks(blocks, block=16, seq_len=50)
    buckets = torch.arange(31) % 5
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    q, k, v = draw(2, 4, 50, 8), draw(2, 2, 50, 8), draw(2, 2, 50, 12)

    def spread(x: torch.Tensor, *placements: Any) -> Any:
        return distribute_tensor(x, mesh, placements)

    for shape in ((2, 4, 50, 50), (1, 4, 50, 50), (2, 1, 50, 50), (50, 50), (4, 5), (1, 5)):
        leaf = draw(*shape)
        by_table = shape[-1] == 5

        def run(q: Any, k: Any, v: Any, bias: Any, by_table: bool = by_table) -> torch.Tensor:
            bias = BlockBias.relative(bias, buckets) if by_table else bias
            return attention(q, k, v, layout, bias=bias)

        expected, *wanted = differentiate(run, [q, k, v, leaf])
        for own in (Shard(0), Shard(1)):
            fits = shape[0] == 4 and by_table and own == Shard(1)
            for of_leaf in (Replicate(), *([Shard(0)] if fits else [])):
                parts = [*(spread(x, own) for x in (q, k, v)), spread(leaf, of_leaf)]
                y, *grads = differentiate(run, parts)
                assert y.placements == (own,)
                torch.testing.assert_close(y.full_tensor(), expected)
                assert_whole(grads, wanted, **numerics.CHAINED_SMALL)
    parts = [spread(x, Shard(1)) for x in (q, k, v)]
    table = draw(4, 6).requires_grad_()
    with pytest.raises(ArgumentError, match=r"table is a DTensor .* sharded by heads"):
        attention(*parts, layout, bias=BlockBias.relative(spread(table, Shard(1)), buckets))
    for bias in (BlockBias.relative(table, buckets), draw(2, 4, 50, 50).requires_grad_()):
        with pytest.raises(ArgumentError, match="bias is a plain tensor"):
            attention(*parts, layout, bias=bias)
    for bias in (
        spread(draw(50, 50), Replicate()),
        BlockBias.relative(spread(table, Replicate()), buckets),
    ):
        with pytest.raises(ArgumentError, match="bias"):
            attention(q, k, v, layout, bias=bias)


# --- tp_plan and its styles -----------------------------------------------------------------------


FEATURES, HIDDEN = 24, 48


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
        model = build(FEATURES, HIDDEN, dtype=torch.float64)
        x = torch.randn(6, FEATURES, dtype=torch.float64, requires_grad=True)
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
        model = torch.nn.Embedding(words, FEATURES, dtype=torch.float64, **options)
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
        torch.testing.assert_close(y, expected, **numerics.SAME)
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
    shapes = [(6, FEATURES), (HIDDEN, FEATURES), (HIDDEN,), (FEATURES, HIDDEN)]
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


# --- fuse() before and after wrappers -------------------------------------------------------------


LAYERS = 1
PLAN = {"1.fc1": ColwiseParallel, "1.fc2": RowwiseParallel} | {
    "3.gate": ColwiseParallel,
    "3.up": ColwiseParallel,
    "3.down": RowwiseParallel,
}
_GATHERS: dict[str, Any] = {"output_layouts": Replicate()}


def _layer() -> nn.Module:
    parts = (nn.LayerNorm(FUSABLE), FeedForward(NewGELU()).eval(), PlainRMSNorm(), Gated(nn.SiLU()))
    return nn.Sequential(*parts)


def _fusable() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[_layer() for _ in range(LAYERS)])


def _sharded(model: Any) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _sharded_finely(model: Any) -> nn.Module:
    for layer in model:
        for part in layer:
            fully_shard(part)
    return fully_shard(model)


def _tensor_parallel(model: Any) -> nn.Module:
    return _parallel(model, {name: style() for name, style in PLAN.items()})


def _rows_before_the_activation(model: Any) -> nn.Module:
    """Each process has a part of the sums that the activation takes."""
    rows = RowwiseParallel(input_layouts=Replicate())
    return _parallel(model, {"1.fc1": rows, "1.fc2": ColwiseParallel(**_GATHERS)})


def _gathered(model: Any) -> nn.Module:
    return _parallel(model, {"1.fc1": ColwiseParallel(**_GATHERS)})


def _parallel(model: Any, plan: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        parallelize_module(layer, mesh, plan)
    return model


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


@pytest.mark.parametrize(
    ("distribute", "fuse_first"),
    [
        *itertools.product((_sharded, _replicated, _tensor_parallel), (False, True)),
        (_sharded_finely, False),
        (_rows_before_the_activation, False),
        (_gathered, True),
    ],
)
@on(2)
def test_results_are_as_they_were(rank: int, distribute: Any, fuse_first: bool) -> None:
    x = torch.randn(6, 8, FUSABLE, generator=torch.Generator().manual_seed(2))
    plain = _fusable()
    expected = plain(x)
    expected.square().mean().backward()
    model = distribute(torchweld.fuse(_fusable()) if fuse_first else _fusable())
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    torchweld.fuse(model)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    y = model(x)
    torch.testing.assert_close(whole_of(y), expected, **numerics.CHAINED_SMALL)
    y.square().mean().backward()
    assert_grads(model, plain, rtol=1e-4, atol=1e-6)
    assert list_ops(model)
    before = sum(isinstance(module, FSDPModule) for module in model.modules())
    torchweld.unfuse(model)
    assert not any(isinstance(module, Region) for module in model.modules())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == before
    torch.testing.assert_close(whole_of(model(x)), expected, **numerics.CHAINED_SMALL)
