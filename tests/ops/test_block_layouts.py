"""Block layouts: each builder equals its definition, and the lists equal the layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from torchweld.bench.memory import peak_bytes
from torchweld.sparse import BlockLayout, patterns
from torchweld.sparse.lists import pack, token_mask, unpack

Seen = Callable[[int, int, int], bool]


def _blocks(rows: int, seen: Seen) -> torch.Tensor:
    """The blocks of a definition, evaluated one by one, for `rows` rows and columns."""
    return torch.tensor([[seen(r, c, rows) for c in range(rows)] for r in range(rows)])


def _fixed(r: int, c: int, n: int, local: int = 4, width: int = 2, head: int = 0) -> bool:
    """DeepSpeed's pattern: the last blocks of each window, also of a short last window."""
    first = local - (1 + head) * width
    whole = n - n % local
    begins = list(range(first, whole, local))
    if whole < n:
        begins.append(min(whole + first, n - width))
    return r // local == c // local or any(b <= c < b + width for b in begins)


# DeepSpeed's layouts and elementary patterns: the builder's arguments and the definition.
DEFINITIONS: dict[str, tuple[str, dict[str, Any], Seen]] = {
    "dense": ("dense", {}, lambda r, c, n: True),
    "window": (
        "sliding_window",
        {"num_sliding_window_blocks": 5},
        lambda r, c, n: abs(r - c) <= 2,
    ),
    "local": ("block_local", {"num_local_blocks": 3}, lambda r, c, n: r // 3 == c // 3),
    "dilated": (
        "dilated",
        {"num_sliding_window_blocks": 5, "dilation": 3},
        lambda r, c, n: (r - c) % 3 == 0 and abs(r - c) <= 6,
    ),
    "strided": (
        "strided",
        {"stride": 4},
        lambda r, c, n: abs(r - c) < 4 or (r - c) % 4 == 0,
    ),
    "fixed": ("fixed", {"num_global_blocks": 2}, lambda r, c, n: _fixed(r, c, n)),
    "fixed, horizontal": (
        "fixed",
        {"num_global_blocks": 2, "horizontal_global_attention": True},
        lambda r, c, n: _fixed(r, c, n) or _fixed(c, r, n),
    ),
    "variable": (
        "variable",
        {
            "local_window_blocks": [2, 3],
            "global_block_indices": [1, 7],
            "global_block_end_indices": [2, 9],
        },
        lambda r, c, n: (
            c in (1, 7, 8) or ((r - 2) // 3 == (c - 2) // 3 and min(r, c) > 1) or max(r, c) < 2
        ),
    ),
    "bigbird": (
        "bigbird",
        {"num_random_blocks": 0, "num_global_blocks": 2},
        lambda r, c, n: abs(r - c) <= 1 or min(r, c) < 2,
    ),
    "longformer": (
        "longformer",
        {"global_block_indices": [0, 5]},
        lambda r, c, n: abs(r - c) <= 1 or r in (0, 5) or c in (0, 5),
    ),
}


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("tokens", [16 * 11, 16 * 12 - 5])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_builders_equal_their_definitions(name: str, tokens: int, attention: str) -> None:
    builder, arguments, seen = DEFINITIONS[name]
    rows = -(-tokens // 16)
    given_ = dict(arguments) if name == "dense" else arguments | {"attention": attention}
    if name == "fixed, horizontal" and attention == "unidirectional":
        pytest.skip("horizontal global blocks would see later keys")
    layout = getattr(BlockLayout, builder)(tokens, block=16, **given_)
    expected = _blocks(rows, seen)
    if name == "dense" and attention == "unidirectional":
        layout = layout.causal()
    if attention == "unidirectional":
        expected = expected.tril()
    assert torch.equal(layout.kinds()[0, 0] > 0, expected)
    tokens_seen = expected.repeat_interleave(16, 0).repeat_interleave(16, 1)[:tokens, :tokens]
    if attention == "unidirectional":
        tokens_seen = tokens_seen.tril()
    assert torch.equal(layout.to_mask()[0, 0], tokens_seen)


def test_heads_of_fixed_have_their_own_global_blocks() -> None:
    layout = BlockLayout.fixed(16 * 10, block=16, num_heads=6, num_different_global_patterns=4)
    for head in range(6):
        expected = _blocks(10, lambda r, c, n, h=head % 4: _fixed(r, c, n, 4, 1, h))
        assert torch.equal(layout.kinds()[0, head] > 0, expected)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("per_row", [1, 3, 11, 40])
def test_random_rows_have_as_many_different_blocks(per_row: int, attention: str) -> None:
    """Also in row 0, which may see only itself."""
    arguments: dict[str, Any] = {"block": 16, "num_heads": 3, "different_layout_per_head": True}
    layout = BlockLayout.random(16 * 40, per_row, attention=attention, **arguments)
    found = layout.kinds() > 0
    assert found.shape == (1, 3, 40, 40)
    may = torch.arange(40) + 1 if attention == "unidirectional" else torch.full((40,), 40)
    assert torch.equal(found.sum(-1)[0], may.clamp(max=per_row).expand(3, 40))
    if per_row == 3:
        assert not torch.equal(found[0, 0], found[0, 1])
        again = BlockLayout.random(16 * 40, 3, attention=attention, **arguments)
        other = BlockLayout.random(16 * 40, 3, attention=attention, seed=1, **arguments)
        assert torch.equal(again.to_mask(), layout.to_mask())
        assert not torch.equal(other.to_mask(), layout.to_mask())


@pytest.mark.parametrize("per_row", [2, 5])
def test_random_blocks_are_uniform(per_row: int) -> None:
    """Each column appears in per_row / 12 of 24,000 rows, within five sigma."""
    layout = BlockLayout.random(
        (16 * 24000, 16 * 12), per_row, block=16
    )  # 2 and 5 of 12 are drawn in different ways
    share = (layout.kinds()[0, 0] > 0).float().mean(0)
    p = per_row / 12
    assert ((share - p).abs() < 5 * (p * (1 - p) / 24000) ** 0.5).all()


def test_unidirectional_bigbird_is_right_in_row_0() -> None:
    layout = BlockLayout.bigbird(256, block=16, num_random_blocks=3, attention="unidirectional")
    mask = layout.to_mask()[0, 0]
    assert mask[0].nonzero().tolist() == [[0]]
    assert torch.equal(mask, mask.tril())
    blocks = (layout.kinds()[0, 0] > 0).sum(1)
    assert blocks[0] == 1
    assert (blocks[8:] >= 3).all()


# --- By tokens ------------------------------------------------------------------------------------


@given(
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    before=st.integers(-1, 60),
    after=st.integers(-1, 60),
    block=st.sampled_from([16, 32, 64]),
)
def test_windows_of_tokens(queries: int, keys: int, before: int, after: int, block: int) -> None:
    layout = BlockLayout.sliding_window((queries, keys), window_size=(before, after), block=block)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    expected = torch.ones(queries, keys, dtype=torch.bool)
    if before >= 0:
        expected &= distance >= -before
    if after >= 0:
        expected &= distance <= after
    assert torch.equal(layout.to_mask()[0, 0], expected)
    assert torch.equal(layout.causal().to_mask()[0, 0], expected & (distance <= 0))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=6),
    causal=st.booleans(),
    cross=st.booleans(),
)
def test_documents_see_themselves(
    lengths: list[tuple[int, int]], causal: bool, cross: bool
) -> None:
    queries, keys = (torch.tensor([pair[i if cross else 0] for pair in lengths]) for i in (0, 1))
    bounds = [torch.cat([torch.zeros(1), n.cumsum(0)]).int() for n in (queries, keys)]
    layout = BlockLayout.documents(*bounds[: 1 + cross], block=16, causal=causal)
    parts = [torch.ones(q, k, dtype=torch.bool) for q, k in zip(queries, keys, strict=True)]
    if causal:
        parts = [part.tril(part.shape[1] - part.shape[0]) for part in parts]
    assert torch.equal(layout.to_mask()[0, 0], torch.block_diag(*parts).bool())


def test_global_tokens_are_exact() -> None:
    chosen = [0, 5, 77]
    mask = BlockLayout.global_tokens(100, chosen, block=16).to_mask()[0, 0]
    expected = torch.zeros(100, 100, dtype=torch.bool)
    expected[chosen], expected[:, chosen] = True, True
    assert torch.equal(mask, expected)
    few = BlockLayout.global_tokens((100, 40), 3, block=16).to_mask()[0, 0]
    expected = torch.zeros(100, 40, dtype=torch.bool)  # the last query stands at the last key
    expected[60:63], expected[:, :3] = True, True
    assert torch.equal(few, expected)


def test_a_mask_function_is_never_asked_for_a_whole_mask() -> None:
    """It is called for a few blocks at a time, and memory is proportional to the blocks found."""
    asked = []

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        found = (q - k).abs() < 20 + 9 * h
        asked.append(found.numel())
        return found

    layout = BlockLayout.from_mask_fn(mask_mod, (3000, 4000), block=16, num_heads=2)
    piece = patterns.pairs_at_once(torch.device("cpu"))
    assert max(asked) <= piece < 3000 * 4000
    assert layout.nbytes < 100 * layout.count + 2**16
    distance = (torch.arange(3000)[:, None] - torch.arange(4000)).abs()
    expected = torch.stack([distance < 20, distance < 29])
    assert torch.equal(layout.to_mask()[0], expected)
    within = BlockLayout.sliding_window((3000, 4000), window_size=(-1, 0), block=16)
    cut = BlockLayout.from_mask_fn(mask_mod, (3000, 4000), block=16, num_heads=2, within=within)
    assert torch.equal(cut.to_mask(), layout.to_mask() & within.to_mask())


@pytest.mark.parametrize("width", [1, 60])
def test_a_mask_function_takes_memory_for_its_blocks(width: int, monkeypatch: Any) -> None:
    """A piece's pairs take 16 bytes each: int64 distances and their magnitudes. Lists come in
    addition.

    While lists are made a block takes at most 160 bytes: ten int64 numbers and their copies.
    """
    monkeypatch.setattr(patterns, "pairs_at_once", lambda device: 2**12)

    def build() -> None:
        made.append(
            BlockLayout.from_mask_fn(lambda b, h, q, k: (q - k).abs() < 16 * width, 2048, block=16)
        )

    made: list[BlockLayout] = []
    peak = peak_bytes(build, "cpu")
    assert peak < 20 * 2**12 + 160 * made[0].count + 2**16 < 2048**2


def test_a_mask_function_returns_booleans() -> None:
    with pytest.raises(torchweld.ArgumentError, match=r"mask_mod.*int64"):
        BlockLayout.from_mask_fn(lambda b, h, q, k: q - k, 64)


# --- From blocks and from scores ------------------------------------------------------------------


def test_scores_choose_the_best_blocks() -> None:
    """-inf excludes a block. The lists reserve the same space for every row."""
    scores = torch.randn(2, 3, 10, 12)
    scores[0, 0, :, 3:] = -torch.inf
    scores[1, 2, 4] = -torch.inf
    layout = BlockLayout.from_scores(scores, 4, block=16)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(4).indices, True)
    expected = best & (scores > -torch.inf)
    assert torch.equal(layout.kinds() > 0, expected)
    assert layout.lists is not None
    assert len(layout.lists.row_entries) == len(layout.lists.column_entries) == 2 * 3 * 10 * 4
    assert torch.equal(BlockLayout.from_blocks(expected, block=16).to_mask(), layout.to_mask())


