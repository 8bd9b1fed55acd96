"""LayerNorm and RMSNorm in Triton; RMSNorm is CENTERED=False of the same kernels.

csrc/core/norm.h has the formulas, norm_rows.py the functions that all norms share. A unit below
is rows x width elements, once over DRAM.

Forward, 2 units: x is read, y written; weight and bias come from L1 and L2.
    _forward holds whole rows in registers (width <= 16384). The mean, and then the squares of x
    minus the mean, are exact two-pass sums. A thread loads 64 bytes of x in four 16-byte loads. At
    bf16 x 4096 a row is 128 threads of at most 64 registers, so eight rows (64 KiB) are in flight
    on a multiprocessor. An H200 needs about 30 KiB for 4.8 TB/s at 800 ns. Narrower rows share a
    program of 4096 elements.

    _forward_wide gives a row 1024 threads, one row a multiprocessor, and reads it twice: first for
    the statistics, then for y. A 128 KiB row (bf16 x 65536) lies in L1 by then, a larger one in L2.
    Every lane keeps its own mean and sum of squares (Welford), and the lanes are combined at the
    end (Chan). This is as accurate as two passes. It saves their third read, and a block-wide
    reduction an iteration, which would hold back the loads of the next.

Backward, 3 units and the partials: grad_y and x are read, grad_x written.
    In _backward a program walks a chunk of rows, and all programs are resident at once (16 warps a
    multiprocessor at 128 registers are its whole register file). weight, and the sums for
    grad_weight and grad_bias, stay in registers: 16 columns a thread, hence width <= 8192. The next
    rows arrive in shared memory meanwhile (cp.async, STAGES), 32 KiB or more in flight. Each chunk
    writes its sums once, 8 bytes a column, see chunks.py. At bf16 32768 x 4096 that is 264 chunks,
    17 MB written and read for 805 MB; at 4096 x 1024 4 MB for 25 MB, which L2 holds.

    Wider rows do not fit: neither the row nor its parameter sums. _sum_columns then takes tiles of
    columns, and writes the tile's two sums of every row instead of grad_x. _grad_x_wide computes
    grad_x once all sums are known. This reads grad_y and x again: 5 units, so at most 60% of the
    copy bandwidth counted at 3. Doing better would need a row spread over a cluster.

Nothing is tuned at run time: launch overhead decides at 4096 x 1024.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

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
from .tensors import as_rows, check_like, contiguous, empty_like, gradient_of, or_empty, store


@triton.jit
def _load_x(source, row, start, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(
        source[0] + row * source[1] + column,
        mask=column < width,
        other=0,
        eviction_policy="evict_first" if AGAIN else "evict_last",
    ).to(tl.float32)


@triton.jit
def _store_grad_x(finish, grad_x, row, start, inside):
    column = start + tl.arange(0, grad_x.shape[1])
    store(finish[0], row[:, None], column[None, :], finish[1], grad_x, inside)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    x_stride,
    eps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    x = tl.load(
        x_ptr + row[:, None] * x_stride + column[None, :],
        mask=(row < rows)[:, None] & (column < width)[None, :],
        other=0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    tensors = (weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr)
    normalize(x, row, column, rows, width, *tensors, eps, CENTERED)


@triton.jit
def _forward_wide(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    width,
    x_stride,
    eps,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tensors = (weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr)
    normalize_wide((x_ptr, x_stride), row, width, *tensors, eps, _load_x, CENTERED, BLOCK)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _backward(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    rows,
    width,
    grad_y_stride,
    x_stride,
    chunks,
    grad_x_ptr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    tensors = (grad_y_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr)
    sums = (None, weight_partials_ptr, bias_partials_ptr)
    sizes = (rows, width, grad_y_stride, x_stride, chunks)
    finish = (grad_x_ptr, width)
    differentiate(*tensors, *sums, *sizes, finish, _store_grad_x, CENTERED, ROWS, BLOCK, STAGES)


@triton.jit
def _grad_x_wide(
    grad_y_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row_sums_ptr,
    width,
    grad_y_stride,
    x_stride,
    grad_x_ptr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED_BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    tensors = (grad_y_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, row_sums_ptr)
    sizes = (width, grad_y_stride, x_stride)
    finish = (grad_x_ptr, width)
    differentiate_wide(*tensors, *sizes, finish, _store_grad_x, CENTERED, BLOCK, SUMMED_BLOCK, SUMS)


# The widest rows that fit the registers without a spill.
_WIDEST_FORWARD_ROW = 16384
# Columns per iteration for wider rows.
_WIDE_FORWARD_BLOCK = 8192


def _forward_launch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> Launch:
    rows, width = x.shape
    centered = mean is not None
    if width > _WIDEST_FORWARD_ROW:
        return launch(
            _forward_wide,
            rows,
            *(x, weight, bias, y, mean, rstd, width, x.stride(0), eps),
            CENTERED=centered,
            BLOCK=_WIDE_FORWARD_BLOCK,
            num_warps=32,
        )
    tile = forward_tile(width, 64 // x.element_size())
    return launch(
        _forward,
        triton.cdiv(rows, tile["ROWS"]),
        *(x, weight, bias, y, mean, rstd, rows, width, x.stride(0), eps),
        CENTERED=centered,
        **tile,
    )


def _backward_launches(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> Iterator[Launch]:
    tensors = (grad_y, x, weight, mean, rstd, grad_weight, grad_bias)
    return backward_launches(_backward, _grad_x_wide, *tensors, (grad_x,))


def _norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    check_norm(x, normalized_shape, weight, bias, eps=eps)
    y = empty_like(x)
    mean, rstd = statistics(x, normalized_shape, centered)
    weight, bias = contiguous(weight), contiguous(bias)
    matrix = as_rows(x, rstd.numel(), math.prod(normalized_shape))
    run(x, _forward_launch(matrix, weight, bias, y, mean, rstd, eps))
    return y, mean, rstd


def _norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> torch.Tensor:
    check_norm(x, normalized_shape, weight)
    check_like(x, grad_y)
    check_statistics(x, normalized_shape, mean, rstd)
    grad_x = empty_like(x)
    rows, width = rstd.numel(), math.prod(normalized_shape)
    grad_y, x = as_rows(grad_y, rows, width), as_rows(x, rows, width)
    weight, mean, rstd = contiguous(weight), contiguous(mean), rstd.contiguous()
    run(x, *_backward_launches(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias))
    return grad_x


# --- Called by the registry, with the signatures of the ops' schemas ---


@replayed
def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, mean, rstd = _norm(x, normalized_shape, weight, bias, eps, centered=True)
    assert mean is not None
    return y, mean, rstd


@replayed
def layer_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_weight: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_weight, grad_bias = gradient_of(weight, need_weight), gradient_of(bias, need_bias)
    grad_x = _norm_backward(grad_y, x, normalized_shape, weight, mean, rstd, grad_weight, grad_bias)
    return grad_x, or_empty(grad_weight, x), or_empty(grad_bias, x)


@replayed
def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _norm(x, normalized_shape, weight, None, epsilon_of(eps), centered=False)
    return y, rstd


@replayed
def rms_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
    rstd: torch.Tensor,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_weight = gradient_of(weight, need_weight)
    grad_x = _norm_backward(grad_y, x, normalized_shape, weight, None, rstd, grad_weight, None)
    return grad_x, or_empty(grad_weight, x)


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    widths = (64, 1024, 4096, 8192, 65536, 131073)
    for centered, dtype, width in itertools.product((True, False), dtypes, widths):
        if dtype == torch.float16 and not centered:
            continue  # Skip it: LayerNorm covers its conversions, bfloat16 its shapes.
        x = torch.empty(32, width, dtype=dtype, device="meta")
        rstd = x.new_empty(32, dtype=torch.float32)
        weight, mean, bias = x[0], rstd if centered else None, x[0] if centered else None
        name = f"{'layer' if centered else 'rms'}_norm {str(dtype).removeprefix('torch.')} {width}"
        yield name, _forward_launch(x, weight, bias, x, mean, rstd, 1e-5)
        for step in _backward_launches(x, x, weight, mean, rstd, x, weight, bias):
            yield name, step
