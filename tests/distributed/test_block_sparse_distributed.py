"""Contract 9: attention over a layout on shards of batch and of heads, on two real processes."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchweld
from processes import on
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockBias, BlockLayout


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
        whole = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
        expected = run(*whole)
        wanted = torch.autograd.grad(expected.square().sum(), whole)
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            parts = [
                distribute_tensor(x.detach(), mesh, [placement]).requires_grad_() for x in whole
            ]
            y = run(*parts)
            kept = Replicate() if placement == Shard(2) else placement
            assert y.placements == (kept,)
            torch.testing.assert_close(y.full_tensor(), expected)
            y.square().sum().backward()
            for part, grad in zip(parts, wanted, strict=True):
                torch.testing.assert_close(part.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)


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
    draw = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    q, k, v = draw(2, 4, 50, 8), draw(2, 2, 50, 8), draw(2, 2, 50, 12)

    def spread(x: torch.Tensor, *placements: Any) -> Any:
        return distribute_tensor(x.detach(), mesh, placements).requires_grad_()

    for shape in ((2, 4, 50, 50), (1, 4, 50, 50), (2, 1, 50, 50), (50, 50), (4, 5), (1, 5)):
        leaf = draw(*shape)
        by_table = shape[-1] == 5
        as_bias = lambda x, t=by_table: BlockBias.relative(x, buckets) if t else x  # noqa: E731
        expected = attention(q, k, v, layout, bias=as_bias(leaf))
        wanted = torch.autograd.grad(expected.square().sum(), [q, k, v, leaf])
        for own in (Shard(0), Shard(1)):
            fits = shape[0] == 4 and by_table and own == Shard(1)
            for of_leaf in (Replicate(), *([Shard(0)] if fits else [])):
                parts = [*(spread(x, own) for x in (q, k, v)), spread(leaf, of_leaf)]
                y = attention(*parts[:3], layout, bias=as_bias(parts[3]))
                assert y.placements == (own,)
                torch.testing.assert_close(y.full_tensor(), expected)
                y.square().sum().backward()
                for part, grad in zip(parts, wanted, strict=True):
                    found = part.grad.full_tensor()
                    torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-5)
    parts = [spread(x, Shard(1)) for x in (q, k, v)]
    table = draw(4, 6)
    with pytest.raises(ArgumentError, match=r"table is a DTensor .* sharded by heads"):
        attention(*parts, layout, bias=BlockBias.relative(spread(table, Shard(1)), buckets))
    for bias in (BlockBias.relative(table, buckets), draw(2, 4, 50, 50)):
        with pytest.raises(ArgumentError, match="bias is a plain tensor"):
            attention(*parts, layout, bias=bias)
    for bias in (
        spread(draw(50, 50), Replicate()),
        BlockBias.relative(spread(table, Replicate()), buckets),
    ):
        with pytest.raises(ArgumentError, match="bias"):
            attention(q, k, v, layout, bias=bias)
