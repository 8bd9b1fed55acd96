"""bias_dropout_add in Triton; csrc/core/bias_dropout_add.h has the formulas.

It is written in Triton, not CUDA: Triton suits element-wise passes, and `tl.philox` is the
stream's.

A unit below is rows x width elements, once over DRAM.

Forward, 3 units: x and residual are read, y is written. A program has one tile of 2048 elements,
    two 16-byte loads a thread of each tensor at bf16. 64 registers a thread allow 8 programs on a
    multiprocessor, which keep 64 KiB in flight. An H200 needs about 30 KiB for 4.8 TB/s at 800 ns.
    The bias comes from L1 and L2. The floor at bf16 32768 x 4096 is 0.81 GB, 0.19 ms at the 4.3
    TB/s of a copy. Eager with dropout moves 7 units and a mask twice, so that 2.3 times its speed
    is the most there is to gain.
Backward, 2 units: grad_y is read, grad_x written; only the read remains if grad_x is grad_y. A
    program walks a chunk of rows in one tile of columns and keeps their sums for grad_bias in
    registers, which it writes once. The chunks are added in a fixed order: no atomics, the same
    bits every run. At bf16 32768 x 4096 on 132 processors that is 264 chunks: 4.3 MB of partial
    sums for 537 MB. The next rows arrive in shared memory meanwhile.

Philox costs about 10 instructions an element: 134 million elements are 1.3e9, 42 million warp
instructions, which 132 multiprocessors issue in 0.05 ms at 4 a cycle and 1.6 GHz. That is a quarter
of the forward's memory time, and 8 or more warps a scheduler hide it behind the memory. The aim is
88% of copy bandwidth forward, 80% backward.

Tiles begin at every eighth column of the whole tensor, where a counter's numbers begin. If a part
begins in between, its first tile moves to the left by up to seven columns.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .chunks import add_chunks_launches, chunk_range, chunks_of, partials_of, store_partial
from .dropout import Sizes, check_dropout, dropout_arguments, dropped
from .launch import Launch, launch, replayed, run
from .rows import NUMBERING
from .tensors import (
    check_beside,
    contiguous,
    empty_like,
    gradient_of,
    load,
    or_empty,
    rows_of,
    store,
)


@triton.jit(
    do_not_specialize=["rows", "threshold", "first_number"],
    do_not_specialize_on_alignment=NUMBERING,
)
def _forward(
    x_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    rows,
    width,
    x_stride,
    residual_stride,
    skew,
    first_column,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column_tiles = tl.cdiv(width + skew, BLOCK)
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % column_tiles * BLOCK - skew
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & ((column >= 0) & (column < width))[None, :]
    at = (row[:, None], column[None, :])
    added = load(x_ptr, *at, x_stride, inside)
    if bias_ptr is not None:
        there = (column >= 0) & (column < width)
        added += tl.load(bias_ptr + column, mask=there, other=0).to(tl.float32)[None, :]
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    added = dropped(added, row, first_column + start, dropout)
    y = load(residual_ptr, *at, residual_stride, inside) + added
    store(y_ptr, *at, width, y, inside)


@triton.jit(
    do_not_specialize=["rows", "chunks", "threshold", "first_number"],
    do_not_specialize_on_alignment=NUMBERING,
)
def _backward(
    grad_y_ptr,
    grad_x_ptr,
    partials_ptr,
    rows,
    width,
    grad_y_stride,
    chunks,
    skew,
    first_column,
    seed_ptr,
    threshold,
    kept_scale,
    first_number,
    size1,
    size2,
    stride0,
    stride1,
    stride2,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(width + skew, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    start = tl.program_id(0) % column_tiles * BLOCK - skew
    column = start + tl.arange(0, BLOCK)
    there = (column >= 0) & (column < width)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    numbers = (first_number, size1, size2, stride0, stride1, stride2)
    dropout = (seed_ptr, threshold, kept_scale, numbers)
    for row_tile in tl.range(first, last, num_stages=STAGES):
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & there[None, :]
        at = (row[:, None], column[None, :])
        grad = load(grad_y_ptr, *at, grad_y_stride, inside)
        grad = dropped(grad, row, first_column + start, dropout)
        if grad_x_ptr is not None:
            store(grad_x_ptr, *at, width, grad, inside)
        partial += grad
    store_partial(partials_ptr, chunk, column, width, there, partial)


@functools.cache
def _tile(width: int) -> dict[str, int]:
    """A tile of 2048 elements: enough columns for wide accesses, and rows if columns are few."""
    block = max(8, min(512, triton.next_power_of_2(max(width, 1))))
    tile = {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}
    # Without a limit ptxas spills a few bytes if rows are not aligned.
    return tile if width % 16 == 0 else tile | {"maxnreg": 128}


def _dropout(
    p: float,
    seed: torch.Tensor | int | None,
    shape: Sequence[int],
    whole: Sizes,
    offset: Sizes,
) -> tuple[Any, ...]:
    """The arguments of both kernels from `skew` on."""
    column = offset[-1] if seed is not None and offset else 0
    return (column % 8, column, *dropout_arguments(p, seed, shape, whole, offset))


def _forward_launch(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    y: torch.Tensor,
    dropout: tuple[Any, ...],
) -> Launch:
    rows, width = x.shape
    tile = _tile(width)
    return launch(
        _forward,
        triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width + dropout[0], tile["BLOCK"]),
        *(x, bias, residual, y, rows, width, x.stride(0), residual.stride(0), *dropout),
        **tile,
    )._replace(spreads=True)


def _backward_launches(
    grad_y: torch.Tensor,
    grad_x: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
    dropout: tuple[Any, ...],
) -> Iterator[Launch]:
    rows, width = grad_y.shape
    tile = _tile(width)
    row_tiles = triton.cdiv(rows, tile["ROWS"])
    column_tiles = triton.cdiv(width + dropout[0], tile["BLOCK"])
    chunks = row_tiles if grad_bias is None else chunks_of(row_tiles, column_tiles, grad_y.device)
    gradients = (None, grad_bias)
    partials = partials_of(gradients, chunks, width)
    if grad_x is not None or grad_bias is not None:
        yield launch(
            _backward,
            chunks * column_tiles,
            *(grad_y, grad_x, partials[1], rows, width, grad_y.stride(0), chunks, *dropout),
            STAGES=3,
            # Six programs a processor, where none spills.
            **tile | {"maxnreg": 80 if width % 16 == 0 else 128},
        )._replace(spreads=True)
    yield from add_chunks_launches(gradients, partials, chunks, width)


# --- Called by the registry, with the signatures of the op's schemas ---


@replayed
def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> torch.Tensor:
    check_beside(x, x.shape, residual)
    check_beside(x, x.shape[-1:], bias)
    given = check_dropout(x, p, seed, whole, offset)
    y = empty_like(residual)
    dropout = _dropout(p, given, x.shape, whole, offset)
    run(x, _forward_launch(rows_of(x), contiguous(bias), rows_of(residual), y, dropout))
    return y


@replayed
def bias_dropout_add_backward(
    grad_y: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
    x_dtype: torch.dtype,
    need_x: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_beside(grad_y, grad_y.shape, grad_y, dtype=x_dtype)
    check_beside(grad_y, grad_y.shape[-1:], bias, dtype=x_dtype)
    given = check_dropout(grad_y, p, seed, whole, offset)
    grad_x = torch.empty(grad_y.shape, dtype=x_dtype, device=grad_y.device) if need_x else None
    grad_bias = gradient_of(bias, need_bias)
    dropout = _dropout(p, given, grad_y.shape, whole, offset)
    run(grad_y, *_backward_launches(rows_of(grad_y), grad_x, grad_bias, dropout))
    return or_empty(grad_x, grad_y), or_empty(grad_bias, grad_y)


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, width, p in itertools.product(dtypes, (64, 4096, 131073), (0.0, 0.1)):
        if dtype == torch.float32 and width != 4096:
            continue  # Skip it: bfloat16 covers its shapes.
        x = torch.empty(4096, width, dtype=dtype, device="meta")
        stream = x.float()
        seed = x.new_empty(1, dtype=torch.int64) if p else None
        dropout = _dropout(p, seed, x.shape, [], [])
        name = f"bias_dropout_add {str(dtype).removeprefix('torch.')} {width} {p}"
        yield name, _forward_launch(x, x[0], stream, stream, dropout)
        for step in _backward_launches(stream, x, x[0], dropout):
            yield name, step
