"""Parts of the attention kernels: tiles of a head, scores, and who sees whom."""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from .act import _tanh
from .block_lists import bits, masks_of, tokens
from .dropout import factors_of_groups

LOG2_E = tl.constexpr(1.4426950408889634)

# Of these a new length, batch or layout has new ones.
UNSPECIALIZED = [
    *("planes", "heads", "first_head", "queries", "keys", "lines", "lines_batch_stride"),
    *("lines_head_stride", "threshold", "first_number", "number_batch_stride"),
    *("number_head_stride", "slopes_batch_stride", "slopes_head_stride"),
]


@triton.jit
def finite(value):
    """The base of exponentials: 0 where nothing is seen."""
    return tl.where(value == -float("inf"), 0, value)


@triton.jit
def head_rows(ptr, row, stride, inside, width, WIDTH: tl.constexpr, FITS: tl.constexpr):
    """[rows, WIDTH] of a head; zeros outside. `inside` None: all rows are there."""
    column = tl.arange(0, WIDTH)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    if inside is None:
        if FITS:
            return tl.load(at)
        else:
            return tl.load(at, mask=(column < width)[None, :], other=0)
    elif FITS:
        return tl.load(at, mask=inside[:, None], other=0)
    else:
        return tl.load(at, mask=inside[:, None] & (column < width)[None, :], other=0)


@triton.jit
def store_head_rows(ptr, value, row, inside, width, WIDTH: tl.constexpr):
    """Rows of a head of a contiguous result."""
    column = tl.arange(0, WIDTH)
    at = ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    value = value.to(ptr.dtype.element_ty)
    tl.store(at, value, mask=inside[:, None] & (column < width)[None, :])


@triton.jit
def logits(product, distance, seen, inner, outer, slope, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, -inf where a key is not seen; and, capped, the tanh."""
    z = product * inner
    capped = z
    if SOFTCAP:
        capped = _tanh(z)
        z = capped * outer
    if slope is not None:
        z -= slope * tl.abs(distance)
    if seen is not None:
        z = tl.where(seen, z, -float("inf"))
    return z, capped


@triton.jit
def slope_of(slopes_ptr, batch, head, batch_stride, head_stride):
    """A head's slope, for scores in units of log 2."""
    if slopes_ptr is None:
        return None
    else:
        at = slopes_ptr + batch * batch_stride + head * head_stride
        return tl.load(at).to(tl.float32) * LOG2_E


@triton.jit
def both(a, b):
    """What is seen by two conditions, either of which may be None."""
    if a is None:
        return b
    elif b is None:
        return a
    else:
        return a & b


@triton.jit
def shown_keys(padding_ptr, key, inside):
    """Keys that padding does not hide."""
    if padding_ptr is None:
        return None
    else:
        return tl.load(padding_ptr + key, mask=inside, other=1) == 0


@triton.jit
def next_keys(
    walk, start, masks_ptr, padding_ptr, query, keys, shift, CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """The next keys of a tile of queries, which of them are there, and which each query sees."""
    key, listed = tokens(walk, start, 1, COLUMNS, BLOCK, CHECKED)
    if CHECKED:
        inside = listed & (key < keys)
        seen = tl.broadcast_to(inside[None, :], [query.shape[0], COLUMNS])
        if CAUSAL:
            seen = seen & (query[:, None] + shift >= key[None, :])
        if masks_ptr is not None:
            GROUP: tl.constexpr = 32 if BLOCK > 32 else BLOCK
            mask = masks_of(walk, start, GROUP, COLUMNS // GROUP, BLOCK)
            group, _ = tokens(walk, start, GROUP, COLUMNS // GROUP, BLOCK, True)
            seen = seen & bits(masks_ptr, mask, query, group, BLOCK, COLUMNS)
    else:
        inside = None
        seen = None
    shown = shown_keys(padding_ptr, key, inside)
    if shown is not None:
        seen = both(seen, shown[None, :])
    return key, inside, seen


@triton.jit
def kept_factors(walk, start, dropout, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """Factors of dropout for the next keys of a tile of queries."""
    seed_ptr, number, threshold, kept_scale = dropout
    group, _ = tokens(walk, start, 4, COLUMNS // 4, BLOCK, CHECKED)
    return factors_of_groups(seed_ptr, number, group // 4, threshold, kept_scale)


