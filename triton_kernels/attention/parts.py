"""Parts of the attention kernels: tiles of a head, scores, and which query sees which key."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from ..act import _tanh
from ..dropout import factors_of_groups
from .block_lists import bits, masks_of, tokens

LOG2_E = tl.constexpr(1.4426950408889634)
NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)

# A new length, batch or layout changes these.
UNSPECIALIZED = [
    *("planes", "heads", "first_head", "queries", "keys", "lines", "lines_batch_stride"),
    *("lines_head_stride", "threshold", "first_group", "first_number", "number_batch_stride"),
    *("number_head_stride", "slopes_batch_stride", "slopes_head_stride", "apart"),
    *("bias_batch_stride", "bias_head_stride", "bias_stride", "bias_row"),
]


@triton.jit
def finite(value):
    """The number to subtract before exponentials: the maximum, or 0 if no key is seen."""
    return tl.where(value == -float("inf"), 0, value)


@triton.jit
def head_rows(ptr, row, stride, inside, width, WIDTH: tl.constexpr, FITS: tl.constexpr):
    """[rows, WIDTH] of a head; zeros outside."""
    column = tl.arange(0, WIDTH)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    present = tl.broadcast_to(inside[:, None], [row.shape[0], WIDTH])
    if not FITS:
        present = present & (column < width)[None, :]
    return tl.load(at, mask=present, other=0)


@triton.jit
def own_rows(ptr, rows, stride, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, FITS: tl.constexpr):
    """Load `rows` adjacent rows from `ptr` on into [ROWS, WIDTH]; zeros outside.

    Places within a tile take half of the registers of 64-bit addresses.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    present = tl.broadcast_to((row < rows)[:, None], [ROWS, WIDTH])
    if not FITS:
        present = present & (column < width)[None, :]
    return tl.load(ptr + (row[:, None] * stride + column[None, :]), mask=present, other=0)


@triton.jit
def store_own_rows(ptr, value, rows, stride, width, WIDTH: tl.constexpr):
    """Store the first `rows` rows as adjacent rows from `ptr` on."""
    row, column = tl.arange(0, value.shape[0]), tl.arange(0, WIDTH)
    present = (row < rows)[:, None] & (column < width)[None, :]
    value = value.to(ptr.dtype.element_ty)
    tl.store(ptr + (row[:, None] * stride + column[None, :]), value, mask=present)


@triton.jit
def place(token, row):
    """A token's place on a plane; the difference of two places numbers their distance."""
    return token + token // row * (row - 1)


@triton.jit
def bias_of(bias, query, key, shift, seen):
    """The bias of pairs, in units of log 2.

    `stride` is None unless there is a number per pair, and `row` is None unless distances are taken
    on a plane.
    """
    bias_ptr, stride, row, queries = bias
    present = seen & (query < queries)
    if stride is not None:
        at = query.to(tl.int64) * stride + key
    elif row is None:
        at = key - query + (queries - 1)
    else:
        at = place(key, row) - place(query + shift, row) + place(queries + shift - 1, row)
    return tl.load(bias_ptr + at, mask=present, other=0).to(tl.float32) * LOG2_E


@triton.jit
def logits(product, query, key, shift, seen, scoring, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, -inf where a key is not seen, and the tanh of soft-capping.

    `shift` aligns the last query with the last key; `apart` is the distance between this shard's
    first query and first key in the whole tensor.
    """
    inner, outer, slopes_ptr, slope, apart, bias = scoring
    z = product * inner
    capped = z
    if SOFTCAP:
        # Infinity times the zeros that stand for a missing key is NaN.
        capped = tl.where(seen, _tanh(z), 0)
        z = capped * outer
    if slopes_ptr is not None:
        z -= slope * tl.abs(query + shift - key + apart)
    if bias[0] is not None:
        z += bias_of(bias, query, key, shift, seen)
    return tl.where(seen, z, -float("inf")), capped


@triton.jit
def weights_of(exponents):
    """Weights of the backward pass, from scores less their row's base; they are at most 1.

    A large score and its base are rounded, and in a product of another order to other numbers:
    their difference can be above 0, and its error would be a factor. NaN stays NaN.
    """
    return tl.exp2(tl.minimum(exponents, 0.0, propagate_nan=NAN_STAYS))


@triton.jit
def slope_of(slopes_ptr, batch, head, batch_stride, head_stride):
    """A head's slope, for scores in units of log 2; 0 without slopes."""
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + batch * batch_stride + head * head_stride).to(tl.float32)
    return slope * LOG2_E


@triton.jit
def shown_keys(padding_ptr, key, inside):
    """Keys that padding does not hide."""
    shown = tl.full(key.shape, 1, tl.int1)
    if padding_ptr is not None:
        shown = tl.load(padding_ptr + key, mask=inside, other=1) == 0
    return shown


@triton.jit
def next_keys(
    walk, start, partner, masks_ptr, padding_ptr, query, keys, shift, CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The next keys of a tile of queries, which of them exist, and which of them each query sees.

    The compiler drops conditions that are always true.
    """
    key, inside = tokens(walk, start, partner, 1, COLUMNS, BLOCK, CHECKED)
    inside = inside & (key < keys) if CHECKED else tl.full([COLUMNS], 1, tl.int1)
    shown = inside & shown_keys(padding_ptr, key, inside)
    seen = tl.broadcast_to(shown[None, :], [query.shape[0], COLUMNS])
    if CHECKED and CAUSAL:
        seen = seen & (query[:, None] + shift >= key[None, :])
    if CHECKED and masks_ptr is not None:
        LESS: tl.constexpr = BLOCK if BLOCK < COLUMNS else COLUMNS
        GROUP: tl.constexpr = 32 if LESS > 32 else LESS
        mask = masks_of(walk, start, GROUP, COLUMNS // GROUP, BLOCK)
        first_key, _ = tokens(walk, start, partner, GROUP, COLUMNS // GROUP, BLOCK, True)
        seen = seen & bits(masks_ptr, mask, query, first_key, BLOCK, COLUMNS)
    return key, inside, seen


@triton.jit
def kept_factors(
    walk, start, partner, dropout, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    CHECKED: tl.constexpr,
):  # fmt: skip
    """Factors of dropout for the next keys of a tile of queries."""
    seed_ptr, number, threshold, kept_scale, first_group = dropout
    group, _ = tokens(walk, start, partner, 8, COLUMNS // 8, BLOCK, CHECKED)
    return factors_of_groups(seed_ptr, number, first_group + group // 8, threshold, kept_scale)
