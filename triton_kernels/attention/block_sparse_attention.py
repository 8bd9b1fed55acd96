"""Attention over the blocks of a layout in Triton.

With P pairs of a query and a key in the layout's blocks and heads of width d, the forward pass
takes 4 P d operations and the backward pass 14 P d: its two kernels both compute scores and their
gradients, so that neither needs atomics. Past a width of 64, or of 128 on sm_90, the gradients of
keys and of values have a launch each, and the backward pass takes 16 P d. A block of 128 x 128 at
d = 128 takes 8.4 million operations and reads 64 KiB of keys and values, which neighbouring
programs find in L2. So products, not bytes, set the floor.

Programs. A program of the forward pass, or of `attention_dq`, takes a tile of a row of
blocks. A program of `attention_dkv` takes a tile of a column of blocks, and walks over
the transpose for all query heads that share its keys; dkv.py divides long walks into
pieces. So every result is written once, in one order of additions. All heads' longest lines come
first, so that a long global row starts early.

A walk has two loops. The first takes full blocks that need no check. The second takes all others:
blocks across the diagonal, the last block of the sequence, and partial blocks, whose bits it
expands. Blocks past the causal diagonal are excluded before the loops.

Arithmetic. Scores are in units of log 2, so that an exponential is one `exp2`. Every product is
summed in float32; weights and their gradients are rounded to the dtype of their other factor. A
score of -inf is never subtracted from another: rows that see nothing have a base of 0.

On sm_90, specialised.py serves calls without biases, dropout, softcaps, slopes and padding. A
step of 128 x 128 pairs then takes 1024 cycles of the tensor cores for each product at d = 128, and
1024 for its exponentials, which overlap the products: with heads of 64 the exponentials take as
long as both products.

Dropout takes 18 integer operations per element, as much time as the tensor cores take for a product
at d = 128. The tensor cores hide it only where two programs share a processor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from ..dropout import Sizes, check_dropout, dropout_arguments
from ..launch import Launch, forbid_replay, launch, processors, replayed, run
from ..linear_act import precision
from ..memory import find_shared_memory
from ..tensors import aligned, contiguous
from ..tiled import Tile, TiledLaunch, run_tiled
from . import specialised
from .bias import attention_bias_gradient
from .checks import check_lists, place_bias, refuse
from .dkv import attention_dkv, attention_dkv_sums
from .dq import attention_deltas, attention_dq
from .forward import attention_forward
from .tiles import (
    BOTH,
    FORWARD,
    KEYS,
    QUERIES,
    VALUES,
    Pieces,
    divide,
    generation_of,
    sums_of,
    tiles_of,
)

WIDEST_HEAD = 256
_LOG2_E = 1.4426950408889634


# Tensor cores take three passes for float32 products, unless torch may take one pass for its own.
# Plain float32 products of these tiles would not fit into the registers.
def _precision() -> str:
    return "tf32" if precision() == "tf32" else "tf32x3"


_DENSE_BLOCK = 128  # of a layout without lists
_SUMMED_ROWS = 16  # of a program that adds up pieces
_LONGEST_STRIDE = 2**24  # positions in a tile fit 32 bits


def _four(x: torch.Tensor) -> torch.Tensor:
    """Add leading dimensions that were left out; copy unless rows are aligned and contiguous."""
    x = x[(None,) * (4 - x.dim())]
    fits = (x.stride(3) == 1 or x.shape[3] == 1) and x.stride(2) < _LONGEST_STRIDE
    return aligned(x if fits else x.contiguous())


class _Lists(NamedTuple):
    """A layout's rows or columns, as a kernel takes them. Without a table, every block exists."""

    table: torch.Tensor | None
    entries: torch.Tensor | None
    lines: int
    strides: tuple[int, int]  # between batches and heads, in lines
    tokens: int  # of a line, on average


def _lists(
    table: torch.Tensor | None, entries: torch.Tensor | None, own: int, other: int, block: int
) -> _Lists:
    """Describe the lines of a sequence of `own` tokens over a sequence of `other` tokens."""
    if table is None or entries is None:
        return _Lists(None, None, triton.cdiv(own, block), (0, 0), other)
    batch, heads, lines, _ = table.shape
    strides = (heads * lines if batch > 1 else 0, lines if heads > 1 else 0)
    tokens = block * entries.shape[0] // max(batch * heads * lines, 1)
    return _Lists(table.contiguous(), entries.contiguous(), lines, strides, tokens)


