"""Attention over the blocks of a layout in Triton.

With P pairs of a query and a key in the layout's blocks and heads of d, the forward takes 4 P d
operations, the backward 14 P d: its two kernels compute scores and their gradients twice, for which
neither needs atomics. A block of 128 x 128 at d = 128 takes 8.4 million operations and reads 64 KiB
of keys and values, which neighbouring programs find in L2: products, not bytes, are the floor.

Programs. One of the forward, and of `_query_gradient`, has a tile of a row of blocks; one of
`_key_gradients` has a tile of a column of blocks, and walks the transpose, over all query heads
that share its keys. So every result is written once, in one order of additions. Lines are handed
out by falling length, all heads' longest first: a global row starts when the rest starts.

A walk has two loops. The first takes full blocks in which nothing is to be checked. The second
takes the others: blocks across the diagonal, the last one of the sequence, and partial ones, whose
words of bits it expands. Blocks behind the causal diagonal are counted away before the loops.

Arithmetic. Scores are in units of log 2, so that an exponential is one `exp2`. Every product adds
up in float32; weights and their gradients are rounded to the dtype of what they multiply. A score
of -inf is never subtracted from another: rows that see nothing have a base of 0.

Dropout takes 18 integer operations an element, as long as the tensor cores take for a product at d
= 128. It hides behind them only where two programs share a processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton

from .attention_backward import (
    attention_deltas,
    attention_key_gradients,
    attention_query_gradient,
)
from .attention_forward import attention_forward
from .dropout import Sizes, check_dropout, dropout_arguments
from .launch import Launch, launch, run
from .linear_act import precision
from .tensors import aligned, contiguous, empty_like

WIDEST_HEAD = 256
_LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """What a program has of queries and of keys: its own, and as many as it takes at a time."""

    own: int
    taken: int
    warps: int
    stages: int


# By the padded head: what a program has at most, so that sums fit the registers. Its own are no
# more than a block's.
_FORWARD = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)}
_QUERY_GRADIENT = {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
_KEY_GRADIENTS = {64: Tile(64, 32, 8, 2), 128: Tile(64, 32, 8, 1), 256: Tile(32, 32, 8, 1)}


# float32 products in three passes of the tensor cores, unless torch may take one for its own: plain
# float32 products of such tiles would not fit the registers.
def _precision() -> str:
    return "tf32" if precision() == "tf32" else "tf32x3"


_DENSE_BLOCK = 128  # of a layout without lists


def _four(x: torch.Tensor) -> torch.Tensor:
    """With the leading dimensions that were left out, and adjacent columns in aligned rows."""
    x = x[(None,) * (4 - x.dim())]
    return aligned(x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous())


def _tile(
    tiles: dict[int, Tile], width: int, block: int, line: int, wide: bool, heavy: bool
) -> Tile:
    """The tile for a padded head, a block, and lines of so many tokens on average.

    `wide`: elements are of float32; `heavy`: random numbers or bits of masks take registers.
    """
    own, taken, warps, stages = tiles[max(width, 64)]
    if wide:
        own, taken, warps, stages = min(own, 32), 32, 8, 1
    elif heavy:
        taken = 32
    if block < own:
        own, warps = block, max(warps * block // own, 4)
    # A walk's last tile is half empty on average: short walks take smaller ones.
    while taken > 32 and 4 * taken > line:
        taken //= 2
    return Tile(own, taken, warps, stages)


class _Lists(NamedTuple):
    """A layout's rows or columns as a kernel takes them; without a table all blocks are there."""

    table: torch.Tensor | None
    entries: torch.Tensor | None
    lines: int
    strides: tuple[int, int]  # between batches and heads, in lines
    tokens: int  # those of a line, on average


def _lists(
    table: torch.Tensor | None, entries: torch.Tensor | None, own: int, other: int, block: int
) -> _Lists:
    """For a sequence of `own` tokens, whose lines have tokens of the `other`."""
    if table is None or entries is None:
        return _Lists(None, None, triton.cdiv(own, block), (0, 0), other)
    batch, heads, lines, _ = table.shape
    strides = (heads * lines if batch > 1 else 0, lines if heads > 1 else 0)
    tokens = block * entries.shape[0] // max(batch * heads * lines, 1)
    return _Lists(table.contiguous(), entries.contiguous(), lines, strides, tokens)


