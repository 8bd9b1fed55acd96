"""Arguments of block_sparse_attention for tests and benchmarks, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchweld.ops.attention.reference import four
from torchweld.registry import SEED, Made, activation, constant, padding, residual
from torchweld.sparse import BlockLayout


def _listed(layout: Callable[[], BlockLayout]) -> tuple[Any, ...]:
    """A layout's lists, made on demand."""
    made = functools.cache(layout)
    return tuple(Made(functools.partial(_list_of, made, at)) for at in range(5))


def _list_of(layout: Callable[[], BlockLayout], at: int) -> torch.Tensor:
    lists = layout().lists
    assert lists is not None
    return lists[at]


_NONE = (None,) * 5
_WHOLE = (None, None)


@functools.cache
def _every_other(length: int) -> tuple[Any, ...]:
    """All blocks, each with a mask."""
    return _listed(
        lambda: BlockLayout.from_mask_fn(lambda b, h, q, k: (q - k) % 3 != 1, length, block=16)
    )


def sized(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    shape = (*leading, *row)
    batch, heads, length, width = (1,) * (4 - len(shape)) + shape
    x = activation(*shape)
    return (
        *(x, x, x, residual(heads, 1, 1), *_every_other(length)),
        *(padding(batch, 1, 1, length), constant(heads, 1, 1)),
        *(16, 1, 0.5 * (width or 1) ** -0.5, False, 3.0, 0.1, SEED, *_WHOLE),
    )


def _sample(
    shape: tuple[int, ...],
    key_shape: tuple[int, ...] | None = None,
    layout: Callable[[], BlockLayout] | None = None,
    *,
    block: int = 16,
    group: int = 1,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: bool = False,
    slopes: bool = False,
    p: float = 0.0,
) -> tuple[Any, ...]:
    heads = shape[-3] if len(shape) > 2 else 1
    of_head = (heads, 1, 1)
    key = activation(*(key_shape or shape))
    return (
        *(activation(*shape), key, key, residual(*of_head) if sinks else None),
        *(_listed(layout) if layout else _NONE),
        *(None, constant(*of_head) if slopes else None, block, group),
        *((shape[-1] or 1) ** -0.5, causal, softcap, p, SEED if p else None, *_WHOLE),
    )


# Lengths that are multiples of the block and others, heads that share keys, every argument, one
# token, no tokens.
SAMPLES = (
    sized((2, 3, 37), (24,)),
    sized((3,), (5,)),
    _sample((1, 1, 1, 1)),
    _sample((1, 2, 5, 3), causal=True, sinks=True),
    _sample((1, 2, 3, 5), (1, 1, 4, 5), group=2, causal=True, p=0.3),
    _sample((2, 2, 100, 16), layout=lambda: BlockLayout.bigbird(100, block=16), p=0.2),
    _sample(
        (1, 4, 70, 33),
        (1, 2, 131, 33),
        lambda: BlockLayout.sliding_window((70, 131), window_size=(40, 30), block=32),
        block=32,
        group=2,
        slopes=True,
    ),
    _sample(
        (2, 4, 150, 64),
        (2, 1, 150, 64),
        lambda: BlockLayout.longformer(150, block=64, num_sliding_window_blocks=1),
        block=64,
        group=4,
        causal=True,
        softcap=5.0,
    ),
    _sample(
        (3, 300, 40),
        layout=lambda: BlockLayout.fixed(
            300, block=32, num_heads=3, num_different_global_patterns=3
        ),
        block=32,
        p=0.1,
        sinks=True,
    ),
    _sample((1, 1, 200, 128), layout=lambda: BlockLayout.strided(200, block=128), block=128),
    _sample((2, 3, 60, 17), causal=True, slopes=True),
    # The errors of sinks are pooled over this many heads.
    _sample((1, 10000, 2, 3), causal=True, sinks=True),
    _sample((2, 0, 8, 16)),
    _sample((2, 3, 0, 16)),
)


def flops(
    q, k, v, sinks, rows, row_entries, columns, column_entries, masks, padding, slopes, block, *_
):
    """Two products for each pair of a query and a key forward, five backward."""
    queries, keys = four(q).shape[2], four(k).shape[2]
    pairs = four(q).shape[0] * four(q).shape[1] * queries * keys
    if rows is not None:
        lines = rows.shape[0] * rows.shape[1] * rows.shape[2] * columns.shape[2]
        pairs = pairs * row_entries.shape[0] // max(lines, 1)
    products = pairs * q.shape[-1]
    return 4 * products, 10 * products


def measured(
    length: int, heads: int = 8, width: int = 64, block: int = 64
) -> tuple[tuple[Any, ...], ...]:
    def window(blocks: int) -> Callable[[], BlockLayout]:
        return lambda: BlockLayout.sliding_window(length, blocks, block=block)

    shape = (1, heads, length, width)
    blocks = length // block
    return (
        _sample(shape, layout=window(blocks // 8), block=block),
        _sample(shape, layout=window(blocks // 16), block=block),
        _sample(shape, layout=window(blocks // 16), block=block, causal=True, p=0.1),
    )


TINY = _sample((1, 1, 64, 16))