class Call(NamedTuple):
    """The op's arguments, as the kernels take them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    rows: _Lists
    columns: _Lists
    beside: tuple[Any, ...]  # masks, padding, slopes, bias, seed
    group: int
    first_head: int
    sloping: tuple[int, int, int]  # strides, and the distance from the first key to the first query
    biasing: tuple[int | None, ...]  # strides, and the number of tokens in a row of a plane
    scale: float
    scoring: tuple[float, float]
    dropout: tuple[Any, ...]
    options: dict[str, Any]
    generation: int  # of the GPU's tiles

    def tiles(self, kernel: str) -> list[Tile]:
        """This call's tiles for a kernel, by the names in tiles.py; the rule's first."""
        lists = self.rows if kernel in (FORWARD, QUERIES) else self.columns
        width = max(self.options["WIDTH"], self.options["DEEP"])
        return tiles_of(
            *(self.generation, kernel, width, self.options["BLOCK"], lists.tokens),
            wide=self.q.dtype.itemsize == 4,
            heavy=any(self.beside[at] is not None for at in (0, 3, 4)),
            biased=self.is_biased(),
        )

    def is_biased(self) -> bool:
        """Whether there is a bias whose places take registers."""
        _, _, stride, row = self.biasing
        return self.beside[3] is not None and (stride is not None or row is not None)

    def tiled(
        self,
        name: str,
        kernel: Any,
        own: Sequence[Any],
        results: Sequence[torch.Tensor | None],
        options: Mapping[str, Any] | None = None,
        make: Callable[[Tile], Launch] | None = None,
        **place: Any,
    ) -> TiledLaunch:
        """Launches of a kernel with its own arguments and options, one for each of its tiles.

        `make` makes the launch of a warp-specialised tile.
        """
        call = self._replace(options={**self.options, **(options or {})})
        lists = self.rows if name in (FORWARD, QUERIES) else self.columns
        size = self.q.shape[0] * self.q.shape[1] * lists.lines * lists.tokens
        given = tuple(x is not None for x in (self.sinks, self.rows.table, *self.beside))
        flags = {**call.options, "GROUP": self.group, "DIVIDED": place.get("extras", 0) > 0}
        tiles = tuple(self.tiles(name))
        if make is not None:
            tiles = specialised.add_tiles(self, name, tiles, place.get("grad"))

        def start(tile: Tile) -> Launch:
            if tile.specialised:
                assert make is not None
                return make(tile)
            return call.launch(kernel, own, tile, **place)

        def describe() -> dict[str, Any]:
            tensors = ("sinks", "lists", "masks", "padding", "slopes", "bias", "dropout")
            return {
                "kernel": f"attention of {name}",
                "dtype": str(self.q.dtype).removeprefix("torch."),
                **{flag.lower(): value for flag, value in flags.items()},
                "with": list(itertools.compress(tensors, given)),
                "tiles": list(map(str, tiles)),  # which depend on the length of lines, too
            }

        return TiledLaunch(
            (name, self.q.dtype, *flags.values(), given, tiles, size.bit_length()),
            describe,
            size.bit_length(),
            tiles,
            start,
            [x for x in results if x is not None],
        )

    def launch(
        self,
        kernel: Any,
        own: Sequence[Any],
        tile: Tile,
        *,
        grad: torch.Tensor | None = None,
        transposed: bool = False,
        extras: int = 0,
        programs: int | None = None,
    ) -> Launch:
        """A launch of a kernel with its own arguments and the arguments of every kernel.

        Lines have `extras` pieces beyond their first ones.
        """
        q, k, v = self.q, self.k, self.v
        lists = self.columns if transposed else self.rows
        names = ("COLUMNS", "ROWS") if transposed else ("ROWS", "COLUMNS")
        planes = q.shape[0] * (k if transposed else q).shape[1]
        if programs is None:
            programs = planes * (lists.lines + extras) * (self.options["BLOCK"] // tile.own)
        return launch(
            kernel,
            programs,
            *own,
            *(lists.table, lists.entries, *self.beside),
            *(planes, q.shape[1], self.group, self.first_head, q.shape[2], k.shape[2]),
            *(q.shape[3], v.shape[3]),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *((0, 0, 0) if grad is None else grad.stride()[:3]),
            *(
                lists.lines,
                *lists.strides,
                *self.sloping,
                *self.biasing,
                *self.scoring,
                *self.dropout,
            ),
            **self.options,
            **dict(zip(names, tile[:2], strict=True)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def make_call(
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
    group: int,
    scale: float,
    causal: bool,
    softcap: float,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> Call:
    *place, first_key = offset or (0,)  # the last offset is that of the keys
    given = check_dropout(q, p, seed, whole, (*place, 0) if offset else offset)
    refuse(bool(whole) and (whole or ())[-1] != q.shape[-1], "shard: q lacks columns")
    refuse(first_key < 0 or first_key % 8 != 0, "shard: the first key is no eighth one")
    refuse(not 1 <= q.dim() <= 4 or q.dim() != k.dim(), "q or k has no fitting dimensions")
    sizes, offsets = ((n,) * (4 - q.dim()) for n in (1, 0))
    sizes, offsets = (*sizes, *(whole or q.shape)), (*offsets, *(offset or (0,) * q.dim()))
    q, k, v = _four(q), _four(k), _four(v)
    (batch, heads, queries, width), (_, key_heads, keys, _) = q.shape, k.shape
    deep = v.shape[3]
    refuse(max(width, deep) > WIDEST_HEAD, f"heads are wider than {WIDEST_HEAD}")
    fits = k.shape[:3] == v.shape[:3] and k.shape[::3] == q.shape[::3]
    refuse(not fits, "k or v does not fit q")
    every = (bias, rows, row_entries, columns, column_entries, masks, padding, slopes, sinks)
    refuse(any(x.device != q.device for x in (k, v, *every) if x is not None), "several devices")
    refuse(k.dtype != q.dtype or v.dtype != q.dtype, "k or v has another dtype than q")
    first_head = 0 if heads == key_heads * group else offsets[1]
    refuse(group < 1 or first_head + heads > key_heads * group, "heads of k do not fit q's")
    numbers = (q.dtype, torch.float32)
    for value, shape in (
        (sinks, [(1, heads, 1, 1)]),
        (slopes, [(b, heads, 1, 1) for b in (1, batch)]),
    ):
        if value is not None:
            fits = (1,) * (4 - value.dim()) + value.shape in shape and value.dtype in numbers
            refuse(not fits, "sinks or alibi_slopes do not fit q")
    if padding is not None:
        fits = padding.shape == (batch, 1, 1, keys) and padding.dtype == torch.bool
        refuse(not fits, "key_padding_mask does not fit k")
    if rows is None:
        block = _DENSE_BLOCK
    else:
        check_lists(q, k, rows, row_entries, columns, column_entries, masks, block)
    sloping = (0, 0, offsets[2] - offsets[3])
    if slopes is not None:
        strides = (slopes.stride(0) if slopes.dim() == 4 else 0, slopes.stride(-3))
        sloping = (*strides, sloping[2])
    seed_, threshold, kept_scale, *_ = dropout_arguments(p, given, (1, 1), None, None)
    number_strides = (sizes[1] * sizes[2], sizes[2])
    first_number = offsets[0] * number_strides[0] + offsets[1] * number_strides[1] + offsets[2]
    has_masks = masks is not None and masks.shape[0] > 0
    padded, padded_deep = (max(triton.next_power_of_2(n), 16) for n in (width, deep))
    bias, biasing = place_bias(bias, bias_row, q, k)
    if q.dtype is torch.float32:
        forbid_replay()  # torch's setting decides how exact its products are
    return Call(
        *(q, k, v, contiguous(sinks)),
        _lists(rows, row_entries, queries, keys, block),
        _lists(columns, column_entries, keys, queries, block),
        (
            contiguous(masks) if has_masks else None,
            None if padding is None else padding.contiguous().view(torch.uint8),
            *(slopes, bias, seed_),
        ),
        group,
        first_head,
        sloping,
        biasing,
        scale,
        (scale / softcap, softcap * _LOG2_E) if softcap else (scale * _LOG2_E, 1.0),
        (threshold, kept_scale, first_key // 8, first_number, *number_strides),
        {
            "CAUSAL": causal,
            "SOFTCAP": bool(softcap),
            "PRECISION": _precision(),
            "BLOCK": block,
            "WIDTH": padded,
            "FITS": padded == width,
            "DEEP": padded_deep,
            "DEEP_FITS": padded_deep == deep,
        },
        _find_generation(q.device),
    )


def _find_generation(device: torch.device) -> int:
    """Whose tiles a GPU takes; elsewhere (interpreter, meta tensors) those of sm_90."""
    if device.type != "cuda":
        return 90
    return generation_of(torch.cuda.get_device_capability(device), find_shared_memory(device))


def forward_tiled(call: Call, y: torch.Tensor, lse: torch.Tensor) -> TiledLaunch:
    own = (call.q, call.k, call.v, call.sinks, y, lse)
    make = functools.partial(specialised.forward_launch, call, y, lse)
    return call.tiled(FORWARD, attention_forward, own, (y, lse), make=make)


def delta_launch(
    call: Call,
    delta: torch.Tensor,
    base: torch.Tensor,
    y: torch.Tensor,
    grad_y: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> Launch:
    rows, width = delta.numel(), call.options["DEEP"]
    own = 4096 // width
    return launch(
        attention_deltas,
        triton.cdiv(rows, own),
        *(delta, base, y, grad_y, lse, grad_lse, rows, *call.q.shape[1:3], call.v.shape[3]),
        *grad_y.stride()[:3],
        ROWS=own,
        WIDTH=width,
        num_warps=8,
    )


def list_tiled_gradients(
    call: Call,
    grad_y: torch.Tensor,
    base: torch.Tensor,
    delta: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
) -> tuple[list[TiledLaunch], list[Launch]]:
    """The launches for the gradients that are wanted: of q, and of k and v. Others follow them."""
    saved = (grad_y, base, delta, call.q, call.k, call.v, call.scale)
    grad_q, *grad_kv = grads
    tiled_launches: list[TiledLaunch] = []
    after: list[Launch] = []
    if grad_q is not None:
        own = (grad_q, *saved)
        make = functools.partial(specialised.dq_launch, call, grad_q, *saved[:3])
        tiled_launches.append(
            call.tiled(QUERIES, attention_dq, own, (grad_q,), make=make, grad=grad_y)
        )
    if any(grad is not None for grad in grad_kv):
        of_keys, after = _list_tiled_keys(call, grad_y, saved, *grad_kv)
        tiled_launches += of_keys
    return tiled_launches, after


def _list_tiled_keys(
    call: Call,
    grad_y: torch.Tensor,
    saved: tuple[Any, ...],
    grad_k: torch.Tensor | None,
    grad_v: torch.Tensor | None,
) -> tuple[list[TiledLaunch], list[Launch]]:
    """Launches for the gradients of k and v; one of the two may not be wanted."""
    options, lists, (batch, key_heads, _, _) = call.options, call.columns, call.k.shape
    block, planes = options["BLOCK"], batch * key_heads
    plain = call.q.dtype.itemsize == 2 and not call.is_biased()
    wanted = {BOTH: True, KEYS: grad_k is not None, VALUES: grad_v is not None}
    width = max(options["WIDTH"], options["DEEP"])
    sums = [name for name in sums_of(call.generation, width, plain=plain) if wanted[name]]
    per_head = lists.strides[1] > 0 and call.group > 1
    pieces = divide(
        *(planes, lists.lines, call.q.shape[2], call.group, block, call.tiles(sums[0])[0].own),
        processors(call.q.device),
        has_table=lists.table is not None,
        per_head=per_head,
    )
    partials, (extras, least) = None, pieces or Pieces(0, 1)
    divided = min(lists.lines, extras)
    if pieces is not None:
        size = block * (options["WIDTH"] + options["DEEP"])
        partials = saved[1].new_empty(planes * (extras + divided) * size)
    make = None
    if grad_k is not None and grad_v is not None:
        make = functools.partial(specialised.dkv_launch, call, grad_k, grad_v, *saved[:3])
    tiled_launches = []
    for name in sums:
        own = (None if name == VALUES else grad_k, None if name == KEYS else grad_v)
        tiled_launches.append(
            call.tiled(
                *(name, attention_dkv),
                (*own, partials, *saved, key_heads, extras, least),
                (*own, partials),
                {
                    "PER_HEAD": per_head,
                    "RAGGED": call.q.shape[2] % block != 0,
                    "OF_KEYS": own[0] is not None,
                    "OF_VALUES": own[1] is not None,
                },
                make,
                grad=grad_y,
                transposed=True,
                extras=extras,
            )
        )
    if partials is None:
        return tiled_launches, []
    after = [_sum_launch(call, grad_k, grad_v, partials, extras, least, per_head=per_head)]
    if sums == [BOTH]:  # a warp-specialised launch does not divide lines
        results = [grad for grad in (grad_k, grad_v) if grad is not None]

        def add_up(tile: Tile) -> list[Launch]:
            return [] if tile.specialised else after

        return [tiled_launches[0]._replace(after=add_up, results=results)], []
    return tiled_launches, after


def _sum_launch(
    call: Call,
    grad_k: torch.Tensor | None,
    grad_v: torch.Tensor | None,
    partials: torch.Tensor,
    extras: int,
    least: int,
    *,
    per_head: bool,
) -> Launch:
    """The launch that adds up the pieces of lines."""
    block, lists = call.options["BLOCK"], call.columns
    planes, rows = call.k.shape[0] * call.k.shape[1], min(block, _SUMMED_ROWS)
    return launch(
        attention_dkv_sums,
        planes * min(lists.lines, extras) * (block // rows),
        *(grad_k, grad_v, partials, lists.table, planes, call.k.shape[1], call.q.shape[1]),
        *(call.group, call.first_head, call.k.shape[2], call.q.shape[3], call.v.shape[3]),
        *(lists.lines, *lists.strides, extras, least),
        **{name: call.options[name] for name in ("BLOCK", "WIDTH", "DEEP")},
        ROWS=rows,
        PER_HEAD=per_head,
        num_warps=4,
    )


# --- Called by the registry, with the signatures of the op's schemas ---


@replayed
def block_sparse_attention(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = make_call(q, *arguments)
    y = q.new_empty((*q.shape[:-1], call.v.shape[3]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if lse.numel():
        run_tiled(q, forward_tiled(call, y, lse))
    return y, lse


@replayed
def block_sparse_attention_backward(
    grad_y: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    *shared, y, lse, need_q, need_k, need_v, need_sinks, need_bias = arguments
    call = make_call(q, k, v, sinks, bias, *shared)
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    refuse((grad_y.shape, grad_y.dtype) != (y.shape, q.dtype), "grad_y does not fit y")
    made = torch.empty_like if lse.numel() else torch.zeros_like
    grads = [
        made(x, memory_format=torch.contiguous_format) if wanted else None
        for x, wanted in ((q, need_q), (k, need_k), (v, need_v))
    ]
    delta, base = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        grad_y, lse = _four(grad_y), lse.contiguous()
        lse_gradient = None if grad_lse is None else grad_lse.contiguous()
        run(q, delta_launch(call, delta, base, y, grad_y, lse, lse_gradient))
        tiled_launches, after = list_tiled_gradients(call, grad_y, base, delta, grads)
        for tiled in tiled_launches:
            run_tiled(q, tiled)
        run(q, *after)
    grad_sinks = grad_bias = None
    if bias is not None and need_bias:
        grad_bias = _gradient_of_bias(call, bias, grad_y, base, delta)
    if sinks is not None and need_sinks:
        grad_sinks = _gradient_of_sinks(sinks, lse, delta)
    return tuple(q.new_empty(0) if x is None else x for x in (*grads, grad_sinks, grad_bias))


# The most bytes for sums by distance, and the fewest parts of a head that run concurrently.
_SUMS_BYTES = 16 << 20
_FEWEST_PARTS = 64
_BIAS_TILE = 32


def bias_launch(
    call: Call,
    bias: torch.Tensor,
    grad_y: torch.Tensor,
    base: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[Launch, torch.Tensor]:
    """The launch for the gradient of a bias, and the sums that it adds to."""
    (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
    bias = bias[(None,) * (4 - bias.dim())]
    own = min(call.options["BLOCK"], _BIAS_TILE)
    tiles = call.rows.lines * (call.options["BLOCK"] // own)
    by_pair, parts = call.biasing[2] is not None, 1
    if by_pair:
        programs = tiles * bias.shape[0] * bias.shape[1]
        sums = call.q.new_zeros((*bias.shape[:2], queries, keys), dtype=torch.float32)
    else:
        each = max(4 * heads * bias.shape[3], 1)
        parts = min(tiles * batch, max(_FEWEST_PARTS, _SUMS_BYTES // each))
        programs = parts * heads
        sums = call.q.new_zeros((parts, heads, bias.shape[3]), dtype=torch.float32)
    scratch = None if by_pair else sums.new_empty((programs, own, own))
    launched = call.launch(
        attention_bias_gradient,
        (
            *(sums, scratch, parts, bias.shape[0], bias.shape[1], bias.shape[3]),
            *(grad_y, base, delta, call.q, call.k, call.v),
        ),
        Tile(own, own, 4, 1),
        grad=grad_y,
        programs=programs,
    )
    return launched, sums


def _gradient_of_bias(
    call: Call, bias: torch.Tensor, grad_y: torch.Tensor, base: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor:
    if not base.numel() or not call.k.shape[2]:
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    launched, sums = bias_launch(call, bias, grad_y, base, delta)
    run(call.q, launched)
    if call.biasing[2] is None:
        sums = sums.sum(0)  # in one order
        if bias.numel() < sums.numel():
            sums = sums.sum(0)
    return sums.to(bias.dtype).view(bias.shape)


def _gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks: a sink is a key whose value is zero."""
    lse, delta = (x[(None,) * (3 - x.dim())] for x in (lse, delta))
    weight = torch.exp(sinks.float().view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype).view(sinks.shape)
