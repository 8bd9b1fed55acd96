"""Layouts from FlexAttention's masks and back, packed rows of a batch, and rows for key heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import torchweld
from torchweld import functional
from torchweld.sparse import BlockLayout

attention: Callable[..., Any] = functional.block_sparse_attention
LENGTHS = torch.tensor([150, 200])
MASKS: dict[str, tuple[Callable[..., Any], int | None, int | None]] = {
    "causal": (lambda b, h, q, k: q >= k, None, None),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 40), None, None),
    "prefix": (lambda b, h, q, k: (k < 30) | (q >= k), None, None),
    "documents": (lambda b, h, q, k: q // 70 == k // 70, None, None),
    "heads": (lambda b, h, q, k: (q + k + h) % 3 > 0, None, 2),
    "padding": (lambda b, h, q, k: k < LENGTHS[b], 2, None),
    "both": (lambda b, h, q, k: (q >= k + 20 * h) & (k < LENGTHS[b]), 2, 2),
    "nothing": (lambda b, h, q, k: q < 0, None, None),
    "everything": (lambda b, h, q, k: q >= 0, None, None),
}


def _dense(mask: Callable[..., Any], batch: int, heads: int, queries: int, keys: int) -> Any:
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    found = mask(b, h, torch.arange(queries)[:, None], torch.arange(keys))
    return found.expand(batch, heads, queries, keys)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("size", [128, 64, (128, 32), 96])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_both_ways(name: str, size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, and FlexAttention's own results over the mask that comes back."""
    mask, batch, heads = MASKS[name]
    queries, keys = 200, 260
    theirs = create_block_mask(mask, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=size)
    layout = BlockLayout.from_block_mask(theirs)
    expected = _dense(mask, batch or 1, heads or 1, queries, keys)
    assert torch.equal(layout.to_mask().expand_as(expected), expected)
    back = layout.to_block_mask()
    assert isinstance(back, BlockMask)
    assert (layout.block, layout.block) == back.BLOCK_SIZE
    found = _dense(back.mask_mod, layout.batch, layout.heads, queries, keys)
    assert torch.equal(found, layout.to_mask())
    again = BlockLayout.from_block_mask(back)
    assert torch.equal(again.to_mask(), layout.to_mask())
    assert again.count == layout.count
    if size == 128:
        q = torch.randn(2, 2, queries, 16)
        k, v = torch.randn(2, 2, 2, keys, 16)
        with torchweld.use_backend("cpu"):
            ours = attention(q, k, v, layout)
        torch.testing.assert_close(ours, flex_attention(q, k, v, block_mask=back))
        # Dynamo need not trace their own mask.
        untraced = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        monkeypatch.setattr(torch.nn.attention.flex_attention, untraced, True)
        torch.testing.assert_close(ours, flex_attention(q, k, v, block_mask=theirs))


def test_a_dense_layout_and_a_smaller_block() -> None:
    dense = BlockLayout.dense((100, 140), block=32)
    assert BlockLayout.from_block_mask(dense.to_block_mask()).to_mask().all()
    fine = create_block_mask(MASKS["causal"][0], None, 2, 96, 96, device="cpu", BLOCK_SIZE=32)
    assert BlockLayout.from_block_mask(fine, block=16).block == 16


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    causal=st.sampled_from([False, True, "top_left"]),
    window=st.sampled_from([None, (10, -1), (-1, 3), (20, 5), (0, 0)]),
    block=st.sampled_from([16, 64]),
    beyond=st.integers(0, 40),
    flat=st.booleans(),
)
def test_packed_rows(
    rows: list[list[tuple[int, int]]],
    causal: Any,
    window: Any,
    block: int,
    beyond: int,
    flat: bool,
) -> None:
    """Property: token by token as written out, with padding that neither sees nor is seen."""
    rows = rows[:1] if flat else rows
    most = max(len(row) for row in rows)
    ends = torch.zeros(2, len(rows), most + 1, dtype=torch.int32)
    for i, row in enumerate(rows):
        each = torch.tensor(row + [(0, 0)] * (most - len(row)))
        ends[:, i, 1:] = each.cumsum(0).T
    lengths = [int(x.max()) + beyond for x in ends]
    expected = torch.zeros(len(rows), 1, *lengths, dtype=torch.bool)
    for i in range(len(rows)):
        for n in range(most):
            (q0, q1), (k0, k1) = (x[i, n : n + 2].tolist() for x in ends)
            query, key = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
            away = key - query - (0 if causal == "top_left" else (k1 - k0) - (q1 - q0))
            seen = torch.ones(away.shape, dtype=torch.bool)
            if causal:
                seen &= away <= 0
            if window is not None:
                seen &= (window[0] < 0) | (away >= -window[0])
                seen &= (window[1] < 0) | (away <= window[1])
            expected[i, 0, q0:q1, k0:k1] = seen
    given = ends[:, 0] if flat else ends
    layout = BlockLayout.documents(
        *given, block=block, causal=causal, window_size=window, seq_len=tuple(lengths)
    )
    assert torch.equal(layout.to_mask(), expected)


def test_packed_rows_in_attention() -> None:
    """Two rows of two and three sequences, with gradients that stay within them."""
    ends = torch.tensor([[0, 40, 90, 90], [0, 10, 50, 100]])
    layout = BlockLayout.documents(ends, block=32, causal=True, seq_len=110)
    q, k, v = torch.randn(3, 2, 2, 110, 8).requires_grad_().unbind()
    with torchweld.use_backend("cpu"):
        y = attention(q, k, v, layout)
    assert not y[0, :, 90:].any()
    assert not y[1, :, 100:].any()
    for row, (a, b) in ((0, (40, 90)), (1, (50, 100))):
        own = [x[row : row + 1, :, a:b] for x in (q, k, v)]
        alone = attention(*own, BlockLayout.dense(50, block=32), causal=True)
        torch.testing.assert_close(y[row : row + 1, :, a:b], alone)


def test_one_row_of_a_layout_for_each_key_head() -> None:
    blocks = torch.rand(2, 2, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    layout = BlockLayout.from_blocks(blocks, block=16, seq_len=100)
    wide = BlockLayout.from_blocks(blocks.repeat_interleave(3, 1), block=16, seq_len=100)
    q = torch.randn(2, 6, 100, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 100, 8).requires_grad_().unbind()
    for backend in ("cpu", "eager"):
        results = []
        with torchweld.use_backend(backend):
            for given in (layout, wide):
                y = attention(q, k, v, given)
                results.append([y, *torch.autograd.grad(y.sin().sum(), [q, k, v])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
