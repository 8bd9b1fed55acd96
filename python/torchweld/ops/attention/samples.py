"""Arguments of block_sparse_attention for tests and benchmarks, and its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.ops.attention.reference import add_dims, count_distances
from torchweld.registry import SEED, Made, TensorSpec, activation, constant, padding, residual
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import Lists, blocks_of, count_of, make_lists


def _list_lazily(layout: Callable[[], BlockLayout]) -> tuple[Any, ...]:
    """List a layout's tensors, which are made on demand."""
    made = functools.cache(layout)
    return tuple(Made(functools.partial(_take_list, made, at)) for at in range(5))


def _take_list(layout: Callable[[], BlockLayout], at: int) -> torch.Tensor:
    lists = layout().lists
    assert lists is not None
    return lists[at]


_NONE = (None,) * 5
_WHOLE = (None, None)


@functools.cache
def _every_other(length: int) -> tuple[Any, ...]:
    """All blocks, each with a mask."""
    return _list_lazily(
        lambda: BlockLayout.from_mask_fn(lambda b, h, q, k: (q - k) % 3 != 1, length, block=16)
    )


def sized(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    shape = (*leading, *row)
    batch, heads, length, width = (1,) * (4 - len(shape)) + shape
    x = activation(*shape)
    return (
        *(x, x, x, residual(heads, 1, 1), None, *_every_other(length)),
        *(padding(batch, 1, 1, length), constant(heads, 1, 1), 0),
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
    value_width: int | None = None,
    bias: TensorSpec | None = None,
    bias_row: int = 0,
) -> tuple[Any, ...]:
    heads = shape[-3] if len(shape) > 2 else 1
    of_head = (heads, 1, 1)
    key_shape = key_shape or shape
    value = (*key_shape[:-1], key_shape[-1] if value_width is None else value_width)
    return (
        *(activation(*shape), activation(*key_shape), activation(*value)),
        *(residual(*of_head) if sinks else None, bias),
        *(_list_lazily(layout) if layout else _NONE),
        *(None, constant(*of_head) if slopes else None, bias_row, block, group),
        *((shape[-1] or 1) ** -0.5, causal, softcap, p, SEED if p else None, *_WHOLE),
    )


# Lengths that are and are not multiples of the block, heads that share keys, every argument, one
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
    # Values narrower and wider than keys.
    _sample((2, 4, 70, 24), (2, 2, 70, 24), group=2, causal=True, value_width=16, p=0.1),
    _sample(
        (1, 2, 90, 20),
        layout=lambda: BlockLayout.bigbird(90, block=32),
        block=32,
        value_width=130,
        sinks=True,
    ),
    # Biases for each pair, of the whole batch and of all heads, and by distance.
    _sample(
        (2, 3, 70, 16),
        (2, 3, 90, 16),
        lambda: BlockLayout.sliding_window((70, 90), 1, block=32),
        block=32,
        softcap=4.0,
        bias=activation(1, 3, 70, 90),
    ),
    _sample((2, 2, 33, 8), causal=True, bias=activation(2, 1, 33, 33), p=0.2),
    _sample(
        (2, 3, 150, 16),
        layout=lambda: BlockLayout.bigbird(150, block=64),
        block=64,
        value_width=8,
        causal=True,
        bias=residual(3, 1, 299),
        bias_row=150,
        p=0.1,
    ),
    _sample((3, 2, 35, 12), bias=residual(2, 1, 117), bias_row=7),
    # Enough distances, and enough heads, to pool the errors of biases and of sinks.
    _sample((1, 20, 300, 32), bias=residual(20, 1, 599), bias_row=300),
    _sample((1, 10000, 2, 3), causal=True, sinks=True, bias=residual(10000, 1, 3), bias_row=2),
    _sample((2, 0, 8, 16)),
    _sample((2, 3, 0, 16)),
)


def flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    row_entries: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_entries: torch.Tensor | None,
    masks: torch.Tensor | None,
    padding: torch.Tensor | None,
    slopes: torch.Tensor | None,
    bias_row: int,
    block: int,
    *_: Any,
) -> tuple[int, int]:
    """Count the operations: two products per pair of query and key forward, five backward."""
    queries, keys = add_dims(q).shape[2], add_dims(k).shape[2]
    pairs = add_dims(q).shape[0] * add_dims(q).shape[1] * queries * keys
    if rows is not None and row_entries is not None and columns is not None:
        lines = rows.shape[0] * rows.shape[1] * rows.shape[2] * columns.shape[2]
        pairs = pairs * row_entries.shape[0] // max(lines, 1)
    narrow, deep = pairs * q.shape[-1], pairs * v.shape[-1]
    return 2 * (narrow + deep), 6 * narrow + 4 * deep


