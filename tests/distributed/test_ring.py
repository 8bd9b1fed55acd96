"""Ring attention and rotary positions on several processes: equal to one process.

The sequence goes along a ring; the batch or the heads may go along another dimension.
"""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.parallel import parallelize_module

import selection
import torchweld
from comparing import assert_whole, differentiate, shares_rows
from processes import on
from refusing import refuses
from torchweld import functional
from torchweld.distributed import (
    CountCollectives,
    ring_attention,
    ring_slice,
    sequence_plan,
    tp_plan,
)
from torchweld.distributed.ring import attention
from torchweld.errors import ArgumentError
from torchweld.functional import rotary_embedding, rotary_embedding_qk
from torchweld.random import Shard
from torchweld.sparse import BlockBias, BlockLayout

BATCH, HEADS, LENGTH, HEAD, PROCESSES = 2, 4, 128, 8, 4
SHAPE, WIDTH = (BATCH, HEADS, LENGTH, HEAD), HEADS * HEAD
DENSE = BlockLayout.dense(LENGTH, block=16)
BIGBIRD = partial(BlockLayout.bigbird, LENGTH, block=16, different_layout_per_head=True)
SCORES = torch.rand(BATCH, HEADS, 8, 8, generator=torch.Generator().manual_seed(4))
# A layout, the key heads, whether it is causal, and the numbers of chunks sent to those that see
# some of them: with slices in order, and balanced.
LAYOUTS: dict[str, tuple[BlockLayout, int, bool, int, int]] = {
    "dense": (DENSE, 2, False, 12, 24),
    "causal": (DENSE, 2, True, 6, 18),
    "window": (BlockLayout.sliding_window(LENGTH, window_size=(20, 0), block=16), 2, False, 3, 11),
    "local": (BlockLayout.block_local(LENGTH, 2, block=16), 2, False, 0, 8),
    "heads": (BIGBIRD(num_heads=4), 2, False, 12, 21),
    "key heads": (BIGBIRD(num_heads=2), 2, True, 6, 9),
}
ON_TWO_DIMENSIONS = {
    **{name: LAYOUTS[name] for name in ("causal", "window")},
    "own of each head": (BIGBIRD(num_heads=4), 4, False, 0, 0),
    "own of each sequence": (
        *(BlockLayout.from_scores(SCORES, 3, block=16, seq_len=LENGTH), 4, False, 0, 0),
    ),
}
SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.0], [0.3, 0.2, -0.1, 1.0]])
EVERY = {"dropout_p": 0.3, "alibi_slopes": SLOPES.double()}  # and sinks, and a table
SOME = {"softcap": 3.0, "alibi_slopes": SLOPES[0]}
BACKENDS = ("cpu", "eager")
CASES = [
    *(
        (name, backend, balanced, None, of)
        for name, backend, balanced, of in selection.combine(LAYOUTS, BACKENDS, (False, True), "es")
    ),
    *(
        (name, backend, balanced, dim, "d")
        for name, backend, dim, balanced in selection.combine(
            ON_TWO_DIMENSIONS, BACKENDS, (0, 1), (False, True)
        )
    ),
]


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))


def _sum_over_ranks(values: list[int]) -> list[int]:
    total = torch.tensor(values)
    dist.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "backend", "balanced", "dim", "of"), CASES)
