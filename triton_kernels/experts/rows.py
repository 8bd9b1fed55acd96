"""What experts_mlp does on a GPU besides its products: the order of rows, and sums over them.

Rows are sorted by expert. A product's tiles of rows belong to one expert each, and how many there
are is known only on the device: the host launches the most there can be, and `_map_tiles` tells
each one its rows. Sums over a token's experts read the rows that belong to it: no atomics, the same
bits every run.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..act import _tile_of
from ..launch import Launch, launch
from ..tensors import load, store


class Order(NamedTuple):
    """The rows in the order of their experts; parts of one int32 tensor, which is saved."""

    places: torch.Tensor  # of a row in the flat indices; skipped ones come last
    rows: torch.Tensor  # of a place
    bounds: torch.Tensor  # the first row of each expert, and the end of the last


def split_order(saved: torch.Tensor, rows: int, experts: int) -> Order:
    """The parts of what `sort` made."""
    return Order(*saved.split([rows, rows, experts + 1]))


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[Launch]]:
    """Sort the rows by expert, stably; the launches complete the tensor."""
    flat = indices.reshape(-1)
    saved = flat.new_empty(2 * len(flat) + experts + 1, dtype=torch.int32)
    # Keys of 16 bits: a radix sort passes over each byte.
    kind = torch.int16 if experts < 2**15 else torch.int32
    keys = flat.masked_fill((flat < 0) | (flat >= experts), experts).to(kind)
    keys, order = keys.sort(stable=True)
    numbers = torch.arange(experts + 1, device=keys.device, dtype=kind)
    parts = split_order(saved, len(flat), experts)
    torch.searchsorted(keys, numbers, out_int32=True, out=parts.bounds)
    grid = triton.cdiv(len(flat), 1024)
    return saved, [launch(_invert, grid, order, *parts[:2], len(flat), BLOCK=1024, num_warps=4)]


@triton.jit(do_not_specialize=["rows"])
def _invert(order_ptr, places_ptr, rows_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(order_ptr + row, mask=row < rows, other=0).to(tl.int32)
    tl.store(places_ptr + row, place, mask=row < rows)
    tl.store(rows_ptr + place, row, mask=row < rows)


# --- Tiles of rows --------------------------------------------------------------------------------


def count_tiles(rows: int, experts: int, size: int) -> int:
    """The most tiles of this size that rows can take if each has rows of one expert."""
    return (rows + min(rows, experts) * (size - 1)) // size


def map_tiles(order: Order, size: int) -> tuple[torch.Tensor, Launch]:
    """The expert, the first row and the end of each tile; the expert is -1 where there is none."""
    experts = len(order.bounds) - 1
    tiles = count_tiles(len(order.places), experts, size)
    places = order.places.new_empty(3, tiles)
    return places, launch(
        _map_tiles,
        triton.cdiv(tiles, 32),
        *(order.bounds, places, experts, tiles),
        ROWS=size,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK=32,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["experts", "tiles"])
def _map_tiles(
    bounds_ptr,
    tiles_ptr,
    experts,
    tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.arange(0, EXPERTS)
    first = tl.load(bounds_ptr + number, mask=number < experts, other=0)
    end = tl.load(bounds_ptr + number + 1, mask=number < experts, other=0)
    ends = tl.cumsum(tl.cdiv(end - first, ROWS), 0)[None, :]
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_before = ends <= tile[:, None]
    expert = tl.sum(is_before.to(tl.int32), 1)
    begin = tl.max(tl.where(is_before, ends, 0), 1)
    known = expert < experts
    first = tl.load(bounds_ptr + expert, mask=known, other=0) + (tile - begin) * ROWS
    end = tl.load(bounds_ptr + expert + 1, mask=known, other=0)
    inside = tile < tiles
    tl.store(tiles_ptr + tile, tl.where(known, expert, -1), mask=inside)
    tl.store(tiles_ptr + tiles + tile, first, mask=inside)
    tl.store(tiles_ptr + 2 * tiles + tile, end, mask=inside)


# --- Sums -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "experts"])
def _combine(
    y_ptr,
    weights_ptr,
    rows_ptr,
    bounds_ptr,
    out_ptr,
    tokens,
    width,
    experts,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over each token's rows, in the order of its indices; skipped ones are zero."""
    column_tiles = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (token < tokens)[:, None] & (column < width)
    known = tl.load(bounds_ptr + experts)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        place = token.to(tl.int64) * TOP + k
        row = tl.load(rows_ptr + place, mask=token < tokens, other=0)
        is_known = (row < known)[:, None] & inside
        part = load(y_ptr, row.to(tl.int64)[:, None], column, width, is_known)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + place, mask=(token < tokens) & (row < known), other=0)
            part *= weight.to(tl.float32)[:, None]
        total += part
    store(out_ptr, token.to(tl.int64)[:, None], column, width, total, inside)


