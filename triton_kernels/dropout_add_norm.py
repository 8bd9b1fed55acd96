"""dropout_add_layer_norm and dropout_add_rms_norm in Triton.

csrc/core/dropout_add_norm.h has the formulas, norm_rows.py the functions shared with the plain
norms, and norm.py the argument for the shapes. A unit below is rows x width elements, once over
DRAM, in the dtype of x or, for the stream, of residual.

Forward, 4 units, 8 bytes an element at bf16: x and residual are read, z and y written.
    _forward holds whole rows (width <= 16384): 32 bytes of x a thread and as much of the residual,
    at bf16 16 columns in at most 64 registers. Four programs of 8 warps, 64 KiB of loads, are then
    in flight on a multiprocessor; an H200 needs about 30 KiB for 4.8 TB/s at 800 ns. y uses z
    before it is rounded; statistics for the backward pass are taken from the rounded z. The
    floor at bf16 32768 x 4096 is 1.07 GB, 0.25 ms at the 4.3 TB/s of a copy.

    _forward_wide goes over a row twice and draws twice, 2 units more. L2 serves them: 256 KiB a
    multiprocessor at bf16 x 65536, 34 MB of 50 in all.

Backward, 5 units, 10 bytes an element at bf16, and the partials: grad_y, z and grad_z are read,
grad_residual and grad_x written. It is 4 units if nothing is dropped and those two are the same,
and 1 less if z itself was not used.
    _backward holds whole rows of up to 4096 columns: grad_z and Philox leave registers for 8
    columns a thread. Wider rows take 2 units more, since the sums of column tiles come first: at
    most 71% of the bandwidth counted at 5, and 67% at 4.

Philox takes about 14 instructions an element, the rest of a pass about 20. An H200 can start 50 in
the time of 8 bytes, and 65 in that of 10: memory decides, with a third of its time to spare. The
aim is 90% of copy bandwidth forward and, for rows held whole, 85% backward.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .dropout import Sizes, check_dropout, dropout_arguments, dropped
from .launch import Launch, launch, replayed, run
from .norm_rows import (
    backward_launches,
    check_norm,
    check_statistics,
    differentiate,
    differentiate_wide,
    epsilon_of,
    forward_tile,
    normalize,
    normalize_wide,
    statistics,
)
from .rows import NUMBERING
from .tensors import (
    are_aligned,
    as_rows,
    check_beside,
    check_like,
    contiguous,
    empty_like,
    gradient_of,
    load,
    or_empty,
    store,
)


@triton.jit
def _add(x_ptr, residual_ptr, x_stride, residual_stride, row, start, inside, dropout):
    """z of [ROWS, BLOCK] elements, 0 outside the tensor."""
    column = start + tl.arange(0, inside.shape[1])
    x = load(x_ptr, row[:, None], column[None, :], x_stride, inside)
    if residual_ptr is None:
        return dropped(x, row, start, dropout)
    else:
        residual = load(residual_ptr, row[:, None], column[None, :], residual_stride, inside)
        return residual + dropped(x, row, start, dropout)


@triton.jit
def _add_again(source, row, start, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    """z of BLOCK elements of one row, stored if this is the second pass (AGAIN)."""
    x_ptr, residual_ptr, x_stride, residual_stride, z_ptr, dropout = source
    column = start + tl.arange(0, BLOCK)
    rows = row + tl.arange(0, 1)
    inside = (column < width)[None, :]
    z = _add(x_ptr, residual_ptr, x_stride, residual_stride, rows, start, inside, dropout)
    z = tl.reshape(z, [BLOCK])
    if AGAIN:
        store(z_ptr, row, column, width, z, column < width)
    return z


@triton.jit
def _store_gradients(finish, grad, row, start, inside):
    """Store the needed gradients of the residual and of x, from the gradient of z."""
    grad_z_ptr, grad_residual_ptr, grad_x_ptr, width, grad_z_stride, dropout = finish
    column = start + tl.arange(0, grad.shape[1])
    at = (row[:, None], column[None, :])
    if grad_z_ptr is not None:
        grad += load(grad_z_ptr, *at, grad_z_stride, inside)
    if grad_residual_ptr is not None:
        store(grad_residual_ptr, *at, width, grad, inside)
    if grad_x_ptr is not None:
        store(grad_x_ptr, *at, width, dropped(grad, row, start, dropout), inside)


@triton.jit(
    do_not_specialize=["rows", "threshold", "first_number"],
    do_not_specialize_on_alignment=NUMBERING,
)
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    z_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    eps,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    z = _add(x_ptr, residual_ptr, x_stride, residual_stride, row, 0, inside, dropout)
    store(z_ptr, row[:, None], column[None, :], width, z, inside)
    tensors = (weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr)
    SAVED: tl.constexpr = z_ptr.dtype.element_ty
    normalize(z, row, column, rows, width, *tensors, eps, CENTERED, SAVED)


@triton.jit(
    do_not_specialize=["threshold", "first_number"], do_not_specialize_on_alignment=NUMBERING
)
def _forward_wide(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    z_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    x_stride,
    residual_stride,
    eps,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    source = (x_ptr, residual_ptr, x_stride, residual_stride, z_ptr, dropout)
    tensors = (weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr)
    SAVED: tl.constexpr = z_ptr.dtype.element_ty
    normalize_wide(source, row, width, *tensors, eps, _add_again, CENTERED, BLOCK, SAVED)


@triton.jit(
    do_not_specialize=["rows", "chunks", "threshold", "first_number"],
    do_not_specialize_on_alignment=NUMBERING,
)
def _backward(
    grad_y_ptr,
    z_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    rows,
    width,
    grad_y_stride,
    z_stride,
    chunks,
    grad_z_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    grad_z_stride,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    tensors = (grad_y_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr)
    sums = (None, weight_partials_ptr, bias_partials_ptr)
    sizes = (rows, width, grad_y_stride, z_stride, chunks)
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    finish = (grad_z_ptr, grad_residual_ptr, grad_x_ptr, width, grad_z_stride, dropout)
    differentiate(*tensors, *sums, *sizes, finish, _store_gradients, CENTERED, ROWS, BLOCK, STAGES)


@triton.jit(
    do_not_specialize=["threshold", "first_number"], do_not_specialize_on_alignment=NUMBERING
)
def _gradients_wide(
    grad_y_ptr,
    z_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row_sums_ptr,
    width,
    grad_y_stride,
    z_stride,
    grad_z_ptr,
    grad_residual_ptr,
    grad_x_ptr,
    grad_z_stride,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED_BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    tensors = (grad_y_ptr, z_ptr, weight_ptr, mean_ptr, rstd_ptr, row_sums_ptr)
    sizes = (width, grad_y_stride, z_stride)
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    finish = (grad_z_ptr, grad_residual_ptr, grad_x_ptr, width, grad_z_stride, dropout)
    differentiate_wide(
        *tensors, *sizes, finish, _store_gradients, CENTERED, BLOCK, SUMMED_BLOCK, SUMS
    )


# The widest rows that fit the registers without a spill, aligned ones and others, which are loaded
# one element at a time: the addresses take registers too.
_WIDEST_FORWARD_ROW, _WIDEST_UNALIGNED_ROW = 16384, 8192
# Columns per iteration for wider rows: with 4096, dropout and loads of one element spilled.
_WIDE_FORWARD_BLOCK = 2048


def _forward_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    z: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    dropout: tuple[Any, ...],
) -> Launch:
    rows, width = x.shape
    tensors = (x, residual, weight, bias, z, y, mean, rstd)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    centered = mean is not None
    aligned = width % 16 == 0 and are_aligned(x, residual, weight, bias)
    if width > (_WIDEST_FORWARD_ROW if aligned else _WIDEST_UNALIGNED_ROW):
        return launch(
            _forward_wide,
            rows,
            *(*tensors, width, *strides, eps, *dropout),
            CENTERED=centered,
            BLOCK=_WIDE_FORWARD_BLOCK,
            num_warps=16,
        )._replace(spreads=True)
    tile = forward_tile(width, 32 // x.element_size())
    return launch(
        _forward,
        triton.cdiv(rows, tile["ROWS"]),
        *(*tensors, rows, width, *strides, eps, *dropout),
        CENTERED=centered,
        # Without a limit ptxas spills a few bytes although registers are free.
        maxnreg=64 if width <= _WIDEST_FORWARD_ROW // 2 else 128,
        **tile,
    )._replace(spreads=width <= _WIDEST_UNALIGNED_ROW, aligned=width > _WIDEST_UNALIGNED_ROW)


def _backward_launches(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_x: torch.Tensor | None,
    grad_residual: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    dropout: tuple[Any, ...],
) -> Iterator[Launch]:
    tensors = (grad_y, z, weight, mean, rstd, grad_weight, grad_bias)
    grad_z_stride = 0 if grad_z is None else grad_z.stride(0)
    finish = (grad_z, grad_residual, grad_x, grad_z_stride, *dropout)
    # Half as many columns a thread as the plain norms: grad_z and Philox take the other registers.
    read, columns = 2 if grad_z is None else 3, 8
    return backward_launches(_backward, _gradients_wide, *tensors, finish, columns, read)


def _dropout(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> tuple[Any, ...]:
    """The kernels' arguments from `seed_ptr` on; a norm needs whole rows."""
    given = check_dropout(x, p, seed, whole, offset)
    leading, width = x.dim() - len(normalized_shape), math.prod(normalized_shape)
    if whole and tuple(whole[leading:]) != tuple(normalized_shape):
        raise ValueError("shard: x lacks columns, and a norm needs whole rows")

    def flattened(sizes: Sizes, columns: int) -> list[int]:
        return [*sizes[:leading], columns] if sizes else []

    sizes = (flattened(x.shape, width), flattened(whole, width), flattened(offset, 0))
    return dropout_arguments(p, given, *sizes)


