"""block_sparse_attention against torch's attention with the layout's mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import torchweld
from exact_attention import assert_as_exact, attend_exactly, draw
from torchweld import functional, numerics
from torchweld.ops.attention.block_sparse import OP
from torchweld.random import find_scale, make_mask
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import token_mask

attention: Callable[..., Any] = functional.block_sparse_attention


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [draw(*shape, seed=at, dtype=dtype) for at, shape in enumerate(shapes)]


@given(
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    width=st.sampled_from([1, 8, 16, 32, 33, 64, 80, 128, 200, 256]),
    block=st.sampled_from([16, 32, 64, 128]),
    share=st.floats(0, 1),
    each=st.sampled_from(["shared", "heads", "key heads", "batch"]),
    causal=st.booleans(),
    padded=st.booleans(),
    tilt=st.sampled_from([0.0, 2.0, -2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_random_layouts_lengths_heads_and_groups(**drawn: Any) -> None:
    """Property: equals attention with the mask of the layout, `causal` and the padding.

    Scores may rise or fall along the keys. A bfloat16 result and its gradients have up to four
    roundings of at most 2^-8 of the largest number.
    """
    batch, key_heads, group, queries, keys, width, block, share, each, *_, seed = drawn.values()
    causal, padded, tilt, dtype = (drawn[name] for name in ("causal", "padded", "tilt", "dtype"))
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-queries // block), -(-keys // block)
    heads = {"shared": (), "heads": (group * key_heads,), "key heads": (key_heads,)}
    leading = heads.get(each, (batch, 1))
    blocks = torch.rand(*leading, rows, columns, generator=generator) < share
    layout = BlockLayout.from_blocks(blocks, block=block, seq_len=(queries, keys))
    mask = layout.to_mask().repeat_interleave(group if each == "key heads" else 1, 1)
    if causal:
        mask = mask.tril(keys - queries)
    padding = None
    if padded:
        padding = torch.rand(batch, keys, generator=generator) < 0.3
        mask = mask & ~padding[:, None, None]
    shapes = [(batch, key_heads * group, queries, width), *[(batch, key_heads, keys, width)] * 2]
    inputs = _drawn(*shapes, dtype=dtype)
    rise = torch.linspace(1 + max(-tilt, 0), 1 + max(tilt, 0), keys)[:, None]
    inputs[1] = (inputs[1].detach() * rise).to(dtype).requires_grad_()
    with torchweld.use_backend("cpu"):
        y = attention(*inputs, layout, causal=causal, key_padding_mask=padding)
    tolerance = 2e-5 if dtype == torch.float32 else 4 * 2**-8
    assert_as_exact(y, attend_exactly(inputs, mask), inputs, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layouts_of_memory_in_16_bits(dtype: torch.dtype) -> None:
    """[batch, tokens, heads, width], as after projections, gives the bits of packed tensors."""
    layout = BlockLayout.bigbird(130, block=16)
    packed = _drawn(*[(2, 3, 130, 32)] * 3, dtype=dtype)
    apart = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in packed]
    results = []
    for leaves in (packed, [x.requires_grad_() for x in apart]):
        with torchweld.use_backend("cpu"):
            y = attention(*leaves, layout)
        results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- Empty rows and columns -----------------------------------------------------------------------


def test_empty_rows_and_columns_are_zero(on_cpu: str) -> None:
    blocks = torch.ones(4, 5, dtype=torch.bool)
    blocks[1], blocks[:, 2] = False, False
    layout = BlockLayout.from_blocks(blocks, block=16)
    inputs = _drawn((1, 2, 64, 8), (1, 2, 80, 8), (1, 2, 80, 8))
    y, lse = attention(*inputs, layout, return_lse=True)
    grads = torch.autograd.grad(y.sum() + lse[:, :, :16].sum(), inputs)
    assert not y[:, :, 16:32].any()
    assert (lse[:, :, 16:32] == -torch.inf).all()
    assert lse[:, :, :16].isfinite().all()
    assert not grads[0][:, :, 16:32].any()
    assert all(not grad[:, :, 32:48].any() for grad in grads[1:])
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    none = BlockLayout.from_blocks(torch.zeros(4, 5, dtype=torch.bool), block=16)
    y = attention(*inputs, none)
    assert not any(value.any() for value in (y, *torch.autograd.grad(y.sum(), inputs)))


# --- Dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 128])
def test_dropout_drops_what_softmax_dropout_drops(block: int, on_cpu: str) -> None:
    """Both drop the same scores. With unit vectors as values, y holds the weights."""
    q, k = (x.detach() for x in _drawn((2, 3, 70, 16), (2, 3, 150, 16)))
    v = torch.eye(150).expand(2, 3, 150, 150)
    k = torch.nn.functional.pad(k, (0, 134))
    q = torch.nn.functional.pad(q, (0, 134))
    layout = BlockLayout.sliding_window((70, 150), window_size=(60, 40), block=block)
    y = attention(q, k, v, layout, scale=0.25, dropout_p=0.3, seed=11)
    expected = functional.softmax_dropout(
        q @ k.mT, layout.to_mask()[0, 0], scale=0.25, p=0.3, seed=11
    )
    torch.testing.assert_close(y, expected)
    drops = ~make_mask((2, 3, 70, 150), 0.3, 11)
    assert not y[drops].any()
    assert y[~drops & layout.to_mask().expand_as(drops)].all()


def test_a_part_of_the_heads_drops_as_the_whole(on_cpu: str) -> None:
    """With keys and values of only these heads, and of all heads."""
    q, k, v = (x.detach() for x in _drawn((2, 6, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8)))
    layout = BlockLayout.bigbird(40, block=16)
    options = {"dropout_p": 0.4, "seed": 5}
    whole = attention(q, k, v, layout, **options)
    shard = torchweld.random.Shard([2, 6, 40, 8], [1, 3, 0, 0])
    own = attention(q[1:, 3:], k[1:, 1:], v[1:, 1:], layout, shard=shard, **options)
    torch.testing.assert_close(own, whole[1:, 3:])


@pytest.mark.parametrize(("first_query", "first_key"), [(48, 0), (0, 48), (48, 48)])
def test_a_part_of_the_sequence_is_that_of_the_whole(
    on_cpu: str, first_query: int, first_key: int
) -> None:
    """Distances and drops for keys before, after and at the queries."""
    lines, columns = slice(first_query, first_query + 48), slice(first_key, first_key + 48)
    seen = torch.zeros(1, 1, 96, 96, dtype=torch.bool)
    seen[..., lines, columns] = True
    whole = _drawn(*[(2, 3, 96, 8)] * 3)
    slopes, given_ = torch.tensor([0.5, 0.25, -0.1]), {"dropout_p": 0.4, "seed": 5}
    distance = (torch.arange(96)[:, None] - torch.arange(96)).abs()
    bias = (-slopes[:, None, None] * distance).masked_fill(~seen, -torch.inf)

    q, k, v = whole
    z = (q @ k.mT * 8**-0.5 + bias)[:, :, lines]
    dropped = z.softmax(-1) * make_mask((2, 3, 96, 96), 0.4, 5)[:, :, lines] * find_scale(0.4)
    shard = torchweld.random.Shard([2, 3, 96, 8], [0, 0, first_query, first_key])
    part = (q[:, :, lines], k[:, :, columns], v[:, :, columns])
    layout = BlockLayout.dense(48, block=16)
    y = attention(*part, layout, alibi_slopes=slopes, shard=shard, **given_)
    assert_as_exact(y, dropped @ v, whole)


# --- Heads and layers -----------------------------------------------------------------------------


def test_permuted_heads_have_permuted_layouts(on_cpu: str) -> None:
    order = [2, 0, 3, 1]
    blocks = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.4
    q, k, v = (x.detach() for x in _drawn(*[(2, 4, 96, 16)] * 3))
    y = attention(q, k, v, BlockLayout.from_blocks(blocks, block=16))
    layout = BlockLayout.from_blocks(blocks[order], block=16)
    found = attention(q[:, order], k[:, order], v[:, order], layout)
    assert torch.equal(found, y[:, order])


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_one_length_do_not_mix(compiled: bool) -> None:
    """Each layer keeps its own layout, also in one compiled graph."""
    layouts = [
        BlockLayout.longformer(96, block=16),
        BlockLayout.sliding_window(96, 1, block=16),
        BlockLayout.dense(96, block=32),
    ]

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for layout in layouts:
            q = q + attention(q, k, v, layout)
        return q

    inputs = _drawn(*[(1, 2, 96, 16)] * 3)
    wanted, *keys_and_values = inputs
    for layout in layouts:
        wanted = wanted + attend_exactly((wanted, *keys_and_values), layout.to_mask())
    torch._dynamo.reset()
    function = torch.compile(layers, fullgraph=True, backend="aot_eager") if compiled else layers
    with torchweld.use_backend("cpu"):
        assert_as_exact(function(*inputs), wanted, inputs)


def test_a_layout_may_change_at_every_step_of_a_compiled_function() -> None:
    """There is no recompilation if the lists have the same sizes."""
    torch._dynamo.reset()
    function = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in _drawn(*[(1, 2, 96, 16)] * 3))
    for step in range(4):
        scores = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(step))
        layout = BlockLayout.from_scores(scores, 2, block=16)
        with torchweld.use_backend("cpu"):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                found = function(q, k, v, layout)
            assert torch.equal(found, attention(q, k, v, layout))


# --- Packed sequences, log-sum-exps, sinks --------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_their_own(causal: bool, on_cpu: str) -> None:
    bounds = [0, 30, 31, 100, 130]
    layout = BlockLayout.documents(torch.tensor(bounds), block=32, causal=causal)
    q, k, v = (x.detach() for x in _drawn((4, 130, 16), (2, 130, 16), (2, 130, 16)))
    y = attention(q, k, v, layout)
    for begin, end in itertools.pairwise(bounds):
        parts = [x[None, :, begin:end] for x in (q, k, v)]
        expected = scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True)[0]
        torch.testing.assert_close(y[:, begin:end], expected)


def test_parts_of_keys_merge_by_their_sums(on_cpu: str) -> None:
    """As in ring attention, with gradients through the log-sum-exps."""
    q, k, v = _drawn(*[(1, 2, 64, 16)] * 3)
    layout = BlockLayout.dense((64, 32), block=32)
    halves = [
        attention(q, k[:, :, part], v[:, :, part], layout, return_lse=True)
        for part in (slice(0, 32), slice(32, 64))
    ]
    share = torch.stack([lse for _, lse in halves], -1).softmax(-1)
    merged: Any = sum(y * share[..., i, None] for i, (y, _) in enumerate(halves))
    assert_as_exact(merged, scaled_dot_product_attention(q, k, v), [q, k, v])


def test_sinks_are_keys_without_values(on_cpu: str) -> None:
    """A sink equals one more key per head, with that score and a value of zero."""
    q, k, v, sinks = _drawn(*[(2, 3, 50, 8)] * 3, (3,))
    layout = BlockLayout.sliding_window(50, window_size=(9, 0), block=16)
    z = (q @ k.mT * 8**-0.5).masked_fill(~layout.to_mask(), -torch.inf)
    z = torch.cat([z, sinks.view(1, 3, 1, 1).expand(2, 3, 50, 1)], -1)
    y = attention(q, k, v, layout, sinks=sinks)
    assert_as_exact(y, z.softmax(-1)[..., :-1] @ v, [q, k, v, sinks])


@pytest.mark.parametrize("queries", [1, 20])
def test_a_sink_of_minus_infinity_gets_no_gradient(queries: int, on_cpu: str) -> None:
    """It is a head without a sink, also where a query sees no key."""
    q, k, v = _drawn(*[(1, 2, queries, 8)] * 3)
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    padding = torch.ones(1, queries, dtype=torch.bool)  # nothing is seen
    layout = BlockLayout.dense(queries, block=16)
    y = attention(q, k, v, layout, sinks=sinks, key_padding_mask=padding)
    grads = torch.autograd.grad(y.sum(), [q, k, v, sinks])
    assert [grad.count_nonzero() for grad in (y, *grads)] == [0] * 5


def test_huge_scores_keep_gradients_bounded() -> None:
    """Rounding of scores near 1e8 differs between the passes; a weight is never above 1."""
    q, k = (draw(1, 1, 128, 64, seed=at) * 3e3 for at in (0, 1))
    v = draw(1, 1, 128, 64, seed=2).requires_grad_()
    y = attention(q.requires_grad_(), k, v, BlockLayout.dense(128))
    (found,) = torch.autograd.grad(y, v, torch.ones_like(y))
    assert found.max() <= 128.0 * (1 + 1e-5)


def test_slopes_and_soft_capping(on_cpu: str) -> None:
    """ALiBi's distances are those with the last query aligned to the last key."""
    q, k, v = _drawn((2, 3, 40, 8), (2, 3, 70, 8), (2, 3, 70, 8))
    slopes = torch.tensor([[0.5, 0.25, 0.1], [0.3, 0.2, 0.0]])
    distance = (torch.arange(40)[:, None] + 30 - torch.arange(70)).abs()
    layout = BlockLayout.dense((40, 70), block=16)
    y = attention(q, k, v, layout, alibi_slopes=slopes, softcap=2.0)
    bias, every = -slopes[..., None, None] * distance, torch.ones(40, 70, dtype=torch.bool)
    assert_as_exact(y, attend_exactly((q, k, v), every, bias, 2.0), [q, k, v])