class _Call(NamedTuple):
    """An op's arguments as the kernels take them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    rows: _Lists
    columns: _Lists
    beside: tuple[torch.Tensor | None, ...]  # masks, padding, slopes, seed
    group: int
    first_head: int
    sloping: tuple[int, int, int]  # strides, and how far the first query is from the first key
    scale: float
    scoring: tuple[float, float]
    dropout: tuple[Any, ...]
    options: dict[str, Any]

    def launch(
        self,
        kernel: Any,
        tiles: dict[int, Tile],
        *first: Any,
        grad: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> Launch:
        """A kernel with `first`, its own arguments, and all that every kernel takes."""
        q, k, v = self.q, self.k, self.v
        lists = self.columns if transposed else self.rows
        block, width = self.options["BLOCK"], self.options["WIDTH"]
        heavy = self.beside[0] is not None or self.beside[3] is not None
        tile = _tile(tiles, width, block, lists.tokens, q.dtype.itemsize == 4, heavy)
        names = ("COLUMNS", "ROWS") if transposed else ("ROWS", "COLUMNS")
        planes = q.shape[0] * (k if transposed else q).shape[1]
        return launch(
            kernel,
            planes * lists.lines * (block // tile.own),
            *first,
            *(lists.table, lists.entries, *self.beside),
            *(planes, q.shape[1], self.group, self.first_head, q.shape[2], k.shape[2], q.shape[3]),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *((0, 0, 0) if grad is None else grad.stride()[:3]),
            *(lists.lines, *lists.strides, *self.sloping, *self.scoring, *self.dropout),
            **self.options,
            **dict(zip(names, tile[:2], strict=True)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(what)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    rows: torch.Tensor | None,
    row_entries: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_entries: torch.Tensor | None,
    masks: torch.Tensor | None,
    padding: torch.Tensor | None,
    slopes: torch.Tensor | None,
    block: int,
    group: int,
    scale: float,
    causal: bool,
    softcap: float,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> _Call:
    *place, first_key = offset or (0,)  # the last offset is that of the keys
    check_dropout(q, p, seed, whole, (*place, 0) if offset else offset)
    _refuse(bool(whole) and (whole or ())[-1] != q.shape[-1], "shard: q lacks columns")
    _refuse(first_key < 0 or first_key % 4 != 0, "shard: the first key is no fourth one")
    _refuse(not 1 <= q.dim() <= 4 or q.dim() != k.dim(), "q or k has no fitting dimensions")
    sizes, offsets = ((n,) * (4 - q.dim()) for n in (1, 0))
    sizes, offsets = (*sizes, *(whole or q.shape)), (*offsets, *(offset or (0,) * q.dim()))
    q, k, v = _four(q), _four(k), _four(v)
    (batch, heads, queries, width), (_, key_heads, keys, _) = q.shape, k.shape
    _refuse(width > WIDEST_HEAD, f"heads are wider than {WIDEST_HEAD}")
    _refuse(k.shape != v.shape or k.shape[::3] != q.shape[::3], "k or v does not fit q")
    every = (rows, row_entries, columns, column_entries, masks, padding, slopes, sinks)
    _refuse(any(x.device != q.device for x in (k, v, *every) if x is not None), "several devices")
    _refuse(k.dtype != q.dtype or v.dtype != q.dtype, "k or v has another dtype than q")
    first_head = 0 if heads == key_heads * group else offsets[1]
    _refuse(group < 1 or first_head + heads > key_heads * group, "heads of k do not fit q's")
    numbers = (q.dtype, torch.float32)
    for value, shape in (
        (sinks, [(1, heads, 1, 1)]),
        (slopes, [(b, heads, 1, 1) for b in (1, batch)]),
    ):
        if value is not None:
            fits = (1,) * (4 - value.dim()) + value.shape in shape and value.dtype in numbers
            _refuse(not fits, "sinks or alibi_slopes do not fit q")
    if padding is not None:
        fits = padding.shape == (batch, 1, 1, keys) and padding.dtype == torch.bool
        _refuse(not fits, "key_padding_mask does not fit k")
    if rows is None:
        block = _DENSE_BLOCK
    else:
        _check_lists(q, k, rows, row_entries, columns, column_entries, masks, block)
    sloping = (0, 0, offsets[2] - offsets[3])
    if slopes is not None:
        strides = (slopes.stride(0) if slopes.dim() == 4 else 0, slopes.stride(-3))
        sloping = (*strides, sloping[2])
    seed_, threshold, kept_scale, *_ = dropout_arguments(p, seed, (1, 1), None, None)
    number_strides = (sizes[1] * sizes[2], sizes[2])
    first_number = offsets[0] * number_strides[0] + offsets[1] * number_strides[1] + offsets[2]
    has_masks = masks is not None and masks.shape[0] > 0
    padded = max(triton.next_power_of_2(width), 16)
    return _Call(
        *(q, k, v, contiguous(sinks)),
        _lists(rows, row_entries, queries, keys, block),
        _lists(columns, column_entries, keys, queries, block),
        (
            contiguous(masks) if has_masks else None,
            None if padding is None else padding.contiguous().view(torch.uint8),
            slopes,
            seed_,
        ),
        *(group, first_head, sloping, scale),
        (scale / softcap, softcap * _LOG2_E) if softcap else (scale * _LOG2_E, 1.0),
        (threshold, kept_scale, first_key // 4, first_number, *number_strides),
        {
            "CAUSAL": causal,
            "SOFTCAP": bool(softcap),
            "PRECISION": _precision(),
            "BLOCK": block,
            "WIDTH": padded,
            "FITS": padded == width,
        },
    )


def _check_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    row_entries: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_entries: torch.Tensor | None,
    masks: torch.Tensor | None,
    block: int,
) -> None:
    """Refuse lists that lead out of q and k."""
    every = (rows, row_entries, columns, column_entries, masks)
    _refuse(any(x is None or x.dtype != torch.int32 for x in every), "lists are not all int32")
    assert columns is not None
    assert masks is not None
    _refuse(block not in (16, 32, 64, 128), "no kernel for the layout's block")
    for lines, length in ((rows, q.shape[2]), (columns, k.shape[2])):
        sizes = [(1, n) for n in q.shape[:2]] + [(triton.cdiv(length, block),), (4,)]
        fits = lines.dim() == 4 and all(n in s for n, s in zip(lines.shape, sizes, strict=True))
        _refuse(not fits, "the layout's lines do not fit q and k")
    for entries in (row_entries, column_entries):
        _refuse(entries is None or entries.shape[1:] != (2,), "the layout's entries are not pairs")
    _refuse(masks.shape[1:] != (block * max(block // 32, 1),), "masks do not fit the block")


def _forward_launch(call: _Call, y: torch.Tensor, lse: torch.Tensor) -> Launch:
    own = (call.q, call.k, call.v, call.sinks, y, lse)
    return call.launch(attention_forward, _FORWARD, *own)


def _delta_launch(
    call: _Call,
    delta: torch.Tensor,
    y: torch.Tensor,
    grad_y: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> Launch:
    rows, width = delta.numel(), call.options["WIDTH"]
    own = 4096 // width
    return launch(
        attention_deltas,
        triton.cdiv(rows, own),
        *(delta, y, grad_y, grad_lse, rows, call.q.shape[1], call.q.shape[2], call.q.shape[3]),
        *grad_y.stride()[:3],
        ROWS=own,
        WIDTH=width,
        num_warps=8,
    )


def _gradient_launches(
    call: _Call,
    grad_y: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
) -> list[Launch]:
    """Those of the gradients that are wanted: of q, and of k and v."""
    saved = (grad_y, lse, delta, call.q, call.k, call.v, call.scale)
    grad_q, *grad_kv = grads
    found = []
    if grad_q is not None:
        found.append(
            call.launch(attention_query_gradient, _QUERY_GRADIENT, grad_q, *saved, grad=grad_y)
        )
    if grad_kv[0] is not None:
        own = (*grad_kv, *saved, call.k.shape[1])
        launched = call.launch(
            attention_key_gradients, _KEY_GRADIENTS, *own, grad=grad_y, transposed=True
        )
        launched.options["PER_HEAD"] = call.columns.strides[1] > 0 and call.group > 1
        found.append(launched)
    return found


# --- Called by the registry, with the signatures of the op's schemas ---


def block_sparse_attention(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(q, *arguments)
    y, lse = empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if lse.numel():
        run(q, _forward_launch(call, y, lse))
    return y, lse


def block_sparse_attention_backward(
    grad_y: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    *arguments, y, lse, need_q, need_k, need_v, need_sinks = arguments
    call = _call(q, k, v, sinks, *arguments)
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    _refuse((grad_y.shape, grad_y.dtype) != (q.shape, q.dtype), "grad_y does not fit q")
    nothing = q.new_empty(0)
    keys_wanted = need_k or need_v
    made = torch.empty_like if lse.numel() else torch.zeros_like
    grads = [
        made(x, memory_format=torch.contiguous_format) if wanted else None
        for x, wanted in ((q, need_q), (k, keys_wanted), (v, keys_wanted))
    ]
    delta = torch.empty_like(lse)
    if lse.numel():
        grad_y = _four(grad_y)
        given = None if grad_lse is None else grad_lse.contiguous()
        launches = _gradient_launches(call, grad_y, lse, delta, grads)
        run(q, _delta_launch(call, delta, y, grad_y, given), *launches)
    grad_sinks = nothing
    if sinks is not None and need_sinks:
        grad_sinks = _gradient_of_sinks(sinks, lse, delta)
    grad_q, grad_k, grad_v = (nothing if x is None else x for x in grads)
    return grad_q, grad_k if need_k else nothing, grad_v if need_v else nothing, grad_sinks


def _gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A sink is a key whose value is zero."""
    lse, delta = (x[(None,) * (3 - x.dim())] for x in (lse, delta))
    weight = torch.exp(sinks.float().view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype).view(sinks.shape)