@on(PROCESSES)
def test_equals_one_process(
    rank: int, name: str, backend: str, balanced: bool, dim: int | None, of: str
) -> None:
    """Every argument of attention; with `dim`, two rings have halves of the batch or the heads."""
    layout, key_heads, causal, *sends = (LAYOUTS if dim is None else ON_TWO_DIMENSIONS)[name]
    wide = of == "e" or (of == "d" and not balanced)
    dtype = torch.float64 if wide else torch.float32
    generator = torch.Generator().manual_seed(1)
    deep, has_sinks, has_table = 12 if of == "e" else 8, of != "s", of == "e"
    shapes = [SHAPE, *[(BATCH, key_heads, LENGTH, d) for d in (HEAD, deep)], (HEADS,), (HEADS, 5)]
    drawn = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    *whole, sinks, table = drawn
    grad = torch.randn((*SHAPE[:3], deep), generator=generator, dtype=dtype)
    padding = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    options: dict[str, Any] = {**(SOME if of == "s" else EVERY), "causal": causal, "seed": 3}
    options |= {"key_padding_mask": padding, "sinks": sinks if has_sinks else None}
    options["alibi_slopes"] = options["alibi_slopes"].to(dtype)
    bias = BlockBias.relative(table, torch.arange(41) * 3 % 5) if has_table else None
    q, k, v = whole
    expected, lse = functional.block_sparse_attention(
        q, k, v, layout, bias=bias, return_lse=True, **options
    )
    sums = torch.randn(SHAPE[:3], generator=generator, dtype=lse.dtype) * lse.isfinite()
    inputs = [*whole, *[sinks] * has_sinks, *[table] * has_table]
    wanted = torch.autograd.grad((expected, lse), inputs, (grad, sums))
    mesh = None if dim is None else _mesh()
    group = mesh.get_group("ring") if mesh else None
    place = mesh.get_local_rank("tensor") if mesh else 0

    def half(x: torch.Tensor, at: int | None) -> torch.Tensor:
        return x.detach() if at is None else x.detach().chunk(2, at)[place]

    def mine(x: torch.Tensor) -> torch.Tensor:
        return ring_slice(half(x, dim), 2, group, balanced=balanced)

    parts = [mine(x).requires_grad_() for x in whole]
    if has_sinks:
        options["sinks"] = half(sinks, 0 if dim == 1 else None).requires_grad_()
    if dim is not None:
        options["alibi_slopes"] = half(options["alibi_slopes"], dim)
        offsets = [place * n // 2 if at == dim else 0 for at, n in enumerate(SHAPE)]
        options["shard"] = Shard(SHAPE, offsets)
    if dim == 0:
        options["key_padding_mask"] = half(padding, 0)
    own_table = table.detach().requires_grad_()
    bias = bias and bias.with_table(own_table)
    q, k, v = parts
    with CountCollectives() as forward:
        y, its = ring_attention(
            *(q, k, v, layout, group), bias=bias, balanced=balanced, return_lse=True, **options
        )
    with CountCollectives() as backward:
        torch.autograd.backward((y, its), (mine(grad), mine(sums)))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if wide else {}
    torch.testing.assert_close(y, mine(expected), **tolerance)
    torch.testing.assert_close(its, mine(lse), **tolerance)
    for part, gradient in zip(parts, wanted[:3], strict=True):
        torch.testing.assert_close(part.grad, mine(gradient), **tolerance)
    for leaf, gradient in zip(
        [*[options["sinks"]] * has_sinks, *[own_table] * has_table], wanted[3:], strict=True
    ):
        dist.all_reduce(leaf.grad, group=group if dim else None)
        gradient = half(gradient, 0 if dim == 1 else None)
        torch.testing.assert_close(leaf.grad, gradient, **tolerance)
    if dim is None:
        sent = _sum_over_ranks([c.bytes["send"] for c in (forward, backward)])
        # Keys and values go out twice, and their gradients come back once.
        size = sends[balanced] * (parts[1].nbytes + parts[2].nbytes) // (1 + balanced)
        assert sent == [size, 2 * size], sends
        if not balanced:
            counts = _sum_over_ranks([c.calls["send"] for c in (forward, backward)])
            assert counts == [sends[0], 2 * sends[0]]


@on(PROCESSES)
def test_balanced_processes_have_equal_work(rank: int) -> None:
    """There are 36 blocks below and on the diagonal."""
    work = []
    for balanced in (False, True):
        _, parts, *_ = attention._divide_layout(DENSE, True, rank, PROCESSES, balanced)
        work.append(sum(part.count for part in parts.values()))
    every: list = [None] * PROCESSES
    dist.all_gather_object(every, work)
    assert every == [[3, 9], [7, 9], [11, 9], [15, 9]]


class _Attention(torch.nn.Module):
    """With rotary positions, slopes, and torch's dropout; or causal, with learnt sinks."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        each = {"num_heads": HEADS, "different_layout_per_head": True}
        layout = BlockLayout.dense if sinks else partial(BlockLayout.bigbird, **each)
        layout = partial(layout, block=16)
        self.attention = torchweld.nn.BlockSparseAttention(layout, 0.3, causal=sinks)
        self.register_buffer("slopes", SLOPES[0])
        self.sinks = torch.nn.Parameter(torch.randn(HEADS)) if sinks else None
        self.drop, self.rotary = torch.nn.Dropout(0.2), torchweld.nn.RotaryEmbedding(HEAD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers)
        y = self.attention(*self.rotary(q, k), v, alibi_slopes=self.slopes, sinks=self.sinks)
        return self.drop(self.o_proj(y.transpose(1, 2).flatten(2)))


class _Block(torch.nn.Module):
    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.norm = torchweld.nn.RMSNorm(WIDTH)
        self.attention = _Attention(sinks)
        self.mlp = torchweld.nn.GatedMLP(WIDTH, 48)
        self.add = torchweld.nn.BiasDropoutAdd(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return self.add(self.mlp(x), None, x)


class _Model(torch.nn.Module):
    """A layer and a dropout outside of the blocks too."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.first, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2)
        self.blocks = torch.nn.ModuleList(_Block(sinks) for _ in range(2))
        self.norm = torchweld.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@shares_rows
@pytest.mark.parametrize("plan", ["sequence", "tensor", "tensor and sequence"])
@on(PROCESSES)
def test_a_model_equals_one_process(rank: int, plan: str) -> None:
    """A plan of tensors refuses sinks, which it would have to cut."""
    torch.manual_seed(0)
    has_tensors, sequence_parallel = plan != "sequence", plan == "tensor and sequence"
    model = _Model(sinks=not has_tensors)
    x, grad = torch.randn(2, BATCH, LENGTH, WIDTH)
    x.requires_grad_()
    torch.manual_seed(1)
    expected = model(x)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], grad)
    mesh = _mesh() if has_tensors else init_device_mesh("cpu", (PROCESSES,))
    group = mesh.get_group(0)
    made = tp_plan(model, sequence_parallel, ring=True) if has_tensors else sequence_plan(model)
    parallelize_module(model, mesh, made)
    part = ring_slice(x.detach(), 1, group).requires_grad_()
    torch.manual_seed(1)
    with CountCollectives() as counted:
        y = model(part)
    # Two sums and a slice of keys and values per block. With a sequence along tensor too, the first
    # block cuts it and the last gathers it.
    sums = {"all-gather": 4 + 1, "reduce-scatter": 4} if sequence_parallel else {"all-reduce": 4}
    assert not has_tensors or counted.calls == {**sums, "send": 2}
    torch.testing.assert_close(y, ring_slice(expected, 1, group))
    with CountCollectives() as counted:
        y.backward(ring_slice(grad, 1, group))
    # All gradients are summed along the ring together. In a block, norm's and o_proj.bias's are
    # also summed along tensor if the sequence is sharded there.
    reduces = 2 if sequence_parallel else sums["all-reduce"] + 1
    assert not has_tensors or counted.calls == {**sums, "all-reduce": reduces, "send": 4}
    tolerance = {"rtol": 1e-5, "atol": 1e-4}  # sums of 256 rows of numbers around one
    torch.testing.assert_close(part.grad, ring_slice(wanted[0], 1, group), **tolerance)
    for (name, parameter), gradient in zip(model.named_parameters(), wanted[1:], strict=True):
        assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, **tolerance)


