"""Masks and biases as functions, against FlexAttention in eager and SDPA with a dense bias.

Layouts come from its masks, and go back to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import torchweld
from torchweld import functional, numerics
from torchweld.sparse import BlockBias, BlockLayout

attention: Callable[..., Any] = functional.block_sparse_attention

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 40, 56, 8
Mask = Callable[[Any, Any, Any, Any], Any]
_GENERATOR = torch.Generator().manual_seed(0)


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_GENERATOR)


LENGTHS = torch.tensor([33, 56])  # the keys that count in each row of the batch
DOCUMENTS = torch.tensor([0] * 13 + [1] * 20 + [2] * 23)
CHANCE = torch.rand(BATCH, HEADS, QUERIES, KEYS, generator=_GENERATOR) < 0.3
OF_KEYS = torch.rand(KEYS, generator=_GENERATOR) < 0.5
RADII = torch.tensor([2, 5, 11, 30])  # of each head
AHEAD = KEYS - QUERIES


def _near(q: Any, k: Any, row: int, radius: int) -> Any:
    """Whether two tokens are near on a plane, in rows of `row`."""
    down, right = q // row - k // row, q % row - k % row
    return (down.abs() <= radius) & (right.abs() <= radius)


# Every query sees its own key, so that no row is empty.
MASKS: dict[str, Mask] = {
    "all": lambda b, h, q, k: q >= 0,
    "causal": lambda b, h, q, k: k <= q,
    "causal, bottom right": lambda b, h, q, k: k <= q + AHEAD,
    "later": lambda b, h, q, k: k >= q,
    "window": lambda b, h, q, k: (q - k).abs() <= 6,
    "causal window": lambda b, h, q, k: (k <= q) & (q - k < 9),
    "dilated": lambda b, h, q, k: ((q - k).abs() <= 16) & ((q - k) % 4 == 0),
    "strided": lambda b, h, q, k: ((q - k).abs() < 4) | (k % 8 == 7),
    "prefix": lambda b, h, q, k: (k < 12) | (k <= q),
    "prefix by row": lambda b, h, q, k: (k < 5 + 9 * b) | (k <= q),
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "causal documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (k <= q),
    "chunks": lambda b, h, q, k: (q // 10 == k // 10) & (k <= q),
    "padding": lambda b, h, q, k: (k < LENGTHS[b]) | (k == q),
    "windows by head": lambda b, h, q, k: (q - k).abs() <= RADII[h],
    "every other by head": lambda b, h, q, k: (k % 2 == h % 2) | (k == q),
    "global": lambda b, h, q, k: (k < 3) | (q < 3) | ((q - k).abs() <= 2),
    "plane": lambda b, h, q, k: _near(q, k, 8, 1),
    "causal plane": lambda b, h, q, k: _near(q, k, 8, 2) & (k <= q),
    "chance": lambda b, h, q, k: CHANCE[b, h, q, k] | (k == q),
    "chosen keys": lambda b, h, q, k: OF_KEYS[k] | (k == q),
    "all but its own": lambda b, h, q, k: k != q,
    "sieve": lambda b, h, q, k: (q & k) == 0,
    "halves": lambda b, h, q, k: (q < 20) ^ (k >= 28),
}
assert len(MASKS) == 24

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE, PLANE, ONE = _draw(HEADS, 9), _draw(HEADS, 12), _draw(1, 5)
BUCKETS = (torch.arange(31) * 5) % 9
PLACES = ((torch.arange(7 * 15) * 5) % 12).view(7, 15)
PAIRS, ROWS, COLUMNS = _draw(BATCH, HEADS, QUERIES, KEYS), _draw(QUERIES, 1), _draw(KEYS)
LEFT, RIGHT = _draw(HEADS, QUERIES, 3), _draw(HEADS, KEYS, 3)
OFFSET = QUERIES - KEYS  # ours counts distances from the bottom right


def _line(table: torch.Tensor, h: Any, q: Any, k: Any, buckets: torch.Tensor = BUCKETS) -> Any:
    middle = len(buckets) // 2
    return table[h, buckets[(k - q + OFFSET + middle).clamp(0, len(buckets) - 1)]]


def _plane(h: Any, q: Any, k: Any) -> Any:
    q = q - OFFSET
    return PLANE[h, PLACES[(k // 8 - q // 8 + 3).clamp(0, 6), k % 8 - q % 8 + 7]]


def _t5(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _line(TABLE, h, q, k)


SHORT = torch.arange(5)
BY_LINE, BY_PLANE = (
    {"bias": BlockBias.relative(*of)} for of in ((TABLE, BUCKETS), (PLANE, PLACES))
)
# The number that a score gets, its mask, and our arguments; None: the numbers of all pairs.
BIASES: dict[str, tuple[Mask, str, dict[str, Any] | None]] = {
    "ALiBi": (
        lambda b, h, q, k: -SLOPES[h] * (q - OFFSET - k).abs(),
        *("causal, bottom right", {"alibi_slopes": SLOPES}),
    ),
    "distance": (lambda b, h, q, k: (k - q) * 0.05, "window", None),
    "T5": (_t5, "all", BY_LINE),
    "T5's decoder": (_t5, "causal", BY_LINE),
    "T5 in documents": (_t5, "documents", BY_LINE),
    "a table of all heads": (
        lambda b, h, q, k: _line(ONE, 0 * h, q, k, SHORT),
        *("windows by head", {"bias": BlockBias.relative(ONE, SHORT)}),
    ),
    "Swin": (lambda b, h, q, k: _plane(h, q, k), "all", BY_PLANE),
    "Swin with shifts": (lambda b, h, q, k: _plane(h, q, k), "halves", BY_PLANE),
    "pairs": (lambda b, h, q, k: PAIRS[b, h, q, k], "all", {"bias": PAIRS}),
    "pairs of heads": (lambda b, h, q, k: PAIRS[0, h, q, k], "chance", {"bias": PAIRS[:1]}),
    "pairs of rows": (lambda b, h, q, k: PAIRS[b, 1, q, k], "dilated", {"bias": PAIRS[:, 1:2]}),
    "keys": (lambda b, h, q, k: COLUMNS[k], "padding", {"bias": COLUMNS[None]}),
    "queries": (lambda b, h, q, k: ROWS[q, 0 * k], "strided", {"bias": ROWS}),
    "product": (
        lambda b, h, q, k: (LEFT[h, q] * RIGHT[h, k]).sum(-1),
        *("prefix by row", {"bias": LEFT @ RIGHT.mT}),
    ),
    "wave": (lambda b, h, q, k: torch.cos((q - k) * 0.7) + h, "causal plane", None),
    "excluded": (
        lambda b, h, q, k: torch.where((k % 3 == 1) & (k != q), -torch.inf, PAIRS[b, h, q, k]),
        *("global", None),
    ),
}
assert len(MASKS) + len(BIASES) == 40


# Blocks of queries and keys; ours are squares of 16, 32, 64 or 128.
FLEX_SIZES: list[Any] = [32, 128, (32, 16), 48, 64, (64, 128), 16]
UNTRACED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
SDPA: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Any, mask: Any) -> Any:
    """FlexAttention, which has no backward pass on a CPU."""
    with torch.no_grad():
        return flex_attention(q.detach(), k.detach(), v.detach(), score, mask, enable_gqa=True)


def _grid() -> tuple[torch.Tensor, ...]:
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    return tuple(
        torch.arange(n).view([-1 if i == at else 1 for i in range(4)]) for at, n in enumerate(sizes)
    )


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, QUERIES), (KEY_HEADS, KEYS), (KEY_HEADS, KEYS))
    return [
        torch.randn(BATCH, *shape, WIDTH, generator=generator).requires_grad_() for shape in shapes
    ]


def _assert_goes_back(layout: BlockLayout, seen: torch.Tensor) -> BlockMask:
    """The mask that comes back has the layout's tokens, blocks and number of blocks."""
    assert torch.equal(layout.to_mask().expand_as(seen), seen)
    back = layout.to_block_mask()
    assert isinstance(back, BlockMask)
    assert (layout.block, layout.block) == back.BLOCK_SIZE
    b, h, q, k = _grid()
    found = back.mask_mod(b[: layout.batch], h[:, : layout.heads], q, k)
    assert torch.equal(found.expand_as(seen), seen)
    again = BlockLayout.from_block_mask(back)
    assert torch.equal(again.to_mask(), layout.to_mask())
    assert again.count == layout.count
    return back


