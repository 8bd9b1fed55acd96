"""The grouped products of experts_mlp; experts.py has the figures.

A program has one tile. Tiles of rows belong to one expert each, by the map that rows.py
makes, and programs past the last leave at once. Rows past an expert's end repeat its first row,
whose results are not stored: the loop needs no masks for them.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from ..act import activate, activation_gradient
from ..tensors import load, load_parameter, store
from ..tile import halves, tile_in_band


@triton.jit
def _multiply(
    left_ptr,
    left_row,
    left_stride,
    right_ptr,
    right_column,
    right_inside,
    right_column_stride,
    right_stride,
    inner,
    PRECISION: tl.constexpr,
    INNER_FITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Rows of the left factor times columns of the right one."""
    k = tl.arange(0, INNER)
    left_ptr += left_row.to(tl.int64)[:, None] * left_stride + k[None, :]
    right_ptr += right_column[None, :] * right_column_stride + k[:, None] * right_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inner, INNER):
        if INNER_FITS:
            left = tl.load(left_ptr)
            right = tl.load(right_ptr, mask=right_inside[None, :], other=0)
        else:
            inside = start + k < inner
            left = tl.load(left_ptr, mask=inside[None, :], other=0)
            right = tl.load(right_ptr, mask=inside[:, None] & right_inside[None, :], other=0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        left_ptr += INNER
        right_ptr += INNER * right_stride
    return total


@triton.jit
def _find_rows(tiles_ptr, row_tiles, row_tile, ROWS: tl.constexpr):
    """The rows of a tile, and which of them are its expert's."""
    first = tl.load(tiles_ptr + row_tiles + row_tile)
    end = tl.load(tiles_ptr + 2 * row_tiles + row_tile)
    row = first + tl.arange(0, ROWS)
    inside = row < end
    return tl.where(inside, row, first), inside


# --- Activations ----------------------------------------------------------------------------------


@triton.jit
def _limit_gate(gate, limit):
    # A comparison keeps NaN.
    if limit is None:
        return gate
    else:
        return tl.where(gate > limit, limit, gate)


@triton.jit
def _limit_up(up, limit):
    if limit is None:
        return up
    else:
        return tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _find_hidden(gate, up, limit, up_offset, ACTIVATION: tl.constexpr):
    return activate(_limit_gate(gate, limit), ACTIVATION) * (_limit_up(up, limit) + up_offset)


@triton.jit
def _find_gradients(gate, up, grad, limit, up_offset, ACTIVATION: tl.constexpr):
    """The gradients of gate and up, and the hidden layer."""
    limited, shifted = _limit_gate(gate, limit), _limit_up(up, limit) + up_offset
    active = activate(limited, ACTIVATION)
    grad_gate = activation_gradient(limited, grad * shifted, ACTIVATION)
    grad_up = grad * active
    if limit is not None:
        grad_gate = tl.where(gate > limit, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > limit, 0.0, grad_up)
    return grad_gate, grad_up, active * shifted


@triton.jit
def _separate(pairs):
    """Columns that take turns."""
    return tl.split(pairs.reshape(pairs.shape[0], pairs.shape[1] // 2, 2))


@triton.jit
def _take_turns(left, right):
    return tl.join(left, right).reshape(left.shape[0], 2 * left.shape[1])


# --- Products over rows ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["row_tiles"])
def _first_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,
    places_ptr,
    tiles_ptr,
    z_ptr,
    hidden_ptr,
    row_tiles,
    columns,
    inner,
    x_stride,
    expert_stride,
    weight_row_stride,
    weight_stride,
    limit,
    up_offset,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS_ALIGN: tl.constexpr,
    INNER_FITS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """z, and the hidden layer; rows are gathered while they are loaded.

    `columns` are the hidden layer's. FORM is "halves", "turns" or "plain"; a tile of halves has as
    many gates as ups.
    """
    GATED: tl.constexpr = FORM != "plain"
    WIDE: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    row_tile, column_tile = tile_in_band(
        tl.program_id(0), row_tiles * ROWS, columns, BAND, ROWS, WIDE
    )
    expert = tl.load(tiles_ptr + row_tile).to(tl.int64)
    if expert < 0:
        return
    row, inside = _find_rows(tiles_ptr, row_tiles, row_tile, ROWS)
    place = tl.load(places_ptr + row)
    z_width = 2 * columns if GATED else columns
    number = tl.arange(0, COLUMNS)
    if FORM == "halves":
        at = column_tile * WIDE + number % WIDE
        z_inside = at < columns
        at += number // WIDE * columns
    else:
        at = column_tile * COLUMNS + number
        z_inside = at < z_width
    if COLUMNS_ALIGN:
        at = tl.max_contiguous(tl.multiple_of(at, 16), 16)
    total = _multiply(
        x_ptr,
        place // TOP,
        x_stride,
        weight_ptr + expert * expert_stride,
        at,
        z_inside,
        weight_row_stride,
        weight_stride,
        inner,
        PRECISION,
        INNER_FITS,
        ROWS,
        COLUMNS,
        INNER,
    )
    if weights_ptr is not None:
        total *= tl.load(weights_ptr + place).to(tl.float32)[:, None]
    up_bias_ptr = bias_ptr
    if bias_ptr is not None:
        bias_ptr += expert * z_width
        up_bias_ptr = bias_ptr + columns
    row = row.to(tl.int64)[:, None]
    # Stored in parts: data on its way from registers to memory takes registers too.
    left, right = halves(total)
    for part in tl.static_range(2):
        if FORM == "halves":
            gate, up = halves(left)[part], halves(right)[part]
            column = column_tile * WIDE + part * (WIDE // 2) + tl.arange(0, WIDE // 2)
            gate += load_parameter(bias_ptr, column, columns, 0)[None, :]
            up += load_parameter(up_bias_ptr, column, columns, 0)[None, :]
            known = inside[:, None] & (column < columns)[None, :]
            column = column[None, :]
            if z_ptr is not None:
                store(z_ptr, row, column, z_width, gate, known)
                store(z_ptr + columns, row, column, z_width, up, known)
            if hidden_ptr is not None:
                hidden = _find_hidden(gate, up, limit, up_offset, ACTIVATION)
                store(hidden_ptr, row, column, columns, hidden, known)
        else:
            z = right if part else left
            column = column_tile * COLUMNS + part * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            z += load_parameter(bias_ptr, column, z_width, 0)[None, :]
            known = inside[:, None] & (column < z_width)[None, :]
            if z_ptr is not None:
                store(z_ptr, row, column[None, :], z_width, z, known)
            if hidden_ptr is not None:
                if GATED:
                    gate, up = _separate(z)
                    hidden = _find_hidden(gate, up, limit, up_offset, ACTIVATION)
                    column = column_tile * WIDE + part * (WIDE // 2) + tl.arange(0, WIDE // 2)
                    known = inside[:, None] & (column < columns)[None, :]
                else:
                    hidden = activate(z, ACTIVATION)
                store(hidden_ptr, row, column[None, :], columns, hidden, known)


@triton.jit(do_not_specialize=["row_tiles", "rows"])
def _product(
    left_ptr,
    weight_ptr,
    bias_ptr,
    weights_ptr,
    x_ptr,
    places_ptr,
    tiles_ptr,
    result_ptr,
    partials_ptr,
    row_tiles,
    rows,
    columns,
    inner,
    x_stride,
    expert_stride,
    weight_row_stride,
    weight_stride,
    TOP: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER_FITS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Sorted rows times their experts' matrices.

    With `partials_ptr` also the sums of each row's products with x, tile by tile, for the gradient
    of weights that are factors of x.
    """
    row_tile, column_tile = tile_in_band(
        tl.program_id(0), row_tiles * ROWS, columns, BAND, ROWS, COLUMNS
    )
    expert = tl.load(tiles_ptr + row_tile).to(tl.int64)
    if expert < 0:
        return
    row, inside = _find_rows(tiles_ptr, row_tiles, row_tile, ROWS)
    at = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = _multiply(
        left_ptr,
        row,
        inner,
        weight_ptr + expert * expert_stride,
        at,
        at < columns,
        weight_row_stride,
        weight_stride,
        inner,
        PRECISION,
        INNER_FITS,
        ROWS,
        COLUMNS,
        INNER,
    )
    if bias_ptr is not None:
        bias_ptr += expert * columns
    if weights_ptr is not None:
        place = tl.load(places_ptr + row)
        token = (place // TOP).to(tl.int64)[:, None]
        weight = tl.load(weights_ptr + place).to(tl.float32)[:, None]
    products = tl.zeros([ROWS], tl.float32)
    wide = row.to(tl.int64)[:, None]
    left, right = halves(total)
    for part in tl.static_range(2):
        value = right if part else left
        column = column_tile * COLUMNS + part * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        known = inside[:, None] & (column < columns)[None, :]
        value += load_parameter(bias_ptr, column, columns, 0)[None, :]
        if weights_ptr is not None:
            if partials_ptr is not None:
                x = load(x_ptr, token, column[None, :], x_stride, known)
                products += tl.sum(x * value, 1)
            value *= weight
        if result_ptr is not None:
            store(result_ptr, wide, column[None, :], columns, value, known)
    if partials_ptr is not None:
        tl.store(partials_ptr + column_tile.to(tl.int64) * rows + row, products, mask=inside)


@triton.jit(do_not_specialize=["row_tiles", "rows"])
def _hidden_gradient(
    grad_ptr,
    weight_ptr,
    weights_ptr,
    z_ptr,
    places_ptr,
    tiles_ptr,
    grad_z_ptr,
    hidden_ptr,
    partials_ptr,
    row_tiles,
    rows,
    columns,
    inner,
    grad_stride,
    expert_stride,
    weight_row_stride,
    weight_stride,
    limit,
    up_offset,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    INNER_FITS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """u, the gradient of the hidden layer but for the weights, and what comes from it.

    Stored are the gradient of z, the hidden layer times the weights, and the sums of each row's
    u * hidden, tile by tile. weights_ptr is None where the weights are factors of the input.
    """
    row_tile, column_tile = tile_in_band(
        tl.program_id(0), row_tiles * ROWS, columns, BAND, ROWS, COLUMNS
    )
    expert = tl.load(tiles_ptr + row_tile).to(tl.int64)
    if expert < 0:
        return
    row, inside = _find_rows(tiles_ptr, row_tiles, row_tile, ROWS)
    place = tl.load(places_ptr + row)
    at = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = _multiply(
        grad_ptr,
        place // TOP,
        grad_stride,
        weight_ptr + expert * expert_stride,
        at,
        at < columns,
        weight_row_stride,
        weight_stride,
        inner,
        PRECISION,
        INNER_FITS,
        ROWS,
        COLUMNS,
        INNER,
    )
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + place).to(tl.float32)[:, None]
    products = tl.zeros([ROWS], tl.float32)
    wide = row.to(tl.int64)[:, None]
    left, right = halves(total)
    for part in tl.static_range(8):
        u = halves(halves(right if part // 4 else left)[part // 2 % 2])[part % 2]
        first = column_tile * COLUMNS + part * (COLUMNS // 8)
        column = (first + tl.arange(0, COLUMNS // 8))[None, :]
        known = inside[:, None] & (column < columns)
        if FORM == "halves":
            gate = load(z_ptr, wide, column, 2 * columns, known)
            up = load(z_ptr + columns, wide, column, 2 * columns, known)
        elif FORM == "turns":
            z_column = (2 * first + tl.arange(0, COLUMNS // 4))[None, :]
            z_known = inside[:, None] & (z_column < 2 * columns)
            gate, up = _separate(load(z_ptr, wide, z_column, 2 * columns, z_known))
        else:
            gate = load(z_ptr, wide, column, columns, known)
        if FORM == "plain":
            hidden = activate(gate, ACTIVATION)
            grad_gate = activation_gradient(gate, u * weight, ACTIVATION)
        else:
            grad_gate, grad_up, hidden = _find_gradients(
                gate, up, u * weight, limit, up_offset, ACTIVATION
            )
        if partials_ptr is not None:
            # Columns past the last have u = 0 and the hidden layer of z = 0.
            products += tl.sum(u * hidden, 1)
        if hidden_ptr is not None:
            store(hidden_ptr, wide, column, columns, hidden * weight, known)
        if grad_z_ptr is not None:
            if FORM == "halves":
                store(grad_z_ptr, wide, column, 2 * columns, grad_gate, known)
                store(grad_z_ptr + columns, wide, column, 2 * columns, grad_up, known)
            elif FORM == "turns":
                pairs = _take_turns(grad_gate, grad_up)
                store(grad_z_ptr, wide, z_column, 2 * columns, pairs, z_known)
            else:
                store(grad_z_ptr, wide, column, columns, grad_gate, known)
    if partials_ptr is not None:
        tl.store(partials_ptr + column_tile.to(tl.int64) * rows + row, products, mask=inside)


# --- Products over the rows of an expert ----------------------------------------------------------


@triton.jit
def _load_rows(ptr, row, inside, column, width, stride, weights_ptr, place):
    """Rows, times the weights of their places if given."""
    known = inside[:, None] & (column < width)[None, :]
    value = tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=known, other=0)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + place, mask=inside, other=0).to(tl.float32)
        value = (value.to(tl.float32) * weight[:, None]).to(ptr.dtype.element_ty)
    return value


@triton.jit
def _weight_gradient(
    left_ptr,
    right_ptr,
    weights_ptr,
    places_ptr,
    bounds_ptr,
    grad_ptr,
    left_width,
    right_width,
    left_stride,
    right_stride,
    TOP: tl.constexpr,
    GATHERS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """left^T right over each expert's rows, in their order.

    One of them has a row for each token, which is gathered, and multiplied by the weights if given.
    """
    tiles = tl.cdiv(left_width, ROWS) * tl.cdiv(right_width, COLUMNS)
    expert = tl.program_id(0) // tiles
    row_tile, column_tile = tile_in_band(
        tl.program_id(0) % tiles, left_width, right_width, BAND, ROWS, COLUMNS
    )
    first, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    left_column = row_tile * ROWS + tl.arange(0, ROWS)
    right_column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    inner = tl.arange(0, INNER)
    # Places are loaded a step ahead, so that loads of rows need not wait for them.
    place = tl.load(places_ptr + first + inner, mask=first + inner < end, other=0)
    for start in tl.range(first, end, INNER):
        row = start + inner
        inside = row < end
        left = _load_rows(
            left_ptr,
            place // TOP if GATHERS_LEFT else row,
            inside,
            left_column,
            left_width,
            left_stride,
            weights_ptr if GATHERS_LEFT else None,
            place,
        )
        right = _load_rows(
            right_ptr,
            row if GATHERS_LEFT else place // TOP,
            inside,
            right_column,
            right_width,
            right_stride,
            None if GATHERS_LEFT else weights_ptr,
            place,
        )
        total = tl.dot(left.T, right, total, input_precision=PRECISION)
        place = tl.load(places_ptr + row + INNER, mask=row + INNER < end, other=0)
    grad_ptr += expert.to(tl.int64) * left_width * right_width
    left, right = halves(total)
    for part in tl.static_range(2):
        column = column_tile * COLUMNS + part * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        known = (left_column < left_width)[:, None] & (column < right_width)[None, :]
        value = right if part else left
        at = left_column.to(tl.int64)[:, None]
        store(grad_ptr, at, column[None, :], right_width, value, known)
