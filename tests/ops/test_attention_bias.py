"""block_sparse_attention with biases, and with values of another width than keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from exact_attention import assert_as_exact, attend_exactly, draw
from torchweld import functional, numerics
from torchweld.bench.measure.memory import LiveBytes
from torchweld.sparse import BlockBias, BlockLayout

attention: Callable[..., Any] = functional.block_sparse_attention


def _pairs(table: Any, places: torch.Tensor, queries: int, keys: int) -> Any:
    """A bias by distance, expanded to each pair one by one."""
    row = keys if places.ndim == 1 else (places.shape[1] + 1) // 2
    query, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if places.ndim == 1:
        middle = len(places) // 2
        return table[:, places[(key - query + middle).clamp(0, len(places) - 1)]]
    down, right = key // row - query // row, key % row - query % row
    middle = places.shape[0] // 2
    down = (down + middle).clamp(0, places.shape[0] - 1)
    return table[:, places[down, right + row - 1]]


WIDTHS = [(24, 16), (16, 40), (192, 128), (576, 512), (1, 7), (5, 1)]


@pytest.mark.parametrize(("width", "deep"), WIDTHS)
def test_values_of_another_width(width: int, deep: int, on_cpu: str) -> None:
    """With key heads that several query heads share, and one that all share."""
    layout = BlockLayout.sliding_window(70, window_size=(30, 4), block=32)
    for key_heads in (2, 1):
        q, k = draw(2, 4, 70, width), draw(2, key_heads, 70, width, seed=1)
        v = draw(2, key_heads, 70, deep, seed=2)
        y, lse = attention(q, k, v, layout, return_lse=True)
        assert y.shape == (2, 4, 70, deep)
        assert lse.shape == (2, 4, 70)
        assert_as_exact(y, attend_exactly((q, k, v), layout.to_mask()), [q, k, v])


# Biases that broadcast in all ways, of odd strides.
DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "full": lambda: draw(2, 4, 60, 75),
    "heads": lambda: draw(1, 4, 60, 75),
    "batch": lambda: draw(2, 1, 60, 75),
    "one": lambda: draw(60, 75),
    "three": lambda: draw(4, 60, 75),
    "expanded": lambda: draw(1, 4, 60, 75).expand(2, -1, -1, -1),
    "by key": lambda: draw(2, 1, 1, 75),
    "by query": lambda: draw(1, 4, 60, 1),
    "turned": lambda: draw(2, 4, 75, 60).mT,
    "cut": lambda: draw(2, 4, 61, 90)[:, :, 1:, 3:78],
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_biases(name: str, on_cpu: str) -> None:
    layout = BlockLayout.random(
        (60, 75), 2, block=16, num_heads=4, different_layout_per_head=True
    ) | BlockLayout.sliding_window((60, 75), window_size=(9, 3), block=16)
    q, k, v = draw(2, 4, 60, 16), draw(2, 2, 75, 16, seed=1), draw(2, 2, 75, 8, seed=2)
    bias = DENSE[name]()
    found = attention(q, k, v, layout, bias=bias, softcap=3.0)
    wanted = attend_exactly((q, k, v), layout.to_mask(), bias, 3.0)
    assert_as_exact(found, wanted, [q, k, v, bias])


@pytest.mark.parametrize("places", [(31,), (3,), (201,), (9, 13), (5, 21), (3, 199)], ids=str)
@pytest.mark.parametrize("heads", [4, 1])
def test_biases_by_distance(places: tuple[int, ...], heads: int, on_cpu: str) -> None:
    """On lines and planes, with clamped distances, fewer queries than keys and one table."""
    layout = BlockLayout.sliding_window((60, 75), 1, block=32)
    q, k, v = draw(2, 4, 60, 16), draw(2, 4, 75, 16, seed=1), draw(2, 4, 75, 8, seed=2)
    table = draw(heads, 20)
    count = torch.Size(places).numel()
    buckets = (torch.arange(count) * 7 % 20).view(places)
    bias = BlockBias.relative(table, buckets)
    pairs = _pairs(table, buckets, 60, 75)
    found = attention(q, k, v, layout, bias=bias)
    assert_as_exact(found, attend_exactly((q, k, v), layout.to_mask(), pairs), [q, k, v, table])


def _dense_shape(kind: str, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {
        "one": (1, 1, queries, keys),
        "heads": (heads, queries, keys),
        "batch": (batch, 1, queries, keys),
        "full": (batch, heads, queries, keys),
        "two": (queries, keys),
        "keys": (batch, 1, 1, keys),
        "queries": (1, heads, queries, 1),
    }
    return shapes[kind]


def _draw_form(form: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A leaf of this shape in memory of another form, with some numbers that are -inf."""
    *leading, rows, columns = shape
    if form == "turned":
        x = torch.randn(*leading, columns, rows, generator=generator).mT
    elif form == "cut":
        x = torch.randn(*leading, rows + 2, columns + 5, generator=generator)
        x = x[..., 1 : rows + 1, 3 : columns + 3]
    elif form == "expanded" and leading:
        x = torch.randn(1, *shape[1:], generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    x.masked_fill_(torch.rand(rows, columns, generator=generator) < 0.2, -torch.inf)
    x = x.expand(shape)
    return x.detach().requires_grad_()


@given(
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 90),
    keys=st.integers(1, 90),
    width=st.sampled_from([1, 8, 33]),
    deep=st.sampled_from([1, 16, 40]),
    block=st.sampled_from([16, 64, 128]),
    kind=st.sampled_from(["dense", "line", "plane"]),
    only_table=st.booleans(),
    causal=st.booleans(),
    of_layout=st.sampled_from(["one", "heads", "key heads", "batch"]),
    of_bias=st.sampled_from(["one", "heads", "batch", "full", "two", "keys", "queries"]),
    form=st.sampled_from(["whole", "turned", "cut", "expanded"]),
    seed=st.integers(0, 2**16),
)
def test_random_biases(**drawn: Any) -> None:
    """Property: equals attention with a bias for every pair, including -inf.

    Biases broadcast, and have any strides; layouts are of all heads, of each, of each key head and
    of each sequence.
    """
    batch, key_heads, group, queries, keys, width, deep, block, *others = drawn.values()
    kind, only_table, causal, of_layout, of_bias, form, seed = others
    generator = torch.Generator().manual_seed(seed)
    heads = key_heads * group
    queries = min(queries, keys) if kind == "plane" else queries
    rows, columns = -(-queries // block), -(-keys // block)
    shapes = {"one": (1, 1), "heads": (1, heads), "key heads": (1, key_heads), "batch": (batch, 1)}
    blocks = torch.rand(*shapes[of_layout], rows, columns, generator=generator) < 0.7
    layout = BlockLayout.from_blocks(blocks, block=block, seq_len=(queries, keys))
    of_heads = group if of_layout == "key heads" else 1
    seen = layout.to_mask().repeat_interleave(of_heads, 1)
    mask = seen.tril(keys - queries) if causal else seen

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    q, k, v = (
        draw(batch, heads, queries, width),
        draw(batch, key_heads, keys, width),
        draw(batch, key_heads, keys, deep),
    )
    bias: Any
    if kind == "dense":
        leaf = _draw_form(form, _dense_shape(of_bias, batch, heads, queries, keys), generator)
        bias, pairs = leaf, leaf
    else:
        leaf = draw(heads, 9)
        shape = (11,) if kind == "line" else (7, 2 * max(keys // 3, 1) - 1)
        buckets = torch.randint(0, 9, shape, generator=generator)
        bias, pairs = BlockBias.relative(leaf, buckets), _pairs(leaf, buckets, queries, keys)
    leaves = [leaf] if only_table else [q, k, v, leaf]
    if only_table:
        q, k, v = q.detach(), k.detach(), v.detach()
    with torchweld.use_backend("cpu"):
        found = attention(q, k, v, layout, bias=bias, causal=causal)
    assert_as_exact(found, attend_exactly((q, k, v), mask, pairs), leaves)


@pytest.mark.parametrize("kind", ["dense", "line", "plane"])
def test_gradients_and_second_derivatives(kind: str) -> None:
    layout = BlockLayout.sliding_window(9, window_size=(6, 2), block=16)
    q, k, v = (draw(1, 2, 9, 3, seed=i, dtype=torch.float64) for i in range(3))
    if kind == "dense":
        leaf = draw(1, 2, 9, 9, dtype=torch.float64)
    else:
        leaf = draw(2, 5, dtype=torch.float64)
    shape = (15,) if kind == "line" else (3, 5)
    buckets = (torch.arange(torch.Size(shape).numel()) % 5).view(shape)

    def function(q: Any, k: Any, v: Any, leaf: Any) -> Any:
        bias = leaf if kind == "dense" else BlockBias.relative(leaf, buckets)
        return attention(q, k, v, layout, bias=bias, softcap=2.0)

    with torchweld.use_backend("cpu"):
        assert torch.autograd.gradcheck(function, (q, k, v, leaf))
        assert torch.autograd.gradgradcheck(function, (q, k, v, leaf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_16_bit_models(dtype: torch.dtype) -> None:
    """Autocast casts a dense bias with q; a table's numbers and gradients stay in float32."""
    layout = BlockLayout.dense(40, block=16)
    q, k, v = (draw(1, 2, 40, 8, seed=i) for i in range(3))
    table, dense = draw(2, 9), draw(1, 2, 40, 40)
    bias = BlockBias.relative(table, torch.arange(9))
    with torch.autocast("cpu", dtype):
        for given, leaf in ((bias, table), (dense, dense)):
            y = attention(q, k, v, layout, bias=given)
            assert y.dtype == dtype
            pairs = dense if given is dense else _pairs(table, torch.arange(9), 40, 40)
            unit = torch.finfo(dtype).eps
            assert_as_exact(y, attend_exactly((q, k, v), layout.to_mask(), pairs), [leaf], 8 * unit)


Q, LAYOUT = torch.ones(2, 4, 64, 8), BlockLayout.dense(64, block=16)
BUCKETS = torch.zeros(9, dtype=torch.int64)


def test_nothing_and_only_some() -> None:
    """No tokens, a batch of none, and a gradient of only the bias or only q."""
    bias = BlockBias.relative(draw(4, 3), BUCKETS)
    for shape in ((0, 4, 64, 8), (2, 4, 0, 8)):
        q = torch.ones(shape, requires_grad=True)
        layout = BlockLayout.dense(shape[2], block=16)
        with torchweld.use_backend("cpu"):
            y = attention(q, q, q, layout, bias=bias)
        (grad,) = torch.autograd.grad(y.sum(), bias.table)
        assert torch.equal(grad, torch.zeros(4, 3))
    q, dense = draw(2, 4, 64, 8), draw(64, 64)
    every = torch.autograd.grad(attention(q, Q, Q, LAYOUT, bias=dense).sin().sum(), [q, dense])
    for at, leaf in enumerate((q, dense)):
        inputs = [x if x is leaf else x.detach() for x in (q, dense)]
        y = attention(inputs[0], Q, Q, LAYOUT, bias=inputs[1])
        assert torch.equal(torch.autograd.grad(y.sin().sum(), leaf)[0], every[at])


def test_a_table_in_compiled_code() -> None:
    bias = BlockBias.relative(draw(4, 9), torch.arange(9))

    def function(q: Any, table: Any) -> Any:
        return attention(q, q + 1, q.cos(), LAYOUT, bias=bias.with_table(table))

    q = draw(2, 4, 64, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torchweld.use_backend("cpu"):
        results = [f(q, bias.table) for f in (function, compiled)]
    grads = [torch.autograd.grad(y.sin().sum(), [q, bias.table]) for y in results]
    assert torch.equal(*results)
    torch.testing.assert_close(*grads, **numerics.SAME)


@pytest.mark.parametrize("kind", ["line", "plane"])
def test_memory_is_linear_in_the_blocks(kind: str) -> None:
    """Forward and backward over a window: twice the tokens hold twice the bytes."""
    peaks = []
    for length in (512, 1024, 2048):
        layout = BlockLayout.sliding_window(length, window_size=(100, 100), block=64)
        table = draw(2, 30)
        shape = (301,) if kind == "line" else (21, 63)
        buckets = (torch.arange(torch.Size(shape).numel()) % 30).view(shape)
        q, k, v = (draw(1, 2, length, 16, seed=i) for i in range(3))
        with torchweld.use_backend("cpu"), LiveBytes() as live:
            y = attention(q, k, v, layout, bias=BlockBias.relative(table, buckets))
            torch.autograd.grad(y, [q, k, v, table], torch.ones_like(y))
        peaks.append(live.peak)
    assert all(b <= 2.1 * a for a, b in itertools.pairwise(peaks)), peaks
    assert peaks[-1] < 2048 * 2048 * 4 / 2  # half of the scores of one head
