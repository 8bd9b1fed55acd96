"""The samples on which attention over many tokens is checked."""

from __future__ import annotations

import torch

from torchweld.registry import OPS
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import token_mask

ATTENTION = OPS["block_sparse_attention"]


def test_a_sample_of_heads_with_layouts_of_their_own() -> None:
    layout = BlockLayout.random(
        2000, 20, block=32, num_heads=4, different_layout_per_head=True, seed=3
    )
    q = torch.randn(1, 4, 2000, 8)
    inputs = ATTENTION.inputs(q, q, q, layout)  # type: ignore[misc]
    whole = token_mask(inputs[5], inputs[6], inputs[9], 32, 2000, 2000)
    sample = ATTENTION.take_sample(inputs, 4093)
    rows = token_mask(sample[5], sample[6], sample[9], 32, 509, 509)
    last = slice(1491 // 32 * 32, 1491 // 32 * 32 + 509)
    assert torch.equal(rows[0], whole[0, [0, 3], :509, :509])
    assert torch.equal(rows[1], whole[0, [0, 3], last, last])