def benchmark_window(
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


# Queries and keys of a sample, and of each window of one: primes, so that no tile divides them.
_SAMPLED_TOKENS, _WINDOW = 1021, 509


def take_sample(inputs: Sequence[Any], rows: int) -> list[Any]:
    """So few tokens that float64 scores fit, and the layout's blocks of these tokens.

    The reference keeps all scores, so the number of rows does not matter. A long sequence gives two
    windows, its start and its end, of the first and the last key head. Where windows would need
    another bias or other heads' keys, they are the first tokens of the first key head.
    """
    q, k, bias, group = inputs[0], inputs[1], inputs[4], inputs[14]
    is_whole = q.ndim == 4 and add_dims(k).shape[1] * group == add_dims(q).shape[1] > 0
    if is_whole and bias is None and min(q.shape[2], k.shape[2]) > _SAMPLED_TOKENS:
        return _sample_windows(inputs)
    return _sample_first(inputs)


def _sample_windows(inputs: Sequence[Any]) -> list[Any]:
    """Two windows of the first and the last sequence and key head, as sequences of their own."""
    q, k, v, sinks, bias, *lists, padding_mask, slopes, row, block, group = inputs[:15]
    key_heads = sorted({0, k.shape[1] - 1})
    heads = [head * group + i for head in key_heads for i in range(group)]
    places = [(0, 0, 0), (q.shape[0] - 1, *(_last_window(x.shape[2], block) for x in (q, k)))]

    def take(x: torch.Tensor, of: list[int], at: int) -> torch.Tensor:
        parts = [x[place[0], of, place[at] :][:, :_WINDOW] for place in places]
        return torch.stack(parts).detach().requires_grad_(x.requires_grad)

    q, k, v = take(q, heads, 1), take(k, key_heads, 2), take(v, key_heads, 2)
    if lists[0] is not None:
        count = count_of(_WINDOW, block)
        firsts = [(b, first // block, other // block) for b, first, other in places]
        lists = list(_cut(Lists(*lists), heads, firsts, count, count))
    if padding_mask is not None:
        rows = [padding_mask[b, :, :, first : first + _WINDOW] for b, _, first in places]
        padding_mask = torch.stack(rows)
    sinks = None if sinks is None else sinks[heads]
    if slopes is not None:
        slopes = slopes[..., heads, :, :]
        slopes = slopes[[place[0] for place in places]] if slopes.ndim == 4 else slopes
    return [q, k, v, sinks, bias, *lists, padding_mask, slopes, row, *inputs[13:]]


def _last_window(tokens: int, block: int) -> int:
    """Where the last window begins: at a block."""
    return (tokens - _WINDOW) // block * block


def _sample_first(inputs: Sequence[Any]) -> list[Any]:
    """The first tokens of the first sequence and key head."""
    q, k, v, sinks, bias, *lists, padding_mask, slopes, row, block, group = inputs[:15]
    heads = min(group, add_dims(q).shape[1])
    # Otherwise k has the heads of all ranks.
    shares_keys = add_dims(k).shape[1] * group == add_dims(q).shape[1]
    q = _first(q, 1, heads, _SAMPLED_TOKENS)
    key_heads = 1 if shares_keys else add_dims(k).shape[1]
    k, v = (_first(x, 1, key_heads, _SAMPLED_TOKENS) for x in (k, v))
    if lists[0] is not None:
        counts = [count_of(x.shape[-2] if x.ndim > 1 else 1, block) for x in (q, k)]
        lists = list(_cut(Lists(*lists), list(range(heads)), [(0, 0, 0)], *counts))
    if padding_mask is not None:
        padding_mask = padding_mask[:1, ..., :_SAMPLED_TOKENS]
    sinks = None if sinks is None else sinks[:heads]
    slopes = None if slopes is None else _first(slopes, 1, heads, 1)
    if bias is not None:
        last = (count_distances(add_dims(q).shape[2], add_dims(k).shape[2], row),) if row else ()
        bias = _first(bias, 1, heads, *(last and (1,)), *(last or (_SAMPLED_TOKENS,) * 2))
    return [q, k, v, sinks, bias, *lists, padding_mask, slopes, row, *inputs[13:]]


def _first(x: torch.Tensor, *counts: int) -> torch.Tensor:
    """Take the first `counts` of the batch, heads and tokens, as far as x has such dimensions."""
    leading = counts[max(0, 4 - x.ndim) :]
    return x[tuple(slice(count) for count in leading)]


def _cut(
    whole: Lists, heads: list[int], places: list[tuple[int, int, int]], rows: int, columns: int
) -> Lists:
    """The lists of parts of some heads: each part has a sequence, its first row and first column.

    The parts are the sequences of the result.
    """
    blocks, (batch, all_heads, all_rows, _) = blocks_of(whole), whole.rows.shape
    all_columns = whole.columns.shape[2]
    heads = heads if all_heads > 1 else [0]
    line, column = blocks.number // all_columns, blocks.number % all_columns
    plane, row = line // all_rows, line % all_rows
    numbers, masks = [], []
    for part, (sequence, first_row, first_column) in enumerate(places):
        for at, head in enumerate(heads):
            down, right = row - first_row, column - first_column
            own = plane == min(sequence, batch - 1) * all_heads + head
            inside = own & (down >= 0) & (down < rows) & (right >= 0) & (right < columns)
            number = ((part * len(heads) + at) * rows + down) * columns + right
            numbers.append(number[inside])
            masks += [] if blocks.mask is None else [blocks.mask[inside]]
    sizes = (len(places), len(heads), rows, columns)
    return make_lists(torch.cat(numbers), torch.cat(masks) if masks else None, blocks.masks, sizes)