def combine_launch(
    y: torch.Tensor, weights: torch.Tensor | None, order: Order, out: torch.Tensor, top: int
) -> Launch:
    """Add the rows of each token, times their weights if there are any, into `out`."""
    tokens, width = out.shape
    tile = _tile_of(width)
    return launch(
        _combine,
        triton.cdiv(tokens, tile["ROWS"]) * triton.cdiv(width, tile["BLOCK"]),
        *(y, weights, order.rows, order.bounds, out, tokens, width, len(order.bounds) - 1),
        TOP=top,
        **tile,
    )


@triton.jit(do_not_specialize=["rows", "experts", "parts"])
def _weights_gradient(
    partials_ptr,
    rows_ptr,
    bounds_ptr,
    indices_ptr,
    grad_ptr,
    bias_ptr,
    grad_weights_ptr,
    rows,
    experts,
    parts,
    width,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of each row's parts, and of the result's gradient times the second bias."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows_ptr + place, mask=place < rows, other=0)
    known = (place < rows) & (row < tl.load(bounds_ptr + experts))
    total = tl.zeros([ROWS], tl.float32)
    partials_ptr += row
    for _ in range(parts):
        total += tl.load(partials_ptr, mask=known, other=0)
        partials_ptr += rows
    if bias_ptr is not None:
        expert = tl.load(indices_ptr + place, mask=known, other=0).to(tl.int64)[:, None]
        token = (place // TOP).to(tl.int64)[:, None]
        products = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = (start + tl.arange(0, BLOCK))[None, :]
            inside = known[:, None] & (column < width)
            grad = load(grad_ptr, token, column, width, inside)
            products += grad * load(bias_ptr, expert, column, width, inside)
        total += tl.sum(products, 1)
    value = total.to(grad_weights_ptr.dtype.element_ty)
    tl.store(grad_weights_ptr + place, value, mask=place < rows)


def weights_gradient_launch(
    partials: torch.Tensor,
    order: Order,
    indices: torch.Tensor,
    grad: torch.Tensor,
    bias: torch.Tensor | None,
    grad_weights: torch.Tensor,
) -> Launch:
    """`partials` is [parts, rows], in the order of the experts."""
    rows, experts = len(order.places), len(order.bounds) - 1
    tile = {"ROWS": 16, "BLOCK": 128} if bias is not None else {"ROWS": 128, "BLOCK": 1}
    return launch(
        _weights_gradient,
        triton.cdiv(rows, tile["ROWS"]),
        *(partials, *order[1:], indices, grad, bias, grad_weights),
        *(rows, experts, len(partials), grad.shape[1]),
        TOP=indices.shape[-1],
        num_warps=4,
        **tile,
    )


@triton.jit(do_not_specialize=["experts"])
def _bias_gradient(
    rows_ptr,
    weights_ptr,
    places_ptr,
    bounds_ptr,
    grad_ptr,
    width,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over an expert's rows, or over its tokens' rows, times their weights."""
    column_tiles = tl.cdiv(width, BLOCK)
    expert = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    first, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)
        if TOP:
            place = tl.load(places_ptr + row, mask=row < end, other=0)
            at = (place // TOP).to(tl.int64)
        part = load(rows_ptr, at[:, None], column, width, (row < end)[:, None] & (column < width))
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + place, mask=row < end, other=0)
            part *= weight.to(tl.float32)[:, None]
        total += part
    value = tl.sum(total, 0)[None, :]
    store(grad_ptr, expert.to(tl.int64), column, width, value, column < width)


def bias_gradient_launch(
    rows: torch.Tensor, weights: torch.Tensor | None, top: int, order: Order, grad: torch.Tensor
) -> Launch:
    """`top` is 0 if the rows are in the order of the experts, else the rows are the tokens'."""
    experts, width = grad.shape
    block = 64
    return launch(
        _bias_gradient,
        experts * triton.cdiv(width, block),
        *(rows, weights, order.places, order.bounds, grad, width),
        TOP=top,
        ROWS=32,
        BLOCK=block,
        num_warps=4,
    )
