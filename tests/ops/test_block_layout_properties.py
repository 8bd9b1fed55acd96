"""What holds for the layouts of all builders and operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from exact_attention import assert_as_exact, attend_exactly, draw
from torchweld.functional import block_sparse_attention
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import pack, token_mask, unpack

HEADS, BATCH = 2, 2
Make = Callable[[tuple[int, int], int, str], BlockLayout]


def _builder(name: str, **given_: Any) -> Make:
    def make(lengths: tuple[int, int], block: int, attention: str) -> BlockLayout:
        return getattr(BlockLayout, name)(lengths, block=block, attention=attention, **given_)

    return make


def _each_head(name: str, **given_: Any) -> Make:
    return _builder(name, num_heads=HEADS, different_layout_per_head=True, **given_)


# Builders of patterns, which are described by lengths only.
PATTERNS: dict[str, Make] = {
    "dense": lambda lengths, block, _: BlockLayout.dense(lengths, block=block),
    "window": _builder("sliding_window", num_sliding_window_blocks=2),
    "window of tokens": _builder("sliding_window", window_size=(21, 9)),
    "block_local": _builder("block_local", num_local_blocks=2),
    "strided": _builder("strided", stride=3),
    "dilated": _builder("dilated", num_sliding_window_blocks=3, dilation=2),
    "random": _builder("random", num_random_blocks=2),
    "random of heads": _each_head("random", num_random_blocks=1),
    "global_tokens": lambda lengths, block, _: BlockLayout.global_tokens(
        lengths, [token for token in (1, 17, 18, 90) if token < lengths[1]], block=block
    ),
    "fixed": _builder("fixed", num_local_blocks=3, num_global_blocks=1),
    "fixed, horizontal": _builder("fixed", num_local_blocks=2, horizontal_global_attention=True),
    "fixed of heads": _builder(
        *("fixed",), num_local_blocks=3, num_heads=HEADS, num_different_global_patterns=2
    ),
    "variable": _each_head(
        *("variable",), local_window_blocks=[2, 1], global_block_indices=[1], num_random_blocks=1
    ),
    "variable, horizontal": _builder(
        *("variable",), global_block_indices=[2], horizontal_global_attention=True
    ),
    "bigbird": _builder("bigbird", num_random_blocks=1),
    "bigbird of heads": _each_head("bigbird", num_random_blocks=2),
    "longformer": _builder("longformer", global_block_indices=[0, 2]),
}


def _sizes(lengths: tuple[int, int], block: int) -> tuple[int, int]:
    return -(-lengths[0] // block), -(-lengths[1] // block)


def _from_scores(*leading: int) -> Make:
    def make(lengths: tuple[int, int], block: int, _: str) -> BlockLayout:
        """Causal top-k, and some scores that are no numbers."""
        scores = torch.randn(*leading, *_sizes(lengths, block))
        scores[torch.ones(scores.shape).triu(1).bool()] = -torch.inf
        scores[torch.rand(scores.shape) < 0.1] = torch.nan
        return BlockLayout.from_scores(scores, 2, block=block, seq_len=lengths)

    return make


def _from_blocks(*leading: int) -> Make:
    return lambda lengths, block, _: BlockLayout.from_blocks(
        torch.rand(*leading, *_sizes(lengths, block)) < 0.4, block=block, seq_len=lengths
    )


def _documents(lengths: tuple[int, int], block: int, attention: str) -> BlockLayout:
    bounds = [torch.tensor([0, n // 3, n // 2, n]) for n in lengths]
    return BlockLayout.documents(*bounds, block=block, causal=attention == "unidirectional")


# Builders that are given data as well.
DATA: dict[str, Make] = {
    "scores": _from_scores(),
    "scores of heads": _from_scores(HEADS),
    "scores of the batch": _from_scores(BATCH, 1),
    "blocks": _from_blocks(),
    "blocks of all heads": _from_blocks(BATCH, HEADS),
    "documents": _documents,
    "function": lambda lengths, block, _: BlockLayout.from_mask_fn(
        lambda b, h, q, k: (q // 7 + k // 5 + h) % 3 == 0, lengths, block=block, num_heads=HEADS
    ),
}
BUILDERS = PATTERNS | DATA


def _part(layout: BlockLayout) -> BlockLayout:
    block = layout.block
    ranges = [(min(block, n // block * block), n) for n in (layout.queries, layout.keys)]
    return layout.part(*ranges)


# Each with what it does to a token mask and to another one.
Mask = torch.Tensor
OPERATORS: dict[str, tuple[Callable[..., BlockLayout], Callable[..., Mask]]] = {
    "itself": (lambda a, b: a, lambda a, b, _: a),
    "|": (lambda a, b: a | b, lambda a, b, _: a | b),
    "&": (lambda a, b: a & b, lambda a, b, _: a & b),
    "causal": (
        lambda a, b: a.causal(),
        lambda a, b, _: a.tril(a.shape[3] - a.shape[2]),
    ),
    "part": (
        lambda a, b: _part(a),
        lambda a, b, block: a[
            :,
            :,
            min(block, a.shape[2] // block * block) :,
            min(block, a.shape[3] // block * block) :,
        ],
    ),
    "of_heads": (
        lambda a, b: a.of_heads((0, a.batch), (a.heads - 1, a.heads)),
        lambda a, b, _: a[:, -1:],
    ),
}


def _columns_mask(layout: BlockLayout) -> Mask:
    """The token mask that the columns describe."""
    _, _, columns, column_entries, masks = layout.lists
    # The transpose's masks have keys as rows, so transpose the bits too.
    flipped = pack(unpack(masks, layout.block).mT.contiguous()) if len(masks) else masks
    turned = token_mask(columns, column_entries, flipped, layout.block, layout.keys, layout.queries)
    return turned.mT


def _check_lists(
    rows: torch.Tensor,
    row_entries: torch.Tensor,
    columns: torch.Tensor,
    column_entries: torch.Tensor,
    masks: torch.Tensor,
    block: int,
) -> None:
    """Full blocks come before partial ones, the longest lines first, and masks are unique."""
    for numbers in (rows, row_entries, columns, column_entries, masks):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    for lines in (rows, columns):
        which, begin, partial, end = lines.unbind(-1)
        assert torch.equal(which.sort(-1).values, torch.arange(lines.shape[2]).expand(which.shape))
        assert (begin <= partial).all()
        assert (partial <= end).all()
        assert ((end - begin).diff(dim=-1) <= 0).all()
    if len(masks):
        bits = unpack(masks, block).flatten(1)
        assert bits.any(1).all()
        assert not bits.all(1).any()
        assert len(masks.unique(dim=0)) == len(masks)


@given(
    one=st.sampled_from(sorted(BUILDERS)),
    two=st.sampled_from(sorted(BUILDERS)),
    operator=st.sampled_from(sorted(OPERATORS)),
    lengths=st.tuples(st.integers(1, 120), st.integers(1, 120)),
    block=st.sampled_from([16, 32]),
    attention=st.sampled_from(["bidirectional", "unidirectional"]),
    seed=st.integers(0, 2**16),
)
def test_rows_and_columns_describe_one_set(**drawn: Any) -> None:
    """The mask by rows, the mask by columns, and the gradients that follow each of them."""
    one, two, operator, lengths, block, attention, seed = drawn.values()
    torch.manual_seed(seed)
    a, b = (BUILDERS[name](lengths, block, attention) for name in (one, two))
    function, of_mask = OPERATORS[operator]
    layout = function(a, b)
    mask = layout.to_mask()
    assert torch.equal(mask, of_mask(a.to_mask(), b.to_mask(), block).expand(mask.shape))
    if layout.lists is not None:
        _check_lists(*layout.lists, block)
        assert torch.equal(_columns_mask(layout), mask)
        assert layout.count == len(layout.blocks().number) == (layout.kinds() > 0).sum()
    with torchweld.use_backend("cpu"):
        _assert_gradients(layout, mask)


def _assert_gradients(layout: BlockLayout, mask: Mask, **options: Any) -> None:
    """Equal to attention with the mask, in float64."""
    lengths = (layout.queries, layout.keys, layout.keys)
    leaves = [draw(BATCH, HEADS, length, 8, seed=at) for at, length in enumerate(lengths)]
    y = block_sparse_attention(*leaves, layout, **options)
    assert_as_exact(y, attend_exactly(leaves, mask), leaves)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_attention_over_a_layout_is_attention_with_its_mask(
    name: str, causal: bool, backend: str
) -> None:
    torch.manual_seed(0)
    block = (16, 32, 64, 128)[[*BUILDERS].index(name) % 4]
    layout = BUILDERS[name]((200, 200), block, "bidirectional")
    mask = layout.to_mask()
    with torchweld.use_backend(backend):
        _assert_gradients(layout, mask.tril() if causal else mask, causal=causal)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (2,), (2, 2)])
def test_scores_that_are_no_numbers_exclude_blocks(leading: tuple[int, ...], backend: str) -> None:
    """Among the best of a row, in all heads together and in each: neither row nor column."""
    torch.manual_seed(0)
    scores = torch.randn(*leading, 4, 4)
    scores[..., torch.ones(4, 4).triu(1).bool()] = -torch.inf
    scores[..., 3, 1] = torch.nan
    layout = BlockLayout.from_scores(scores, 2, block=16)
    numbers = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    best = torch.zeros_like(scores, dtype=torch.bool)
    best.scatter_(-1, numbers.topk(2).indices, True).logical_and_(numbers > -torch.inf)
    assert torch.equal(layout.kinds() > 0, best.view(layout.kinds().shape))
    with torchweld.use_backend(backend):
        _assert_gradients(layout, layout.to_mask())


@given(
    name=st.sampled_from(sorted(PATTERNS)),
    keys=st.integers(1, 200),
    share=st.floats(0, 1),
    aligned=st.booleans(),
    block=st.sampled_from([16, 32]),
    attention=st.sampled_from(["bidirectional", "unidirectional"]),
)
def test_fewer_queries_have_the_last_rows(
    name: str, keys: int, share: float, aligned: bool, block: int, attention: str
) -> None:
    """Prefill in chunks and decoding see what training sees: the last query is the last key."""
    queries = round(share * keys)
    if aligned:
        queries = keys - (keys - queries) // block * block
    make = PATTERNS[name]
    whole = make((keys, keys), block, attention).to_mask()
    assert torch.equal(
        make((queries, keys), block, attention).to_mask(), whole[:, :, keys - queries :]
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_more_queries_than_keys_add_rows_before_them(name: str) -> None:
    """The last rows equal the layout for as many queries as keys."""
    for attention in ("bidirectional", "unidirectional"):
        many = PATTERNS[name]((100, 70), 16, attention).to_mask()
        few = PATTERNS[name]((70, 70), 16, attention).to_mask()
        if "random" not in name and name not in ("variable", "bigbird", "bigbird of heads"):
            assert torch.equal(many[:, :, 30:], few)
        assert many.shape[2:] == (100, 70)


def test_long_layouts_of_global_tokens_cost_little() -> None:
    """A block's bits follow from its row's and its column's: no function of pairs is evaluated."""
    layout = BlockLayout.global_tokens(2**20, [0, 1, 5000], block=64)
    rows = 2**20 // 64
    assert layout.count == 2 * 2 * rows - 4
    assert len(layout.lists.masks) <= 8