@pytest.mark.parametrize("given_", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cpu", "eager"])
def test_autocast_is_that_of_torchs_attention(name: str, given_: torch.dtype) -> None:
    q, k, v = _drawn(*[(1, 2, 64, 16)] * 3, dtype=given_)
    layout = BlockLayout.dense(64, block=32)
    with torch.autocast("cpu", torch.bfloat16), torchweld.use_backend(name):
        found, expected = attention(q, k, v, layout), scaled_dot_product_attention(q, k, v)
        assert found.dtype == expected.dtype
        assert_as_exact(found, expected, [q, k, v], 0.05)


# A list, the index of one of its numbers, and an invalid number.
UNSOUND = [
    *[(name, (0, 0, 0, 0), bad) for name in ("rows", "columns") for bad in (-1, 4, 2**31 - 1)],
    *[(name, (0, 0, 0, at), 10**6) for name in ("rows", "columns") for at in (1, 2, 3)],
    *[(name, (0, 0, 1, 1), -1) for name in ("rows", "columns")],
    *[(f"{name}_entries", (3, 0), bad) for name in ("row", "column") for bad in (-1, 4)],
    *[(f"{name}_entries", (slice(None), 1), bad) for name in ("row", "column") for bad in (-1, 9)],
]


@pytest.mark.parametrize(("name", "at", "bad"), UNSOUND)
def test_lists_that_lead_out_of_the_layout_are_refused(name: str, at: Any, bad: int) -> None:
    """Passed directly to the CPU's op. Only the backward pass reads the columns."""
    layout = BlockLayout.sliding_window(64, window_size=(20, 9), block=16)
    q = torch.ones(1, 1, 64, 8)
    inputs = list(OP.inputs(q, q, q, layout))
    where = OP.forward_signature.arguments.index(name)
    kernels = OP.kernels["cpu"]
    y, lse = kernels.forward(*inputs)
    assert torch.equal(y, torch.ones_like(q))
    inputs[where] = inputs[where].clone()
    inputs[where][at] = bad
    if name.startswith("column"):
        assert torch.equal(kernels.forward(*inputs)[0], y)
    else:
        with pytest.raises(RuntimeError, match="refer to blocks or masks"):
            kernels.forward(*inputs)
    with pytest.raises(RuntimeError, match="refer to blocks or masks"):
        kernels.backward(y, None, *inputs, y, lse, True, True, True, False, False)


def test_one_sequence_of_keys_serves_the_batch(on_cpu: str) -> None:
    """Keys, values and padding of batch 1, with gradients summed over the batch."""
    q, k, v = _drawn((3, 2, 40, 8), (1, 2, 50, 8), (1, 2, 50, 8))
    padding = torch.arange(50)[None] > 44
    layout = BlockLayout.sliding_window((40, 50), block=16)
    mask = layout.to_mask() & ~padding
    y = attention(q, k, v, layout, key_padding_mask=padding)
    assert_as_exact(y, attend_exactly((q, k, v), mask), [q, k, v])


class _ChoosesItsBlocks(torch.nn.Module):
    """Each block of queries attends to the blocks of keys that score best, as in MoBA."""

    def __init__(self, heads: int | None) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        means = [x.unflatten(2, (-1, 16)).mean(3) for x in (q, k)]
        scores = means[0] @ means[1].mT
        if self.heads is None:
            scores = scores.mean((0, 1))
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        layout = BlockLayout.from_scores(scores.masked_fill(ahead, -torch.inf), 2, block=16)
        return attention(q, k, v, layout, causal=True)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_layout_from_scores_in_a_compiled_model(heads: int | None, mode: str) -> None:
    """One graph makes the layout and uses it, with the numbers of dense attention."""
    torch._dynamo.reset()
    inputs = _drawn(*[(2, 2, 96, 16)] * 3)
    model = _ChoosesItsBlocks(heads)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    layouts: list[BlockLayout] = []
    from_scores = BlockLayout.from_scores

    def expected(*given: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:

            def noted(*scores: Any, **options: Any) -> BlockLayout:
                layouts.append(from_scores(*scores, **options))
                return layouts[-1]

            patch.setattr(BlockLayout, "from_scores", noted)
            model(*given)
        return attend_exactly(given, layouts[-1].causal().to_mask())

    with torchweld.use_backend("cpu"):
        if mode == "training":
            assert_as_exact(compiled(*inputs), expected(*inputs), inputs)
        else:
            with torch.inference_mode():
                y = compiled(*inputs).double()
                torch.testing.assert_close(y, expected(*inputs), **numerics.CHAINED_SMALL)


def test_a_sample_of_heads_with_layouts_of_their_own() -> None:
    """Kernels are judged by the first and last tokens, of the first and last heads."""
    layout = BlockLayout.random(
        2000, 20, block=32, num_heads=4, different_layout_per_head=True, seed=3
    )
    q = torch.randn(1, 4, 2000, 8)
    inputs = OP.inputs(q, q, q, layout)  # type: ignore[misc]
    whole = token_mask(inputs[5], inputs[6], inputs[9], 32, 2000, 2000)
    sample = OP.take_sample(inputs, 4093)
    rows = token_mask(sample[5], sample[6], sample[9], 32, 509, 509)
    last = slice(1491 // 32 * 32, 1491 // 32 * 32 + 509)
    assert torch.equal(rows[0], whole[0, [0, 3], :509, :509])
    assert torch.equal(rows[1], whole[0, [0, 3], last, last])
