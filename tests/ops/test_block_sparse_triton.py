"""block_sparse_attention's Triton kernels in the interpreter.

The contract pools the errors of all samples. One of them has ten thousand heads, which the
interpreter would run one after another. This file runs the other samples, and tests that only these
kernels need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import interpreting
from oracle import incoming
from selection import TRITON_DEVICE as DEVICE
from selection import of_triton
from torchweld import BackendError, numerics, random
from torchweld.bench.cases import CASES
from torchweld.dispatch import op_proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.functional import block_sparse_attention
from torchweld.ops.attention.block_sparse import OP
from torchweld.registry import TensorSpec, materialize
from torchweld.sparse import BlockLayout
from watched import assert_right_if_watched

pytestmark = of_triton

SAMPLES = CASES[OP.name].samples
FEW = [i for i, sample in enumerate(SAMPLES) if sample[0].shape[-3:][0] < 1000]
# Every argument; keys that are not as many as queries, and share heads.
TELLING = (0, 6)


def _few_heads(sample: tuple[Any, ...]) -> list[Any]:
    """The sample with two of the 20 heads that pool enough errors: one program takes one head."""

    def take(spec: Any) -> Any:
        if not isinstance(spec, TensorSpec):
            return spec
        return replace(spec, shape=tuple(2 if size == 20 else size for size in spec.shape))

    heads = sample[0].shape[-3:][0]
    return [take(value) if heads == 20 else value for value in sample]


@pytest.mark.parametrize(
    ("dtype", "at"),
    [(torch.float32, i) for i in FEW] + [(torch.float16, i) for i in TELLING],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_samples(dtype: torch.dtype, at: int) -> None:
    """Errors are bounded, exactly the results are written, and fakes are right."""
    inputs = materialize(_few_heads(SAMPLES[at]), dtype, DEVICE, param_dtype=dtype, seed=at)
    assert_right_if_watched(OP, "triton", inputs, sums_weights=True)


def _assert_as_reference(layout: BlockLayout, q: Any, k: Any, **options: Any) -> None:
    """The kernels' results and gradients equal the reference's."""

    def results(function: Any) -> Any:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, k + 1)]
        arguments = OP.inputs(*inputs, layout, **options)  # type: ignore[misc]
        y, lse = as_tuple(function(*arguments))
        loss = (y * incoming(y)).sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
        return [y, lse, *torch.autograd.grad(loss, inputs)]

    found, wanted = results(functools.partial(call, OP)), results(OP.reference)
    torch.testing.assert_close(found, wanted, **numerics.CHAINED_SMALL)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


@pytest.mark.parametrize("queries", [600, 2100])
def test_a_check_divides_lines_as_the_call_does(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at first use tries pieces of lines if a call of its class may have them.

    Its lines have 509 tokens, and pieces begin at 2048: they were never tried.
    """
    from torchweld.triton_kernels.attention import block_sparse_attention

    q = torch.randn(1, 1, queries, 16, device=DEVICE, requires_grad=True)
    layout = BlockLayout.sliding_window(queries, 2, block=32, device=DEVICE)
    inputs = OP.inputs(q, q, q, layout)  # type: ignore[misc]
    divided: list[bool] = []
    divide = block_sparse_attention.divide

    def record(*args: Any, **options: Any) -> Any:
        pieces = divide(*args, **options)
        divided.append(pieces is not None)
        return pieces

    monkeypatch.setattr(block_sparse_attention, "divide", record)
    question = op_proof.make_question(OP, inputs)
    found, wanted = question.run("triton"), question.exact()
    assert divided == [queries > 2048]
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name], **numerics.CHAINED)
    short = OP.inputs(*[q[:, :, :600]] * 3, BlockLayout.sliding_window(600, 2, block=32))  # type: ignore[misc]
    same = op_proof.class_of(OP, inputs) == op_proof.class_of(OP, short)
    assert same == (queries <= 2048)


_HUGE = {
    "scores": {},
    "a negative scale": {"scale": -0.3},
    "sinks": {"sinks": torch.tensor([3.0])},
    "a soft cap": {"softcap": 1e10},
    "slopes": {"alibi_slopes": torch.tensor([0.5])},
    "hidden keys": {"causal": True},
}


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU fuses products by itself")
@pytest.mark.parametrize("case", _HUGE)
def test_huge_scores(case: str) -> None:
    """Scores beyond 1e9 give each query the value of its best key.

    The compiler fused the scale into the subtraction of the rounded maximum, so the largest of
    such scores was up to 128 away from 0, and a row was zero or NaN. The interpreter rounds each
    operation: now it fuses as a GPU does.
    """
    q, k = _random(1, 1, 96, 16), _random(1, 1, 96, 16)
    q[..., 1:], k[..., 1:] = 0, 0  # exact products
    q[..., 0] *= 3e5
    k[..., 0] *= 1e5
    v = torch.arange(96.0, device=DEVICE)[None, None, :, None].expand(1, 1, 96, 16)
    layout = BlockLayout.dense(96, block=32, device=DEVICE)
    inputs = OP.inputs(q, k, v, layout, **_HUGE[case])  # type: ignore[misc]
    with interpreting.fusing_products():
        y, lse = as_tuple(call(OP, *inputs))
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    exact_y, exact_lse = as_tuple(OP.reference(*wide))
    torch.testing.assert_close(lse.double(), exact_lse, **numerics.ROUNDED)
    is_clear = (exact_y - exact_y.round()).abs().amax(-1) < 1e-6
    assert is_clear.sum() > 90
    torch.testing.assert_close(y.double()[is_clear], exact_y[is_clear])


