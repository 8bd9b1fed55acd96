"""Contract 9: attention over a layout on shards of batch and of heads, on two real processes."""

from __future__ import annotations

import pytest
import torch

import torchweld
from processes import processes
from torchweld.sparse import BlockLayout


def _on_shards(rank: int) -> None:
    """Heads with their own layouts, sinks and slopes, keys shared by heads; dropout too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
        attention = torchweld.functional.block_sparse_attention
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
def test_shards_are_parts_of_the_whole(backend: str) -> None:
    with processes(2) as two:
        two.run(backend, _on_shards)
