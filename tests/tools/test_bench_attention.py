"""The benchmark's rivals of block_sparse_attention compute the right result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention
from torch.nn.attention import flex_attention

from torchweld.bench.attention import _NAMES, block_mask, dense, dense_by
from torchweld.ops.attention.block_sparse import OP
from torchweld.sparse import BlockLayout


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_has_the_layouts_blocks(causal: bool) -> None:
    """Its lists of blocks of 128, and its token mask, are the layout's, head by head."""
    layout = BlockLayout.random(
        544, 2, block=32, num_heads=2, different_layout_per_head=True, seed=1
    )
    x = torch.randn(1, 2, 544, 16)
    assert OP.inputs is not None
    arguments = OP.inputs(x, x, x, layout, causal=causal)
    mask = block_mask(flex_attention, dict(zip(_NAMES, arguments, strict=True)))
    y = flex_attention.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
    seen = layout.to_mask() & (torch.ones(544, 544).tril().bool() if causal else True)
    padded = torch.nn.functional.pad(seen, (0, 96, 0, 96)).view(1, 2, 5, 128, 5, 128)
    assert torch.equal(mask.to_dense().bool(), padded.any(5).any(3))
    # A full block runs without the mask function: all of its pairs that exist are seen.
    there = torch.nn.functional.pad(seen, (0, 96, 0, 96), value=True).view(1, 2, 5, 128, 5, 128)
    full = torch.zeros(1, 2, 5, 6, dtype=torch.bool)
    listed = torch.arange(5) < mask.full_kv_num_blocks[..., None]
    full.scatter_(3, torch.where(listed, mask.full_kv_indices, 5).long(), value=True)
    assert not (full[..., :5] & ~there.all(5).all(3)).any()


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
def test_sdpa_by_a_backend(backend: str) -> None:
    """The CPU has these two; one that cannot serve raises an error."""
    x = torch.randn(1, 2, 64, 16)
    assert OP.inputs is not None
    arguments = OP.inputs(x, x, x, BlockLayout.dense(64), scale=0.2)
    y, _ = dense_by(backend)(torch.nn.attention)(*arguments)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
    with pytest.raises(RuntimeError):
        dense_by("CUDNN_ATTENTION")(torch.nn.attention)(*arguments)


def test_sdpa_is_dense() -> None:
    x = torch.randn(1, 2, 64, 16)
    assert OP.inputs is not None
    arguments = OP.inputs(x, x, x, BlockLayout.dense(64), causal=True, scale=0.2)
    y, _ = dense(torch.nn.functional)(*arguments)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