@on(PROCESSES)
def test_what_does_not_fit_is_named(rank: int) -> None:
    """All processes refuse it; else one would wait for another that has raised an error."""
    q, layout = torch.zeros(1, 1, 16, 8), BlockLayout.dense(64, block=16)
    refuses("q and k", ring_attention, q[0], q[0], q[0], layout)
    refuses("2 chunk", ring_attention, q, q, q, layout, balanced=True)
    refuses("sinks", ring_attention, q, q, q, layout, sinks=torch.zeros(2))
    with pytest.raises(ArgumentError, match=r"key_padding_mask is .*; accepted: .*64"):
        ring_attention(q, q, q, layout, key_padding_mask=torch.zeros(1, 16, dtype=torch.bool))
    refuses("multiple of 8 chunks", ring_slice, torch.zeros(1, 12), balanced=True)
    refuses("keys", layout.part, (0, 32), (8, 32))
    refuses("heads", BIGBIRD(num_heads=4).of_heads, (0, 1), (2, 5))
    q = torch.zeros(1, 1, 24, 8)
    for layout in (BlockLayout.dense(96, block=16), BlockLayout.dense(64, block=16)):
        refuses("layout", ring_attention, q, q, q, layout)
    mesh, model, at = _mesh(), _Model(), "blocks.0.attention.attention"
    plan = tp_plan(model, ring=True)
    refuses("device_mesh", parallelize_module, model, mesh["tensor"], {at: plan[at]})
    model.blocks[1].attention.attention = torchweld.nn.SoftmaxDropout()
    refuses(r"blocks\.1\.attention", tp_plan, model, ring=True)
    q, group = torch.zeros(1, 2, 32, 8), mesh.get_group("ring")
    for shard in (
        Shard((1, 4, 64), (0, 0, 0)),
        Shard((1, 4, 128, 8), (0, 0, 0, 0)),
        Shard((1, 4, 64, 8), (0, 3, 0, 0)),
        Shard((1, 4, 64, 8), (0, 0, 32, 0)),
    ):
        refuses("shard", ring_attention, q, q, q, layout, group, shard=shard)
    own = BlockLayout.bigbird(64, block=16, num_heads=4, different_layout_per_head=True)
    refuses("layout", ring_attention, q, q, q, own, group)


