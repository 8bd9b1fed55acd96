"""block_sparse_attention of a few queries, as in decoding: lines are split, then merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from exact_attention import draw
from oracle import assert_same_bits_on_any_threads
from torchweld import functional, numerics
from torchweld.ops.attention.block_sparse import OP
from torchweld.random import Shard
from torchweld.sparse import BlockBias, BlockLayout

attention: Callable[..., Any] = functional.block_sparse_attention
KEYS = 1300


def _run(backend: str, inputs: list[Any], *rest: Any, **options: Any) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torchweld.use_backend(backend):
        y, lse = attention(*leaves, *rest, return_lse=True, **options)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad(y.sin().sum() + finite.sum(), leaves)
    return [y.detach(), lse.detach(), *grads]


def _draw(*shape: int, **how: Any) -> torch.Tensor:
    return draw(*shape, **how).detach()


def _some_blocks(queries: int) -> BlockLayout:
    """Heads whose lines are of different lengths, one of them empty."""
    rows = -(-queries // 16)
    blocks = torch.rand(4, rows, -(-KEYS // 16), generator=torch.Generator().manual_seed(1))
    blocks = blocks < torch.tensor([0.9, 0.3, 0.02, 0.0])[:, None, None]
    return BlockLayout.from_blocks(blocks, block=16, seq_len=(queries, KEYS))


LAYOUTS: dict[str, Callable[[int], BlockLayout]] = {
    "dense": lambda queries: BlockLayout.dense((queries, KEYS)),
    "window": lambda queries: BlockLayout.sliding_window((queries, KEYS), window_size=(700, 0)),
    "blocks": _some_blocks,
    "tokens": lambda queries: BlockLayout.from_mask_fn(
        lambda b, h, q, k: (q + k) % 3 == 0, (queries, KEYS), block=128
    ),
}
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda queries: {},
    "causal": lambda queries: {"causal": True, "softcap": 2.0},
    "extras": lambda queries: {
        "alibi_slopes": torch.tensor([0.01, 0.02, 0.0, 0.1]),
        "sinks": _draw(4, seed=7),
        "key_padding_mask": torch.arange(KEYS).expand(2, -1) % 5 == 1,
    },
    "dropout": lambda queries: {
        "dropout_p": 0.3,
        "seed": 5,
        "shard": Shard((4, 4, KEYS, 20), (2, 0, 9, 0)),
    },
    "bias": lambda queries: {"bias": _draw(2, 4, queries, KEYS, seed=8)},
    "table": lambda queries: {"bias": BlockBias.relative(_draw(4, 30), torch.arange(59) % 30)},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [1, 5])
def test_as_eager(queries: int, layout: str, option: str) -> None:
    """Results and gradients, with keys that two heads share and values of odd width."""
    inputs = [
        _draw(2, 4, queries, 20),
        _draw(2, 2, KEYS, 20, seed=1),
        _draw(2, 2, KEYS, 33, seed=2),
    ]
    given = (LAYOUTS[layout](queries),)
    options = OPTIONS[option](queries)
    found, wanted = (_run(backend, inputs, *given, **options) for backend in ("cpu", "eager"))
    torch.testing.assert_close(found, wanted, **numerics.SUMMED_SMALL)


@given(
    queries=st.integers(1, 17),
    keys=st.integers(0, 1200),
    width=st.sampled_from([1, 16, 40]),
    deep=st.sampled_from([1, 16, 40]),
    group=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
    causal=st.booleans(),
)
def test_any_lengths(**drawn: Any) -> None:
    """Property: as float64 in eager torch, also with more queries than keys."""
    queries, keys, width, deep, group, dtype, strided, causal = drawn.values()
    q = _draw(1, 2 * group, queries, width, dtype=dtype)
    k, v = _draw(1, 2, keys, width, seed=1, dtype=dtype), _draw(1, 2, keys, deep, dtype=dtype)
    if strided:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    layout = BlockLayout.dense((queries, keys))
    with torchweld.use_backend("cpu"):
        y = attention(q, k, v, layout, causal=causal)
    with torchweld.use_backend("eager"):
        exact = attention(q.double(), k.double(), v.double(), layout, causal=causal)
    unit = {torch.float64: 1e-13}.get(dtype, 8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(y.double(), exact, rtol=unit, atol=unit)


def test_bits_do_not_depend_on_threads() -> None:
    inputs = [_draw(1, 4, 3, 64), *(_draw(1, 2, 9000, 64, seed=i) for i in (1, 2))]
    layout = BlockLayout.dense((3, 9000))
    with torchweld.use_backend("cpu"):
        assert_same_bits_on_any_threads(lambda: [attention(*inputs, layout)])


def test_infinities_and_nan_stay_in_their_blocks() -> None:
    layout = BlockLayout.from_blocks(torch.tensor([[True, False, True]]), block=16, seq_len=(2, 48))
    q, k, v = _draw(1, 1, 2, 8), _draw(1, 1, 48, 8), _draw(1, 1, 48, 8)
    with torchweld.use_backend("cpu"):
        expected = attention(q, k, v, layout)
        k[:, :, 16:32], v[:, :, 16:32] = torch.nan, torch.inf
        assert torch.equal(attention(q, k, v, layout), expected)
        k[:, :, 40] = torch.nan
        assert attention(q, k, v, layout).isnan().all()


# --- Warm calls ---


@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_warm_calls_have_the_same_bits(layout: str, queries: int, dtype: torch.dtype) -> None:
    """Without gradients, with and without scale, causal limit and lse."""
    q = _draw(2, 4, queries, 20, dtype=dtype)
    k, v = _draw(2, 2, KEYS, 20, seed=1, dtype=dtype), _draw(2, 2, KEYS, 33, seed=2, dtype=dtype)
    made = LAYOUTS[layout](queries)
    for options in ({}, {"scale": 0.3}, {"causal": True, "scale": -2.0}):
        with torchweld.use_backend("cpu"):
            wanted = [x.detach() for x in attention(q, k, v, made, return_lse=True, **options)]
        for _ in range(2):
            with torch.no_grad():
                found = attention(q, k, v, made, return_lse=True, **options)
                assert torch.equal(attention(q, k, v, made, **options), wanted[0])
            torch.testing.assert_close(found, wanted, **numerics.SAME)
