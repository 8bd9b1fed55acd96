"""The benchmark's rivals of block_sparse_attention compute the right result."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from torchweld.bench.attention import _NAMES, block_mask, dense
from torchweld.ops.attention.block_sparse import OP
from torchweld.sparse import BlockLayout


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_has_the_layouts_blocks(causal: bool) -> None:
    """Its lists of blocks and its token mask equal the layout's, head by head."""
    layout = BlockLayout.random(
        160, 2, block=32, num_heads=2, different_layout_per_head=True, seed=1
    )
    x = torch.randn(1, 2, 160, 16)
    assert OP.inputs is not None
    arguments = OP.inputs(x, x, x, layout, causal=causal)
    mask = block_mask(flex_attention, dict(zip(_NAMES, arguments, strict=True)))
    y = flex_attention.flex_attention(x, x, x, block_mask=mask)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
    seen = layout.to_mask() & (torch.ones(160, 160).tril().bool() if causal else True)
    wanted = seen.view(1, 2, 5, 32, 5, 32).any(5).any(3)
    assert torch.equal(mask.to_dense().bool(), wanted)


def test_sdpa_is_dense() -> None:
    x = torch.randn(1, 2, 64, 16)
    assert OP.inputs is not None
    arguments = OP.inputs(x, x, x, BlockLayout.dense(64), causal=True, scale=0.2)
    y, _ = dense(torch.nn.functional)(*arguments)
    torch.testing.assert_close(y, OP.reference(*arguments)[0])