def test_heads_that_share_keys_with_layouts_of_their_own() -> None:
    """The lists of a column have different positions in the tables of different heads."""
    layout = BlockLayout.random(
        (48, 80), 2, block=16, num_heads=4, different_layout_per_head=True, device=DEVICE
    )
    _assert_as_reference(layout, _random(1, 4, 48, 8), _random(1, 2, 80, 8))


def test_empty_rows_and_columns() -> None:
    blocks = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    blocks[..., 1, 2] = blocks[..., 3, 0] = True
    layout = BlockLayout.from_blocks(blocks, block=16, seq_len=60).to(DEVICE)
    q = _random(1, 1, 60, 8)
    _assert_as_reference(layout, q, q + 1)
    y: Any = block_sparse_attention(q, q, q, layout)
    assert not y[:, :, :16].any()
    assert y[:, :, 16:32].all()


def test_lists_with_room_for_more() -> None:
    """A layout from scores has entries that no line has."""
    scores = _random(2, 5, 5).masked_fill(torch.eye(5, dtype=torch.bool).to(DEVICE), -torch.inf)
    layout = BlockLayout.from_scores(scores, 5, block=16, seq_len=70)
    q = _random(1, 2, 70, 8)
    _assert_as_reference(layout, q, q + 1, causal=True)


@pytest.mark.parametrize("block", [16, 128])
def test_tiles_that_are_not_the_layouts_blocks(block: int) -> None:
    """Several entries per tile and several tiles per entry, across the causal diagonal."""
    layout = BlockLayout.strided(200, 2, block=block, device=DEVICE)
    q = _random(1, 1, 200, 16).transpose(2, 3).contiguous().transpose(2, 3)
    _assert_as_reference(layout, q, _random(1, 1, 200, 16), causal=True, scale=-0.3)


@pytest.mark.parametrize(("first_query", "first_key"), [(32, 0), (0, 32), (32, 32)])
def test_a_shard_of_queries_and_keys_is_that_of_the_whole(first_query: int, first_key: int) -> None:
    """It drops the same weights, and has the same distances: keys are before, after or aligned."""
    q, k = _random(1, 2, 32, 8), _random(1, 2, 32, 8)
    shard = random.Shard((1, 2, 64, 8), (0, 0, first_query, first_key))
    slopes = torch.tensor([0.5, 0.1], device=DEVICE)
    layout = BlockLayout.dense(32, block=16, device=DEVICE)
    options = {"alibi_slopes": slopes, "dropout_p": 0.4, "seed": 7, "shard": shard}
    _assert_as_reference(layout, q, k, **options)


def test_wide_heads_are_refused() -> None:
    """The interpreter's place selects Triton by name."""
    wide, narrow = _random(1, 1, 4, 300), _random(1, 1, 4, 8)
    for q, v in ((wide, narrow), (narrow, wide)):
        with pytest.raises(BackendError, match="heads of 300 are wider than 256"):
            block_sparse_attention(q, q, v, BlockLayout.dense(4, device=DEVICE))