def test_scores_on_a_device_are_never_read() -> None:
    """Meta tensors have no data: reading any would raise."""
    scores = torch.empty(2, 4, 16, 16, device="meta")
    layout = BlockLayout.from_scores(scores, 3, block=64)
    assert layout.lists is not None
    assert [tuple(t.shape) for t in layout.lists[:2]] == [(2, 4, 16, 4), (384, 2)]
    assert {t.device.type for t in layout.lists} == {"meta"}


# --- All layouts ----------------------------------------------------------------------------------

_LENGTHS = (200, 230)
LAYOUTS: dict[str, Callable[[], BlockLayout]] = {
    "dense": lambda: BlockLayout.dense(_LENGTHS, block=32),
    "window": lambda: BlockLayout.sliding_window(_LENGTHS, window_size=(50, 20), block=32),
    "causal": lambda: BlockLayout.dense(_LENGTHS, block=32).causal(),
    "bigbird": lambda: BlockLayout.bigbird(_LENGTHS, block=32, attention="unidirectional"),
    "heads": lambda: BlockLayout.random(
        _LENGTHS, 2, block=32, num_heads=3, different_layout_per_head=True
    ),
    "tokens": lambda: BlockLayout.global_tokens(_LENGTHS, [3, 99], block=32),
    "function": lambda: BlockLayout.from_mask_fn(
        lambda b, h, q, k: (q - k) % (h + 2) == 0, _LENGTHS, block=32, num_heads=3
    ),
    "scores": lambda: BlockLayout.from_scores(
        torch.rand(2, 3, 7, 8).log() + torch.where(torch.rand(2, 3, 7, 8) > 0.7, -torch.inf, 0),
        *(3,),
        block=32,
        seq_len=_LENGTHS,
    ),
    "nothing": lambda: BlockLayout.from_blocks(
        torch.zeros(7, 8, dtype=torch.bool), block=32, seq_len=_LENGTHS
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_lists_say_what_the_layout_says(name: str) -> None:
    """Rows and columns have the same blocks: full before partial ones, longest lines first."""
    layout = LAYOUTS[name]()
    mask = layout.to_mask()
    assert mask.shape[2:] == _LENGTHS
    if layout.lists is None:
        return
    rows, _, columns, column_entries, masks = layout.lists
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in layout.lists)
    # The transpose's masks have keys as rows, so transpose the bits too.
    flipped = torch.zeros(0, masks.shape[1], dtype=torch.int32)
    if len(masks):
        flipped = pack(unpack(masks, 32).mT.contiguous())
    turned = token_mask(columns, column_entries, flipped, 32, *_LENGTHS[::-1])
    assert torch.equal(turned.mT, mask)
    for lines in (rows, columns):
        which, begin, partial, end = lines.unbind(-1)
        assert torch.equal(which.sort(-1).values, torch.arange(lines.shape[2]).expand(which.shape))
        assert (begin <= partial).all()
        assert (partial <= end).all()
        assert ((end - begin).diff(dim=-1) <= 0).all()
    if len(masks):
        bits = unpack(masks, 32).flatten(1)
        assert bits.any(1).all()
        assert not bits.all(1).any()
        assert len(masks.unique(dim=0)) == len(masks)


@given(
    one=st.sampled_from(sorted(LAYOUTS)),
    two=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 9),
)
def test_unions_and_intersections(one: str, two: str, seed: int) -> None:
    torch.manual_seed(seed)
    a, b = LAYOUTS[one](), LAYOUTS[two]()
    for union, joined in ((True, a | b), (False, a & b)):
        expected = a.to_mask() | b.to_mask() if union else a.to_mask() & b.to_mask()
        assert torch.equal(joined.to_mask().expand(expected.shape), expected)
    restricted = (a | b).causal().to_mask()
    distance = torch.arange(_LENGTHS[1]) - torch.arange(_LENGTHS[0])[:, None]
    seen = distance <= _LENGTHS[1] - _LENGTHS[0]
    assert torch.equal(restricted, ((a | b).to_mask() & seen).expand(restricted.shape))


