"""Softmax with scale, mask and dropout in Triton.

csrc/core/softmax.h has the formulas. A unit below is rows x width elements, once over DRAM.

Forward, 2 units, and the mask if it has as many elements: the scores are read, y written. Rows of
up to 16384 columns stay in registers, 32 columns a thread. Wider rows are processed twice, 4096
columns at a time. First every lane keeps its own maximum and sum, without a reduction that would
hold back the next loads. Then y is written, with the scores from L1 or L2.

Backward, 3 units: grad_y and y (or the scores, with dropout) are read, and grad_scores written.
Rows of up to 8192 columns stay in registers, 16 columns of both tensors a thread.

Under the causal mask keys are loaded in groups of eight: loads of 16 bits, one for each key that a
row sees, took an eighth of a row's time in instructions. Narrow rows share a program of 2048
columns. Blocks are powers of two: at 1025 columns half of the lanes have nothing to do. Nothing is
tuned at run time.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .approximate import exp
from .dropout import Sizes, check_dropout, dropout_arguments, factors
from .launch import Launch, launch, replayed, run
from .rows import NUMBERING, place, row_map
from .tensors import contiguous, empty_like


@triton.jit
def _visible_keys(row, rows, queries, first_keys, width, CAUSAL: tl.constexpr):
    """The number of leading keys that each row sees; max(first_keys, 0) for the first query."""
    keys = row * 0 + width
    if CAUSAL:
        keys = tl.minimum(tl.maximum(row % queries + first_keys, 0), width)
    return tl.where(row < rows, keys, 0)


@triton.jit
def _loaded(column, keys, width):
    """Columns in groups of eight, so that loads stay wide where the causal mask ends a row."""
    return (column[None, :] < (keys[:, None] + 7) // 8 * 8) & (column[None, :] < width)


@triton.jit
def _finite(highest):
    """The base of exponentials: 0 if nothing is visible, since exp(-inf - 0) is 0."""
    return tl.where(highest == -float("inf"), 0, highest)


@triton.jit
def _inverse(total, MASKED: tl.constexpr):
    """1 / total. Fully masked rows become zeros; other rows of only -inf give 0 * inf."""
    nothing = total == 0
    return tl.where(nothing, 0.0 if MASKED else float("inf"), 1 / tl.where(nothing, 1, total))


@triton.jit
def _masked_scores(scores_ptr, mask_ptr, row, keys, column, width, mask_row, mask_stride, scale):
    """Scores, scaled and masked; -inf for invisible keys."""
    seen = column[None, :] < keys[:, None]
    at = row[:, None] * width + column[None, :]
    loaded = _loaded(column, keys, width)
    z = tl.load(scores_ptr + at, mask=loaded, other=0).to(tl.float32) * scale
    if mask_ptr is not None:
        mask_at = mask_row[:, None] + column[None, :] * mask_stride
        mask = tl.load(mask_ptr + mask_at, mask=loaded, other=0)
        if mask_ptr.dtype.element_ty == tl.uint8:
            seen = seen & (mask != 0)
        else:
            z += mask.to(tl.float32)
    return tl.where(seen, z, -float("inf"))


@triton.jit
def _store(ptr, values, row, column, rows, width):
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "first_keys", "threshold", "first_number"],
    do_not_specialize_on_alignment=["queries", "mask_size1", "mask_size2", *NUMBERING],
)
def _forward(
    y_ptr,
    statistics_ptr,
    scores_ptr,
    rows,
    width,
    scale,
    queries,
    first_keys,
    mask_ptr,
    mask_stride,
    mask_size1,
    mask_size2,
    mask_stride0,
    mask_stride1,
    mask_stride2,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    keys = _visible_keys(row, rows, queries, first_keys, width, CAUSAL)
    mask_row = place(row, 0, mask_size1, mask_size2, mask_stride0, mask_stride1, mask_stride2)
    number = place(row, first_number, size1, size2, stride0, stride1, stride2)
    scores = (scores_ptr, mask_ptr, row, keys)
    scale = tl.cast(scale, tl.float32)
    mask = (width, mask_row, mask_stride, scale)

    if WIDE:
        # Each lane keeps its own maximum and sum: no reduction across threads before the end.
        lane_highest = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
        lane_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, tl.max(keys), BLOCK):
            column = start + lane
            z = _masked_scores(*scores, column, *mask)
            new_highest = tl.maximum(lane_highest, z)
            base = _finite(new_highest)
            lane_sum = lane_sum * exp(lane_highest - base) + exp(z - base)
            lane_highest = new_highest
        highest = _finite(tl.max(lane_highest, 1))
        total = tl.sum(lane_sum * exp(lane_highest - highest[:, None]), 1)
    else:
        z = _masked_scores(*scores, lane, *mask)
        highest = _finite(tl.max(z, 1))
        e = exp(z - highest[:, None])
        total = tl.sum(e, 1)
    inverse = _inverse(total, CAUSAL or mask_ptr is not None)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + 2 * row, highest, mask=row < rows)
        tl.store(statistics_ptr + 2 * row + 1, inverse, mask=row < rows)

    if WIDE:
        for start in tl.range(0, width, BLOCK):
            column = start + lane
            z = _masked_scores(*scores, column, *mask)
            y = exp(z - highest[:, None]) * inverse[:, None]
            if seed_ptr is not None:
                y *= factors(seed_ptr, number, start, threshold, kept_scale, ROWS, BLOCK)
            _store(y_ptr, y, row, column, rows, width)
    else:
        y = e * inverse[:, None]
        if seed_ptr is not None:
            y *= factors(seed_ptr, number, 0, threshold, kept_scale, ROWS, BLOCK)
        _store(y_ptr, y, row, lane, rows, width)


@triton.jit
def _softmax_and_gradient(
    grad_y_ptr, y_ptr, row, keys, start, statistics, scores, mask, dropout, BLOCK: tl.constexpr
):
    """s and g of the formulas for BLOCK columns; s is 0 for invisible keys."""
    column = start + tl.arange(0, BLOCK)
    seen = column[None, :] < keys[:, None]
    at = row[:, None] * mask[0] + column[None, :]
    loaded = _loaded(column, keys, mask[0])
    # What a row does not see may be NaN in grad_y. In y it is 0.
    g = tl.where(seen, tl.load(grad_y_ptr + at, mask=loaded, other=0).to(tl.float32), 0)
    if y_ptr is not None:
        s = tl.load(y_ptr + at, mask=loaded, other=0).to(tl.float32)
    else:
        z = _masked_scores(*scores, column, *mask)
        s = tl.where(seen, exp(z - statistics[0][:, None]) * statistics[1][:, None], 0)
        g *= factors(dropout[0], dropout[1], start, dropout[2], dropout[3], row.shape[0], BLOCK)
    return s, g


@triton.jit(
    do_not_specialize=["rows", "first_keys", "threshold", "first_number"],
    do_not_specialize_on_alignment=["queries", "mask_size1", "mask_size2", *NUMBERING],
)
def _backward(
    grad_scores_ptr,
    grad_y_ptr,
    y_ptr,
    statistics_ptr,
    scores_ptr,
    rows,
    width,
    scale,
    queries,
    first_keys,
    mask_ptr,
    mask_stride,
    mask_size1,
    mask_size2,
    mask_stride0,
    mask_stride1,
    mask_stride2,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keys = _visible_keys(row, rows, queries, first_keys, width, CAUSAL)
    mask_row = place(row, 0, mask_size1, mask_size2, mask_stride0, mask_stride1, mask_stride2)
    number = place(row, first_number, size1, size2, stride0, stride1, stride2)
    highest, inverse = row, row  # unused, since y is given
    if y_ptr is None:
        highest = tl.load(statistics_ptr + 2 * row, mask=row < rows, other=0)
        inverse = tl.load(statistics_ptr + 2 * row + 1, mask=row < rows, other=0)
    statistics = (highest, inverse)
    scores = (scores_ptr, mask_ptr, row, keys)
    scale = tl.cast(scale, tl.float32)
    mask = (width, mask_row, mask_stride, scale)
    dropout = (seed_ptr, number, threshold, kept_scale)

    if WIDE:
        # Each lane keeps its own sum: no reduction across threads before the end.
        lane_dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, tl.max(keys), BLOCK):
            s, g = _softmax_and_gradient(
                grad_y_ptr, y_ptr, row, keys, start, statistics, scores, mask, dropout, BLOCK
            )
            lane_dot += s * g
        dot = tl.sum(lane_dot, 1)[:, None]
        for start in tl.range(0, width, BLOCK):
            s, g = _softmax_and_gradient(
                grad_y_ptr, y_ptr, row, keys, start, statistics, scores, mask, dropout, BLOCK
            )
            grad = s * (g - dot) * scale
            _store(grad_scores_ptr, grad, row, start + tl.arange(0, BLOCK), rows, width)
    else:
        s, g = _softmax_and_gradient(
            grad_y_ptr, y_ptr, row, keys, 0, statistics, scores, mask, dropout, BLOCK
        )
        dot = tl.sum(s * g, 1)[:, None]
        _store(grad_scores_ptr, s * (g - dot) * scale, row, tl.arange(0, BLOCK), rows, width)


# --- Launches ---------------------------------------------------------------------------------

_WIDEST_FORWARD_ROW = 16384
_WIDEST_BACKWARD_ROW = 8192
_WIDE_BLOCK = 4096
_SHARED_BLOCK = 2048  # columns of a program that several narrow rows share


@functools.cache
def _tile(width: int, widest: int, columns: int) -> dict[str, Any]:
    """Options of a launch with this many columns per thread, or half as many for wide rows."""
    wide = width > widest
    columns = columns // 2 if wide else columns
    block = _WIDE_BLOCK if wide else max(8, triton.next_power_of_2(width))
    rows = max(1, _SHARED_BLOCK // block)
    warps = min(16, max(1, rows * block // (32 * columns)))
    options = {"WIDE": wide, "ROWS": rows, "BLOCK": block, "num_warps": warps}
    # Under Triton 3.6 rows that are not aligned need a few more registers than sixteen warps get.
    return options if width % 16 == 0 else options | {"maxnreg": 128}


def _mask(mask: torch.Tensor | None, shape: torch.Size) -> tuple[Any, ...]:
    """The mask as bytes or floats, and the strides that locate its columns and rows."""
    if mask is None:
        return (None, 0, 1, 1, 0, 0, 0)
    mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(shape)
    rows = row_map(shape[:-1], mask.stride()[:-1])
    if rows is None or mask.stride(-1) > 1:
        mask = mask.contiguous()
        rows = row_map(shape[:-1], mask.stride()[:-1])
        assert rows is not None
    return (mask, mask.stride(-1), *rows)


def _common(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> tuple[Any, ...]:
    """The arguments that both kernels take, from `rows` and `width` to `stride2`."""
    given = check_dropout(scores, p, seed, whole, offset)
    shape = scores.shape
    width, queries = shape[-1], shape[-2] if causal and len(shape) > 1 else 1
    first, every = (offset[-2], whole[-2]) if whole and offset and len(shape) > 1 else (0, queries)
    return (
        *(math.prod(shape[:-1]), width, scale, queries, first + width - every + 1),
        *_mask(mask, shape),
        *dropout_arguments(p, given, shape, whole, offset),
    )


def _forward_launch(
    scores: torch.Tensor,
    y: torch.Tensor,
    statistics: torch.Tensor | None,
    causal: bool,
    common: tuple[Any, ...],
) -> Launch:
    tile = _tile(common[1], _WIDEST_FORWARD_ROW, 32)
    grid = triton.cdiv(common[0], tile["ROWS"])
    tensors = (y, statistics, scores)
    return launch(_forward, grid, *tensors, *common, CAUSAL=causal, **tile)._replace(spreads=True)


def _backward_launch(
    grad_y: torch.Tensor,
    y: torch.Tensor | None,
    scores: torch.Tensor | None,
    statistics: torch.Tensor | None,
    grad_scores: torch.Tensor,
    causal: bool,
    common: tuple[Any, ...],
) -> Launch:
    tile = _tile(common[1], _WIDEST_BACKWARD_ROW, 16)
    grid = triton.cdiv(common[0], tile["ROWS"])
    tensors = (grad_scores, grad_y, y, statistics, scores)
    return launch(_backward, grid, *tensors, *common, CAUSAL=causal, **tile)


# --- Called by the registry, with the signatures of the op's schemas ---


@replayed
def softmax_dropout(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> tuple[torch.Tensor, torch.Tensor]:
    common = _common(scores, mask, scale, causal, p, seed, whole, offset)
    y = empty_like(scores)
    sizes = [0] if seed is None else [*scores.shape[:-1], 2]
    statistics = scores.new_empty(sizes, dtype=torch.float32)
    if scores.numel():
        saved = None if seed is None else statistics
        run(scores, _forward_launch(scores.contiguous(), y, saved, causal, common))
    return y, statistics


@replayed
def softmax_dropout_backward(
    grad_y: torch.Tensor,
    y: torch.Tensor | None,
    scores: torch.Tensor | None,
    statistics: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> torch.Tensor:
    common = _common(grad_y, mask, scale, causal, p, seed, whole, offset)
    grad_scores = empty_like(grad_y)
    if grad_y.numel():
        saved = (contiguous(y), contiguous(scores), contiguous(statistics))
        run(grad_y, _backward_launch(grad_y.contiguous(), *saved, grad_scores, causal, common))
    return grad_scores


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for dtype, width, kind, p in (
        (bf16, 64, None, 0.1),
        (bf16, 1000, None, 0.0),
        (bf16, 1000, torch.bool, 0.1),
        (bf16, 8192, None, 0.0),
        (bf16, 8192, None, 0.1),
        (bf16, 8192, fp32, 0.1),
        (bf16, 131073, None, 0.0),
        (bf16, 131073, torch.bool, 0.1),
        (fp16, 16384, fp16, 0.1),
        (fp32, 1000, None, 0.1),
        (fp32, 8192, fp32, 0.1),
        (fp32, 16384, None, 0.0),
        (fp32, 131073, fp32, 0.1),
    ):
        scores = torch.empty(4, 32, width, dtype=dtype, device="meta")
        statistics = scores.new_empty(4, 32, 2, dtype=torch.float32)
        mask = None if kind is None else scores.new_empty(4, 1, width, dtype=kind)
        seed = scores.new_empty(1, dtype=torch.int64) if p else None
        common = _common(scores, mask, 0.125, True, p, seed, [], [])
        name = f"softmax {dtype} {width} {kind} {p}".replace("torch.", "")
        yield name, _forward_launch(scores, scores, statistics if p else None, True, common)
        y, x, saved = (None, scores, statistics) if p else (scores, None, None)
        yield name, _backward_launch(scores, y, x, saved, scores, True, common)