def _dropout_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    wide_y: bool,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    check_norm(x, normalized_shape, weight, bias, eps=eps)
    check_beside(x, x.shape, residual)
    dropout = _dropout(x, normalized_shape, p, seed, whole, offset)
    z = empty_like(x if residual is None else residual)
    y = torch.empty(x.shape, dtype=torch.float32 if wide_y else x.dtype, device=x.device)
    mean, rstd = statistics(x, normalized_shape, centered)
    matrix = (rstd.numel(), math.prod(normalized_shape))
    added = None if residual is None else as_rows(residual, *matrix)
    inputs = (as_rows(x, *matrix), added, contiguous(weight), contiguous(bias))
    run(x, _forward_launch(*inputs, z, y, mean, rstd, eps, dropout))
    return z, y, mean, rstd


def _dropout_add_norm_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    x_dtype: torch.dtype,
    need_x: bool,
    need_residual: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_norm(z, normalized_shape, weight, bias, dtype=x_dtype)
    check_beside(z, z.shape, z, grad_y, dtype=x_dtype)
    if grad_z is not None:
        check_like(z, grad_z)
    check_statistics(z, normalized_shape, mean, rstd)
    dropout = _dropout(z, normalized_shape, p, seed, whole, offset)
    grad_x = torch.empty(z.shape, dtype=x_dtype, device=z.device) if need_x else None
    grad_residual = empty_like(z) if need_residual else None
    grad_weight, grad_bias = gradient_of(weight, need_weight), gradient_of(bias, need_bias)
    matrix = (rstd.numel(), math.prod(normalized_shape))
    if grad_y is None:  # rare: only z was used, not y. Zero times infinity would be NaN.
        z, rstd, weight = torch.zeros_like(z), torch.zeros_like(rstd), None
        mean = None if mean is None else rstd
        grad_y = z.to(x_dtype)
    grads = (None if grad_z is None else as_rows(grad_z, *matrix), as_rows(grad_y, *matrix))
    saved = (as_rows(z, *matrix), contiguous(weight), contiguous(mean), rstd.contiguous())
    gradients = (grad_x, grad_residual, grad_weight, grad_bias)
    run(z, *_backward_launches(*(*grads, *saved, *gradients), dropout))
    return (
        or_empty(grad_x, z),
        or_empty(grad_residual, z),
        or_empty(grad_weight, z),
        or_empty(grad_bias, z),
    )