# --- Long columns, which are divided into pieces ---


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of at least 16 tokens. A test fails if one of its calls had no line of several."""
    from torchweld.triton_kernels.attention import block_sparse_attention, tiles

    counts, list_tiled_keys = [], block_sparse_attention._list_tiled_keys

    def launch_and_count(call: Any, *rest: Any) -> Any:
        tiled_launches, after = list_tiled_keys(call, *rest)
        (summed,) = after or tiled_launches[0].after(tiled_launches[0].tiles[0])
        *_, extras, least = summed.args
        table = call.columns.table
        if table is None or summed.options["PER_HEAD"]:
            counts.append(extras)
        else:
            lengths = (table[0, 0, :, 3] - table[0, 0, :, 1]) * call.group
            most = max(-(-int(lengths.sum()) // extras), least)
            counts.append(int((lengths > most).sum()))
        return tiled_launches, after

    monkeypatch.setattr(tiles, "LEAST_TOKENS", 16)
    monkeypatch.setattr(block_sparse_attention, "_list_tiled_keys", launch_and_count)
    yield
    assert counts
    assert all(counts)


def _ragged(queries: int, keys: int, heads: int = 1, block: int = 16) -> BlockLayout:
    """Columns of 0 to 3 blocks, and one of all."""
    rows, columns = -(-queries // block), -(-keys // block)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    blocks = (row < column % 4) | (column == 1)
    every = [blocks.roll(head, 1) for head in range(heads)]
    layout = BlockLayout.from_blocks(torch.stack(every)[None], block=block, seq_len=(queries, keys))
    return layout.to(DEVICE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_pieces_of_ragged_columns(divided: None, causal: bool, p: float) -> None:
    q, k = _random(2, 2, 90, 16), _random(2, 2, 101, 16)
    options = {"dropout_p": p, "seed": 5} if p else {}
    _assert_as_reference(_ragged(90, 101), q, k, causal=causal, **options)


def test_pieces_of_partial_blocks(divided: None) -> None:
    """A piece may begin among the blocks without masks and end among those with masks."""
    layout = BlockLayout.from_mask_fn(
        lambda b, h, q, k: ((q - k).abs() < 5) | ((k < 16) & (q % 7 != 3)) | ((k < 16) & (q > 60)),
        150,
        block=16,
    )
    q = _random(1, 2, 150, 8)
    _assert_as_reference(layout.to(DEVICE), q, q + 1, causal=True)


@pytest.mark.parametrize("block", [16, 64])
def test_pieces_of_one_global_column(divided: None, block: int) -> None:
    """Tiles of queries are longer than blocks of 16."""
    layout = BlockLayout.longformer(
        10 * block, block=block, num_sliding_window_blocks=1, device=DEVICE
    )
    q = _random(1, 1, 10 * block, 16)
    _assert_as_reference(layout, q, q + 1)


@pytest.mark.parametrize("layout", ["dense", "shared", "own"])
def test_pieces_of_heads_that_share_keys(
    divided: None, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lists, with one layout for all heads, and with one for each query head."""
    from torchweld.triton_kernels.attention import block_sparse_attention

    monkeypatch.setattr(block_sparse_attention, "processors", lambda device: 20)
    layouts = {
        "dense": BlockLayout.dense(40, block=16, device=DEVICE),
        "shared": _ragged(40, 40),
        "own": _ragged(40, 40, heads=5),
    }
    q = _random(1, 5, 40, 8)
    options = {"causal": layout != "shared", "dropout_p": 0.2, "seed": 3}
    _assert_as_reference(layouts[layout], q, _random(1, 1, 40, 8), **options)


def test_pieces_of_wide_heads_and_of_one_gradient(divided: None) -> None:
    """Sums of keys and of values in launches of their own."""
    layout, q = _ragged(64, 64), _random(1, 1, 64, 80)
    _assert_as_reference(layout, q, q + 1)
    for wanted in ("k", "v"):
        inputs = {name: q.clone().requires_grad_(name == wanted) for name in "qkv"}
        y: Any = block_sparse_attention(inputs["q"], inputs["k"], inputs["v"], layout)
        (found,) = torch.autograd.grad(y.square().sum(), [inputs[wanted]])
        inputs = {name: q.double().requires_grad_(name == wanted) for name in "qkv"}
        y, _ = as_tuple(OP.reference(*OP.inputs(*inputs.values(), layout)))  # type: ignore[misc]
        (exactly,) = torch.autograd.grad(y.square().sum(), [inputs[wanted]])
        torch.testing.assert_close(found.double(), exactly, **numerics.CHAINED)


def test_any_pieces_give_the_same_numbers_each_time(
    divided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a table's lines are not in the order of their lengths."""
    from torchweld.triton_kernels.attention import block_sparse_attention, tiles

    monkeypatch.setattr(block_sparse_attention, "processors", lambda device: 100)
    layout, q = _ragged(90, 90), _random(1, 1, 90, 8)
    inputs = [q.clone().requires_grad_() for _ in range(3)]
    arguments = OP.inputs(*inputs, layout, dropout_p=0.2, seed=3)  # type: ignore[misc]
    at = OP.forward_signature.arguments.index("columns")
    turned = [*arguments]
    turned[at] = arguments[at].flip(2)
    kinds = []
    for least in (16, 32, 64):
        monkeypatch.setattr(tiles, "LEAST_TOKENS", least)
        runs = []
        # The interpreter has one thread, which takes any pieces in the same order each time.
        again = [arguments] if least == 16 or DEVICE == "cuda" else []
        for given in (arguments, turned, *again):
            y, _ = as_tuple(call(OP, *given))
            runs.append(torch.autograd.grad(y.square().sum(), inputs))
        torch.testing.assert_close(runs[0], runs[1], **numerics.SUMMED_SMALL)
        for other_run in runs[2:]:
            torch.testing.assert_close(runs[0], other_run, **numerics.SAME)
        kinds.append(runs[0])
    for kind in kinds[1:]:
        torch.testing.assert_close(kind, kinds[0], **numerics.SUMMED_SMALL)
    assert any(not torch.equal(kind[1], kinds[0][1]) for kind in kinds)  # other pieces were added
