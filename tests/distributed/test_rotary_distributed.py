"""rotary_embedding and rotary_embedding_qk on shards, on two real processes."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from comparing import assert_grads, grads_of, shares_rows
from processes import on
from torchweld.distributed import (
    CountCollectives,
    ring_attention,
    ring_slice,
    sequence_plan,
    tp_plan,
)
from torchweld.functional import block_sparse_attention, rotary_embedding, rotary_embedding_qk
from torchweld.sparse import BlockLayout


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@on(2)
def test_shards(rank: int, backend: str) -> None:
    """Queries and keys with different numbers of heads, sharded by heads."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
    weight, table = torch.randn(8, generator=generator), torch.randn(7, 4, generator=generator)
    positions = torch.tensor([[0, 1, 2, 0, 1], [6, 3, 0, 0, 5]])

    def place(t: torch.Tensor, at: int | None) -> Any:
        return distribute_tensor(t, mesh, [Replicate() if at is None else Shard(at)])

    norms: dict[str, Any] = {"norm_eps": 1e-6, "norm_plus_one": True}
    for at in (1, 0):  # heads, batch
        given = [t.clone().requires_grad_() for t in (q, k, weight)]
        shards = [place(q, at), place(k, at), place(weight, None)]
        shards = [t.detach().requires_grad_() for t in shards]

        def rotate(q: Any, k: Any, w: Any, angles: Any, positions: Any) -> Any:
            own: Any = norms | {"q_norm_weight": w, "k_norm_weight": w}
            return rotary_embedding_qk(q, k, angles.cos(), angles.sin(), positions, **own)

        expected = rotate(*[*given, table, positions])
        found = rotate(*[*shards, place(table, None), place(positions, None)])
        sum(y.square().sum() for y in expected).backward()
        sum(y.square().sum() for y in found).backward()
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.placements == (Shard(at),)
            torch.testing.assert_close(mine.full_tensor(), theirs)
        for mine, theirs in zip(shards, given, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)

    angles = place(table[:5], None)
    across: dict[str, Any] = {"norm_eps": 1e-6, "norm_across_heads": True}
    found = rotary_embedding(place(q, 0), angles.cos(), angles.sin(), **across)
    expected = rotary_embedding(q, table[:5].cos(), table[:5].sin(), **across)
    torch.testing.assert_close(found.full_tensor(), expected)


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
            one = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            shards = [
                distribute_tensor(x, mesh, [Shard(cut)]).detach().requires_grad_(),
                distribute_tensor(weight, mesh, [Replicate()]).detach().requires_grad_(),
            ]
            results = []
            for given in (one, shards):
                results.append(
                    rotary_embedding(
                        given[0], table.cos(), table.sin(), norm_weight=given[1], **how, **more
                    )
                )
            assert results[1].placements == (Shard(cut),)
            torch.testing.assert_close(results[1].full_tensor(), results[0])
            for y in results:
                y.sin().sum().backward()
            for mine, theirs in zip(shards, one, strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    with CountCollectives() as count:
        rotary_embedding(shards[0].detach(), table.cos(), table.sin(), **how)
    assert dict(count.bytes) == {"all-reduce": 2 * 5 * 8}  # batch, tokens, bytes
    half = distribute_tensor(x.bfloat16(), mesh, [Shard(cut)])
    y = rotary_embedding(half, table.cos().bfloat16(), table.sin().bfloat16(), **how)
    plain = rotary_embedding(x.bfloat16(), table.cos().bfloat16(), table.sin().bfloat16(), **how)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.full_tensor(), plain)
    with pytest.raises(torchweld.ArgumentError, match="norm_weight is of shape"):
        rotary_embedding(half, table.cos(), table.sin(), norm_weight=weight[1:].bfloat16(), **how)


class _Attention(torch.nn.Module):
    """Attention whose queries and keys are rotated by their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(16, 16, bias=False) for _ in range(4)
        )
        self.rotary = torchweld.nn.RotaryEmbedding(8, max_positions=64)
        layout = BlockLayout.dense(64, block=16)
        self.attention = torchweld.nn.BlockSparseAttention(layout, causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(q, k)
        return self.o_proj(self.attention(q, k, v).transpose(1, 2).flatten(-2))


class _Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([_Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=shares_rows)])
@on("count")
def test_positions_along_a_ring(rank: int, count: int) -> None:
    """Each process has a slice of the tokens; the plan gives its rotation their positions."""
    torch.manual_seed(0)
    model, x = _Blocks(), torch.randn(2, 64, 16)
    expected = model(x)
    expected.sin().sum().backward()
    wanted = grads_of(model)
    model.zero_grad()
    if count > 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
        plan, group = tp_plan(model, ring=True), mesh.get_group("ring")
    else:
        mesh = init_device_mesh("cpu", (2,))
        plan, group = sequence_plan(model), mesh.get_group()
    parallelize_module(model, mesh, plan)
    y = model(ring_slice(x, 1, group))
    torch.testing.assert_close(y, ring_slice(expected, 1, group))
    y.sin().sum().backward()
    assert_grads(model, wanted, rtol=1e-4, atol=1e-5)


@on(2)
def test_positions_of_balanced_chunks(rank: int) -> None:
    """Process r has chunks r and 2p - 1 - r; ring_slice gives their positions."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    rotary, layout = torchweld.nn.RotaryEmbedding(8), BlockLayout.dense(64, block=16)
    expected = block_sparse_attention(rotary(q, k)[0], rotary(q, k)[1], v, layout, causal=True)
    positions = ring_slice(torch.arange(64), 0, balanced=True)
    own = [ring_slice(t, 2, balanced=True) for t in (q, k, v)]
    q, k = rotary(own[0], own[1], positions)
    found = ring_attention(q, k, own[2], layout, causal=True, balanced=True)
    torch.testing.assert_close(found, ring_slice(expected, 2, balanced=True))
