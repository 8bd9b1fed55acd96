"""Block layouts: each builder equals its definition, and the lists equal the layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import torchweld
from torchweld.bench.measure.memory import peak_bytes
from torchweld.sparse import BlockLayout, patterns

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


_WINDOW, _GLOBAL = "num_sliding_window_blocks", ("global_block_indices", "global_block_end_indices")
_VARIABLE = {"local_window_blocks": [2, 3], _GLOBAL[0]: [1, 7], _GLOBAL[1]: [2, 9]}
_HORIZONTAL = {"num_global_blocks": 2, "horizontal_global_attention": True}
_BIGBIRD = {"num_random_blocks": 0, "num_global_blocks": 2}
# DeepSpeed's layouts and elementary patterns: the builder's arguments and the definition.
DEFINITIONS: dict[str, tuple[str, dict[str, Any], Seen]] = {
    "dense": ("dense", {}, lambda r, c, n: True),
    "window": ("sliding_window", {_WINDOW: 5}, lambda r, c, n: abs(r - c) <= 2),
    "local": ("block_local", {"num_local_blocks": 3}, lambda r, c, n: r // 3 == c // 3),
    "dilated": (
        *("dilated", {_WINDOW: 5, "dilation": 3}),
        lambda r, c, n: (r - c) % 3 == 0 and abs(r - c) <= 6,
    ),
    "strided": ("strided", {"stride": 4}, lambda r, c, n: abs(r - c) < 4 or (r - c) % 4 == 0),
    "fixed": ("fixed", {"num_global_blocks": 2}, _fixed),
    "fixed, horizontal": ("fixed", _HORIZONTAL, lambda r, c, n: _fixed(r, c, n) or _fixed(c, r, n)),
    "variable": (
        *("variable", _VARIABLE),
        lambda r, c, n: (
            c in (1, 7, 8) or ((r - 2) // 3 == (c - 2) // 3 and min(r, c) > 1) or max(r, c) < 2
        ),
    ),
    "bigbird": ("bigbird", _BIGBIRD, lambda r, c, n: abs(r - c) <= 1 or min(r, c) < 2),
    "longformer": (
        *("longformer", {_GLOBAL[0]: [0, 5]}),
        lambda r, c, n: abs(r - c) <= 1 or not {r, c}.isdisjoint((0, 5)),
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


# --- Packed rows ---------------------------------------------------------------------------------


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
def test_packed_rows(**drawn: Any) -> None:
    """Property: token by token as written out, with padding that neither sees nor is seen."""
    rows, causal, window, block, beyond, flat = drawn.values()
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


# --- From blocks and from scores ------------------------------------------------------------------


def test_scores_on_a_device_are_never_read() -> None:
    """Meta tensors have no data: reading any would raise."""
    scores = torch.empty(2, 4, 16, 16, device="meta")
    layout = BlockLayout.from_scores(scores, 3, block=64)
    assert [tuple(t.shape) for t in layout.lists[:2]] == [(2, 4, 16, 4), (384, 2)]
    assert {t.device.type for t in layout.lists} == {"meta"}


# --- All layouts ----------------------------------------------------------------------------------


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


_ENDS = torch.tensor([0, 30, 64])
_FLEX = functools.partial(create_block_mask, lambda b, h, q, k: q >= k, None, device="cpu")
_VECTOR = torch.arange(70)
_HEADS: dict[str, Any] = {"different_layout_per_head": True}
_OF_HEADS = [BlockLayout.random(64, num_heads=n, **_HEADS) for n in (2, 3)]
_docs, _masks, _flex = BlockLayout.documents, BlockLayout.from_mask_fn, BlockLayout.from_block_mask
# A function, its first argument, its other ones, and what the error says.
BAD: list[tuple[Callable[..., Any], Any, dict[str, Any], str]] = [
    (BlockLayout.dense, 64, {"block": 48}, "block is 48; accepted: 16 or 32"),
    (BlockLayout.dense, -1, {}, "seq_len"),
    (BlockLayout.fixed, 64, {"attention": "causal"}, "unidirectional"),
    (BlockLayout.sliding_window, 64, {_WINDOW: 0}, _WINDOW),
    (BlockLayout.sliding_window, 64, {_WINDOW: 3, "window_size": (1, 1)}, "one of"),
    (BlockLayout.fixed, 64, {"num_different_global_patterns": 5}, "num_different_global_patterns"),
    (BlockLayout.variable, 64, {"local_window_blocks": []}, "sizes >= 1"),
    (BlockLayout.longformer, 64, {key: [1] for key in _GLOBAL}, "after its beginning"),
    (BlockLayout.strided, 64, {"stride": 0}, "stride"),
    (BlockLayout.global_tokens, 64, {"tokens": [64]}, "positions below 64"),
    (BlockLayout.from_blocks, torch.ones(2, 2), {}, "booleans"),
    (BlockLayout.from_blocks, torch.ones(2, 2).bool(), {"seq_len": 200}, "4 x 4 blocks"),
    (BlockLayout.from_scores, torch.ones(2, 2).int(), {"top_k": 1}, "scores"),
    (BlockLayout.from_scores, torch.ones(2, 2), {"top_k": 0}, "top_k"),
    (BlockLayout.dense(64).__or__, BlockLayout.dense(65), {}, "a layout of"),
    (_OF_HEADS[0].__and__, _OF_HEADS[1], {}, "2 heads"),
    (_docs, torch.ones(3), {}, "cu_seqlens"),
    (_docs, torch.tensor([3, 10, 20]), {}, "cu_seqlens is offsets"),
    (_docs, torch.tensor([0, 10, 5, 20]), {}, "cu_seqlens is offsets"),
    (_docs, _ENDS, {"causal": "left"}, "top_left"),
    (_docs, _ENDS, {"window_size": (-2, 0)}, "no bound"),
    (_docs, _ENDS, {"seq_len": 60}, "at least 64"),
    (_docs, _ENDS, {"cu_seqlens_keys": _ENDS[None]}, "batch, sequences"),
    (_masks, lambda b, h, q, k: q - k, {"seq_len": 64}, "mask_mod.*int64"),
    (_masks, lambda b, h, q, k: q >= k if q > 3 else q == k, {"seq_len": 70}, "one that raises"),
    (_masks, lambda b, h, q, k: _VECTOR[q + 1] > 0, {"seq_len": 70}, "mask_mod is one that raises"),
    (_masks, lambda b, h, q, k: q + b > h, {"seq_len": 70, "num_heads": 3}, "batch_size is not g"),
    (_masks, lambda b, h, q, k: q + b > h, {"seq_len": 70, "batch_size": 3}, "num_heads is not gi"),
    (_flex, torch.ones(2, 2), {}, "BlockMask"),
    (_flex, _FLEX(2, 96, 96, BLOCK_SIZE=24), {}, "multiples of 16"),
    (_flex, _FLEX(2, 96, 96, BLOCK_SIZE=32), {"block": 64}, "divide"),
    (_flex, _FLEX(2, 96, 96, BLOCK_SIZE=32), {"num_heads": 3}, "2, as in"),
]


@pytest.mark.parametrize(("function", "given", "options", "message"), BAD)
def test_arguments_are_named(
    function: Callable[..., Any], given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(torchweld.ArgumentError, match=message):
        function(given, **options)