def _meta_call(
    width: int,
    dtype: torch.dtype,
    block: int | None,
    *,
    causal: bool = False,
    every: bool = False,
    p: float = 0.0,
) -> _Call:
    """A call on tensors of no memory; `every`: with all the arguments that there are."""

    def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    length, lists = 4096, (None,) * 5
    if block is not None:
        table = make(1, 8, length // block, 4, kind=torch.int32)
        entries = make(8 * 512 * length // block, 2, kind=torch.int32)
        masks = make(4 if every else 0, block * max(block // 32, 1), kind=torch.int32)
        lists = (table, entries, table, entries, masks)
    q, k = make(2, 8, length, width), make(2, 4, length, width)
    return _call(
        *(q, k, k, make(8, 1, 1) if every else None, *lists),
        make(2, 1, 1, length, kind=torch.bool) if every else None,
        make(8, 1, 1, kind=torch.float32) if every else None,
        *(block or 64, 2, width**-0.5, causal, 5.0 if every else 0.0),
        *(p, make(1, kind=torch.int64) if p else None, None, None),
    )


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for width, dtype, block, options in (
        (128, bf16, None, {"causal": True}),
        (64, fp16, 64, {"every": True, "p": 0.1}),
        (64, fp32, 64, {}),
    ):
        call = _meta_call(width, dtype, block, **options)
        name = f"{width} {dtype} {block} {' '.join(options)}".replace("torch.", "")
        lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.float32)
        yield name, _forward_launch(call, call.q, lse)
        yield name, _delta_launch(call, lse, call.q, call.q, lse)
        for launched in _gradient_launches(call, call.q, lse, lse, (call.q, call.k, call.v)):
            yield name, launched