@pytest.mark.parametrize("name", [*MASKS, *BIASES])
def test_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results as FlexAttention's, with its own mask and with ours; gradients as SDPA's."""
    add, of_mask, given = BIASES.get(name, (None, name, {}))
    mask = MASKS[of_mask]
    sizes = {"batch_size": BATCH, "num_heads": HEADS}
    layout = BlockLayout.from_mask_fn(mask, (QUERIES, KEYS), block=16, **sizes)
    size = FLEX_SIZES[[*MASKS, *BIASES].index(name) % len(FLEX_SIZES)]
    theirs = create_block_mask(mask, BATCH, HEADS, QUERIES, KEYS, "cpu", BLOCK_SIZE=size)
    seen = mask(*_grid()).expand(BATCH, HEADS, QUERIES, KEYS)
    _assert_goes_back(BlockLayout.from_block_mask(theirs, **sizes), seen)
    ours = _assert_goes_back(layout, seen)
    zeros = torch.zeros(BATCH, HEADS, QUERIES, KEYS)
    numbers = zeros if add is None else add(*_grid()) + zeros
    given = {"bias": numbers} if given is None else given
    q, k, v = _inputs()
    with torchweld.use_backend("cpu"):
        y = attention(q, k, v, layout, **given)
    score = None if add is None else lambda z, b, h, q, k: z + add(b, h, q, k)
    # Dynamo need not trace each mask for two results: test_queries_that_see_nothing lets it.
    monkeypatch.setattr(torch.nn.attention.flex_attention, UNTRACED, True)
    for block_mask in (theirs, ours):
        flex = _flex(q, k, v, score, block_mask)
        torch.testing.assert_close(y, flex, **numerics.SUMMED)
    wide = [x.double() for x in (q, k, v)]
    dense = numbers.double().masked_fill(~seen, -torch.inf)
    exact: Any = SDPA(*wide, dense, enable_gqa=True)
    torch.testing.assert_close(y.double(), exact, **numerics.SUMMED)
    grads = (torch.autograd.grad(x.sin().sum(), [q, k, v]) for x in (y, exact))
    torch.testing.assert_close(*grads, **numerics.SUMMED)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["causal", "chance", "documents"])
def test_queries_that_see_nothing(name: str) -> None:
    """Their rows are zeros, as FlexAttention's."""
    mask: Mask = lambda b, h, q, k: MASKS[name](b, h, q, k) & (q % 7 != 3)  # noqa: E731
    layout = BlockLayout.from_mask_fn(
        mask, (QUERIES, KEYS), block=16, batch_size=BATCH, num_heads=HEADS
    )
    q, k, v = _inputs()
    with torchweld.use_backend("cpu"):
        y = attention(q, k, v, layout, softcap=2.0)
    score = lambda z, b, h, q, k: 2 * torch.tanh(z / 2)  # noqa: E731
    flex = _flex(q, k, v, score, layout.to_block_mask())
    torch.testing.assert_close(y, flex, **numerics.SUMMED)
    assert not y[:, :, 3::7].any()
    for grad in torch.autograd.grad(y.sin().sum(), [q, k, v]):
        assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "batch", "heads"),
    [("prefix by row", BATCH, None), ("windows by head", None, HEADS), ("causal", None, None)],
)
def test_masks_of_one_row_or_head(name: str, batch: int | None, heads: int | None) -> None:
    theirs = create_block_mask(MASKS[name], batch, heads, QUERIES, KEYS, "cpu", BLOCK_SIZE=32)
    layout = BlockLayout.from_block_mask(theirs)
    assert (layout.batch, layout.heads) == (batch or 1, heads or 1)
    _assert_goes_back(layout, MASKS[name](*_grid()).expand(BATCH, HEADS, QUERIES, KEYS))
    fine = BlockLayout.from_block_mask(theirs, block=16)
    assert fine.block == 16
    assert torch.equal(fine.to_mask(), layout.to_mask())


def test_layouts_of_nothing_and_of_everything() -> None:
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    _assert_goes_back(BlockLayout.dense((QUERIES, KEYS), block=32), torch.ones(sizes).bool())
    nothing = create_block_mask(lambda b, h, q, k: q < 0, None, None, QUERIES, KEYS, "cpu")
    _assert_goes_back(BlockLayout.from_block_mask(nothing), torch.zeros(sizes).bool())