def test_equality_of_layouts() -> None:
    """Equal arguments make equal layouts; a layout from data equals only itself."""
    a, b = (BlockLayout.bigbird(512, block=64) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert (a | BlockLayout.dense(512)).count == 64
    assert (a & b).causal() == (b & a).causal()
    others = [
        BlockLayout.bigbird(512, block=64, seed=1),
        BlockLayout.bigbird(512, block=32),
        BlockLayout.bigbird(513, block=64),
        BlockLayout.bigbird(512, block=64, attention="unidirectional"),
        a.causal(),
        BlockLayout.longformer(512),
    ]
    assert len({a, *others}) == 1 + len(others)
    data = torch.ones(8, 8, dtype=torch.bool)
    assert BlockLayout.from_blocks(data) != BlockLayout.from_blocks(data)
    nowhere = BlockLayout.from_scores(torch.empty(8, 8, device="meta"), 2)
    assert len({nowhere, nowhere}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.block = 32  # type: ignore[misc]


def test_memory_is_proportional_to_the_blocks() -> None:
    """Sixteen bytes per block, and sixteen per row and column. A dense layout takes none."""
    assert BlockLayout.dense(2**20).nbytes == 0
    for tokens in (2**14, 2**16):
        layout = BlockLayout.random(tokens, 16, num_heads=4, different_layout_per_head=True)
        lines = 4 * tokens // 64
        assert layout.count == 16 * lines
        assert layout.nbytes == 16 * layout.count + 2 * 16 * lines
        shared = BlockLayout.sliding_window(tokens, 15, attention="unidirectional")
        assert shared.nbytes <= 16 * shared.count + 2 * 16 * tokens // 64 + 64 * 8


def test_pictures() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    layout = BlockLayout.longformer(1024, attention="bidirectional")
    first, *lines = repr(layout).splitlines()
    assert "1024 x 1024 tokens, block 64" in first
    assert f"density {layout.density:.3g}" in first
    assert layout.density == layout.count / 256
    assert [len(line) for line in lines] == [16] * 16
    assert [[c != " " for c in line] for line in lines] == (layout.kinds()[0, 0] > 0).tolist()
    image = layout.plot().get_images()[0].get_array()
    assert image.shape == (16, 16)
    assert image.sum() == layout.count


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "block": (lambda: BlockLayout.dense(64, block=48), "block is 48; accepted: 16 or 32"),
    "length": (lambda: BlockLayout.dense(-1), "seq_len"),
    "attention": (lambda: BlockLayout.fixed(64, attention="causal"), "unidirectional"),
    "window": (lambda: BlockLayout.sliding_window(64, 0), "num_sliding_window_blocks"),
    "two windows": (lambda: BlockLayout.sliding_window(64, 3, window_size=(1, 1)), "one of"),
    "patterns": (
        lambda: BlockLayout.fixed(64, num_different_global_patterns=5),
        "num_different_global_patterns",
    ),
    "windows": (lambda: BlockLayout.variable(64, local_window_blocks=[]), "sizes >= 1"),
    "ends": (
        lambda: BlockLayout.longformer(
            *(64,), global_block_indices=[1], global_block_end_indices=[1]
        ),
        "after its beginning",
    ),
    "stride": (lambda: BlockLayout.strided(64, 0), "stride"),
    "tokens": (lambda: BlockLayout.global_tokens(64, [64]), "positions below 64"),
    "blocks": (lambda: BlockLayout.from_blocks(torch.ones(2, 2)), "booleans"),
    "blocks' size": (
        lambda: BlockLayout.from_blocks(torch.ones(2, 2).bool(), seq_len=200),
        "4 x 4 blocks",
    ),
    "scores": (lambda: BlockLayout.from_scores(torch.ones(2, 2).int(), 1), "scores"),
    "top_k": (lambda: BlockLayout.from_scores(torch.ones(2, 2), 0), "top_k"),
    "documents": (lambda: BlockLayout.documents(torch.ones(3)), "cu_seqlens"),
    "other lengths": (lambda: BlockLayout.dense(64) | BlockLayout.dense(65), "a layout of"),
    "other heads": (
        lambda: (
            BlockLayout.random(64, num_heads=2, different_layout_per_head=True)
            & BlockLayout.random(64, num_heads=3, different_layout_per_head=True)
        ),
        "2 heads",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_are_named(case: str) -> None:
    function, message = BAD[case]
    with pytest.raises(torchweld.ArgumentError, match=message):
        function()