# --- Rotary embeddings ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@on(2)
def test_rotary_shards(rank: int, backend: str) -> None:
    """Queries and keys with different numbers of heads, sharded by heads."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
    weight, table = torch.randn(8, generator=generator), torch.randn(7, 4, generator=generator)
    positions = torch.tensor([[0, 1, 2, 0, 1], [6, 3, 0, 0, 5]])

    def place(t: torch.Tensor, at: int | None) -> Any:
        return distribute_tensor(t, mesh, [Replicate() if at is None else Cut(at)])

    norms: dict[str, Any] = {"norm_eps": 1e-6, "norm_plus_one": True}

    def rotate(angles: Any, positions: Any, q: Any, k: Any, w: Any) -> Any:
        own: Any = norms | {"q_norm_weight": w, "k_norm_weight": w}
        return rotary_embedding_qk(q, k, angles.cos(), angles.sin(), positions, **own)

    everywhere = place(table, None), place(positions, None)
    for at in (1, 0):  # heads, batch
        expected = differentiate(partial(rotate, table, positions), [q, k, weight])
        shards = [place(q, at), place(k, at), place(weight, None)]
        found = differentiate(partial(rotate, *everywhere), shards)
        assert all(mine.placements == (Cut(at),) for mine in found[:2])
        assert_whole(found, expected)

    angles = place(table[:5], None)
    across: dict[str, Any] = {"norm_eps": 1e-6, "norm_across_heads": True}
    whole = rotary_embedding(q, table[:5].cos(), table[:5].sin(), **across)
    assert_whole([rotary_embedding(place(q, 0), angles.cos(), angles.sin(), **across)], [whole])


@pytest.mark.parametrize("heads", [4, 3])
@on(2)
def test_a_norm_across_shared_heads(rank: int, heads: int) -> None:
    """A sum of squares a token travels, and back its gradient; uneven heads too."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, heads, 5, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(heads * 8, generator=generator, dtype=torch.float64)
    table = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    for seq_dim, cut in ((-2, 1), (-3, 2)):
        x = x if seq_dim == -2 else x.transpose(1, 2).contiguous()
        for more in ({}, {"norm_plus_one": True}):
            how: dict[str, Any] = {"norm_eps": 1e-6, "norm_across_heads": True, "seq_dim": seq_dim}

            def rotate(x: Any, weight: Any, how: Any = how | more) -> Any:
                return rotary_embedding(x, table.cos(), table.sin(), norm_weight=weight, **how)

            places = (Cut(cut), Replicate())
            shards = [
                distribute_tensor(t, mesh, [at]) for t, at in zip((x, weight), places, strict=True)
            ]
            found = differentiate(rotate, shards)
            assert found[0].placements == (Cut(cut),)
            assert_whole(found, differentiate(rotate, [x, weight]))
    with CountCollectives() as count:
        rotary_embedding(shards[0], table.cos(), table.sin(), **how)
    assert dict(count.bytes) == {"all-reduce": 2 * 5 * 8}  # batch, tokens, bytes
    half = distribute_tensor(x.bfloat16(), mesh, [Cut(cut)])
    y = rotary_embedding(half, table.cos().bfloat16(), table.sin().bfloat16(), **how)
    plain = rotary_embedding(x.bfloat16(), table.cos().bfloat16(), table.sin().bfloat16(), **how)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.full_tensor(), plain)
    with pytest.raises(torchweld.ArgumentError, match="norm_weight is of shape"):
        rotary_embedding(half, table.cos(), table.sin(), norm_weight=weight[1:].bfloat16(), **how)


@on(2)
def test_positions_of_balanced_chunks(rank: int) -> None:
    """Process r has chunks r and 2p - 1 - r; ring_slice gives their positions."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    rotary, layout = torchweld.nn.RotaryEmbedding(8), BlockLayout.dense(64, block=16)
    expected = functional.block_sparse_attention(
        rotary(q, k)[0], rotary(q, k)[1], v, layout, causal=True
    )
    positions = ring_slice(torch.arange(64), 0, balanced=True)
    own = [ring_slice(t, 2, balanced=True) for t in (q, k, v)]
    q, k = rotary(own[0], own[1], positions)
    found = ring_attention(q, k, own[2], layout, causal=True, balanced=True)
    torch.testing.assert_close(found, ring_slice(expected, 2, balanced=True))