# --- Mask functions -------------------------------------------------------------------------------

_VECTORS = torch.randint(0, 2, (70, 3), generator=torch.Generator().manual_seed(0))
_TABLE = torch.rand(3, 4, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.3
_DOCUMENTS = torch.arange(70).expand(3, 70) // torch.tensor([[9], [20], [33]])
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "batch": lambda b, h, q, k: _DOCUMENTS[b, q] == _DOCUMENTS[b, k],
    "batch and head": lambda b, h, q, k: (q + b) % (h + 2) == k % 2,
    "table": lambda b, h, q, k: _TABLE[b, h, q, k],
    "reduction": lambda b, h, q, k: (_VECTORS[q] == _VECTORS[k]).all(),
    "reduction of a dimension": lambda b, h, q, k: (_VECTORS[q] == _VECTORS[k]).any(0) & (q > k),
    "slices": lambda b, h, q, k: (_VECTORS[q, :] * _VECTORS[k, :]).sum() > 1,
    "rows of a table": lambda b, h, q, k: _TABLE[b][h][q][k],
    "no tokens": lambda b, h, q, k: h > 1,
}


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mask_functions_are_those_of_single_indices(name: str, listed: bool) -> None:
    function = FUNCTIONS[name]
    expected = torch.zeros(3, 4, 70, 70, dtype=torch.bool)
    chosen = [
        (b, h, q, k)
        for b in range(3)
        for h in range(4)
        for q in range(0, 70, 9)
        for k in range(0, 70, 7)
    ]
    within = BlockLayout.dense(70, block=16) if listed else None
    found = BlockLayout.from_mask_fn(
        function, 70, block=16, num_heads=4, batch_size=3, within=within
    ).to_mask()
    assert found.shape == expected.shape
    for at in chosen:
        assert found[at] == function(*(torch.tensor(i) for i in at))


def test_lengths_and_blocks_of_other_types() -> None:
    """NumPy's integers as lengths, and DeepSpeed's int64 blocks."""
    assert BlockLayout.bigbird(np.int64(96), block=16) == BlockLayout.bigbird(96, block=16)
    blocks = torch.rand(2, 5, 5) < 0.5
    ours, theirs = (BlockLayout.from_blocks(b, block=16) for b in (blocks, blocks.long()))
    assert torch.equal(ours.to_mask(), theirs.to_mask())