# --- Called by the registry, with the signatures of the ops' schemas ---


@replayed
def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    wide_y: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = (x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y)
    z, y, mean, rstd = _dropout_add_norm(*inputs, centered=True)
    assert mean is not None
    return z, y, mean, rstd


@replayed
def dropout_add_layer_norm_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_dtype: torch.dtype,
    need_x: bool,
    need_residual: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    saved = (grad_z, grad_y, z, normalized_shape, weight, bias, p, seed, whole, offset, mean, rstd)
    needs = (need_x, need_residual, need_weight, need_bias)
    return _dropout_add_norm_backward(*saved, x_dtype, *needs)


@replayed
def dropout_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    p: float,
    eps: float | None,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    wide_y: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = (x, residual, normalized_shape, weight, None, p, epsilon_of(eps), seed, whole, offset)
    z, y, _, rstd = _dropout_add_norm(*inputs, wide_y, centered=False)
    return z, y, rstd


@replayed
def dropout_add_rms_norm_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    p: float,
    eps: float | None,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    rstd: torch.Tensor,
    x_dtype: torch.dtype,
    need_x: bool,
    need_residual: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    saved = (grad_z, grad_y, z, normalized_shape, weight, None, p, seed, whole, offset, None, rstd)
    needs = (need_x, need_residual, need_weight)
    return _dropout_add_norm_backward(*saved, x_dtype, *needs, need_bias=False)[:3]


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for (centered, dtype, stream, p), width in itertools.product(
        (
            (True, bf16, bf16, 0.0),
            (True, bf16, bf16, 0.1),
            (True, bf16, fp32, 0.1),
            (True, fp32, fp32, 0.1),
            (False, bf16, bf16, 0.1),
        ),
        (64, 4096, 8192, 16384, 65536, 131073),
    ):
        x = torch.empty(32, width, dtype=dtype, device="meta")
        z, rstd = x.to(stream), x.new_empty(32, dtype=torch.float32)
        weight, mean, bias = x[0], rstd if centered else None, x[0] if centered else None
        seed = x.new_empty(1, dtype=torch.int64) if p else None
        dropout = _dropout(x, [width], p, seed, [], [])
        names = f"{dtype} {stream}".replace("torch.", "")
        name = f"dropout_add_{'layer' if centered else 'rms'}_norm {names} {width} {p}"
        y = z  # as under autocast, a wider stream makes y wider too
        yield name, _forward_launch(x, z, weight, bias, z, y, mean, rstd, 1e-5, dropout)
        tensors = (z, y, z, weight, mean, rstd, x, z, weight, bias)
        for step in _backward_launches(*tensors, dropout):
            yield name, step
