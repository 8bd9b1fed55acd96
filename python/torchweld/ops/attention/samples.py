"""Arguments of block_sparse_attention of any size, and parts of arguments on which to judge it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchweld.ops.attention.reference import add_dims, count_distances
from torchweld.registry import BACKENDS, SEED, Made, activation, constant, padding, residual
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import Lists, blocks_of, count_of, make_lists

NO_LISTS = (None,) * 5


def list_lazily(layout: Callable[[], BlockLayout]) -> tuple[Any, ...]:
    """List a layout's tensors, which are made on demand."""
    made = functools.cache(layout)
    return tuple(Made(functools.partial(_take_list, made, at)) for at in range(5))


def _take_list(layout: Callable[[], BlockLayout], at: int) -> Tensor:
    lists = layout().lists
    assert lists is not None
    return lists[at]


@functools.cache
def _every_other(length: int) -> tuple[Any, ...]:
    """All blocks, each with a mask."""
    return list_lazily(
        lambda: BlockLayout.from_mask_fn(lambda b, h, q, k: (q - k) % 3 != 1, length, block=16)
    )


def sized(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    shape = (*leading, *row)
    batch, heads, length, width = (1,) * (4 - len(shape)) + shape
    x = activation(*shape)
    return (
        *(x, x, x, residual(heads, 1, 1), None, *_every_other(length)),
        *(padding(batch, 1, 1, length), constant(heads, 1, 1), 0),
        *(16, 1, 0.5 * (width or 1) ** -0.5, False, 3.0, 0.1, SEED, None, None),
    )


# A short window, to stand for the arguments of a compiled graph.
STAND_IN = (
    *[activation(1, 8, 1024, 64)] * 3,
    *(None, None, *list_lazily(lambda: BlockLayout.sliding_window(1024, 2, block=64))),
    *(None, None, 0, 64, 1, 0.125, False, 0.0, 0.0, None, None, None),
)


def flops(*arguments: Any) -> tuple[int, int]:
    """Count the operations: two products per pair of query and key forward, five backward."""
    q, k, v, _, _, rows, row_entries, columns, *_ = arguments
    queries, keys = add_dims(q).shape[2], add_dims(k).shape[2]
    pairs = add_dims(q).shape[0] * add_dims(q).shape[1] * queries * keys
    if rows is not None:
        lines = rows.shape[0] * rows.shape[1] * rows.shape[2] * columns.shape[2]
        pairs = pairs * row_entries.shape[0] // max(lines, 1)
    narrow, deep = pairs * q.shape[-1], pairs * v.shape[-1]
    return 2 * (narrow + deep), 6 * narrow + 4 * deep


# Queries and keys of a sample, and of each window of one: primes, so that no tile divides them.
_SAMPLED_TOKENS, _WINDOW = 1021, 509


def has_long_lines(args: Any) -> bool:
    """Whether the kernels for the gradients of keys may divide lines of queries into pieces."""
    if BACKENDS["triton"].why_missing() is not None:
        return False
    return bool(args.group * add_dims(args.q).shape[2] > _find_tiles().LEAST_TOKENS)


@contextmanager
def dividing(long_lines: bool) -> Iterator[None]:
    """Let kernels divide a sample's lines, which are short, as they divide long ones."""
    tiles = _find_tiles() if long_lines else None
    if tiles is None:
        yield
        return
    before, tiles.LEAST_TOKENS = tiles.LEAST_TOKENS, _WINDOW // 4
    try:
        yield
    finally:
        tiles.LEAST_TOKENS = before


def _find_tiles() -> Any:
    return importlib.import_module("torchweld.triton_kernels.attention.tiles")


def take_sample(args: Any, rows: int) -> Sequence[Any]:
    """So few tokens that float64 scores fit, and the layout's blocks of these tokens.

    The reference keeps all scores, so the number of rows does not matter. A long sequence gives two
    windows, its start and its end, of the first and the last key head. Where windows would need
    another bias or other heads' keys, they are the first tokens of the first key head.
    """
    q, k = args.q, args.k
    is_whole = q.ndim == 4 and add_dims(k).shape[1] * args.group == add_dims(q).shape[1] > 0
    if is_whole and args.bias is None and min(q.shape[2], k.shape[2]) > _SAMPLED_TOKENS:
        return _sample_windows(args)
    return _sample_first(args)


def _take_lists(args: Any) -> Lists:
    return Lists(*[getattr(args, field) for field in Lists._fields])


def _sample_windows(args: Any) -> Sequence[Any]:
    """Two windows of the first and the last sequence and key head, as sequences of their own."""
    q, k, block, group = args.q, args.k, args.block, args.group
    key_heads = sorted({0, k.shape[1] - 1})
    heads = [head * group + i for head in key_heads for i in range(group)]
    places = [(0, 0, 0), (q.shape[0] - 1, *(_last_window(x.shape[2], block) for x in (q, k)))]

    def take(x: Tensor, of: list[int], at: int) -> Tensor:
        parts = [x[place[0], of, place[at] :][:, :_WINDOW] for place in places]
        return torch.stack(parts).detach().requires_grad_(x.requires_grad)

    made: dict[str, Any] = {"q": take(q, heads, 1)}
    made |= {"k": take(k, key_heads, 2), "v": take(args.v, key_heads, 2)}
    if args.rows is not None:
        count = count_of(_WINDOW, block)
        firsts = [(b, first // block, other // block) for b, first, other in places]
        made |= _cut(_take_lists(args), heads, firsts, count, count)._asdict()
    if (mask := args.key_padding_mask) is not None:
        rows = [mask[b, :, :, first : first + _WINDOW] for b, _, first in places]
        made["key_padding_mask"] = torch.stack(rows)
    if args.sinks is not None:
        made["sinks"] = args.sinks[heads]
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes[..., heads, :, :]
        slopes = slopes[[place[0] for place in places]] if slopes.ndim == 4 else slopes
        made["alibi_slopes"] = slopes
    return args._replace(**made)  # type: ignore[no-any-return]


def _last_window(tokens: int, block: int) -> int:
    """Where the last window begins: at a block."""
    return (tokens - _WINDOW) // block * block


def _sample_first(args: Any) -> Sequence[Any]:
    """The first tokens of the first sequence and key head."""
    q, k, row = args.q, args.k, args.bias_row
    heads = min(args.group, add_dims(q).shape[1])
    # Otherwise k has the heads of all ranks.
    shares_keys = add_dims(k).shape[1] * args.group == add_dims(q).shape[1]
    q = _first(q, 1, heads, _SAMPLED_TOKENS)
    key_heads = 1 if shares_keys else add_dims(k).shape[1]
    k, v = (_first(x, 1, key_heads, _SAMPLED_TOKENS) for x in (k, args.v))
    made: dict[str, Any] = {"q": q, "k": k, "v": v}
    if args.rows is not None:
        counts = [count_of(x.shape[-2] if x.ndim > 1 else 1, args.block) for x in (q, k)]
        made |= _cut(_take_lists(args), list(range(heads)), [(0, 0, 0)], *counts)._asdict()
    if args.key_padding_mask is not None:
        made["key_padding_mask"] = args.key_padding_mask[:1, ..., :_SAMPLED_TOKENS]
    if args.sinks is not None:
        made["sinks"] = args.sinks[:heads]
    if args.alibi_slopes is not None:
        made["alibi_slopes"] = _first(args.alibi_slopes, 1, heads, 1)
    if args.bias is not None:
        last = (count_distances(add_dims(q).shape[2], add_dims(k).shape[2], row),) if row else ()
        sizes = (*(last and (1,)), *(last or (_SAMPLED_TOKENS,) * 2))
        made["bias"] = _first(args.bias, 1, heads, *sizes)
    return args._replace(**made)  # type: ignore[no-any-return]


def _first(x: Tensor, *counts: int) -> Tensor:
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
