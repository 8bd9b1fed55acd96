"""Sums over rows for a parameter's gradient, in two stages, as in csrc/core/chunks.h.

Rows are divided into chunks. A program sums its chunk in registers and writes the sums once, and
the chunks are added in a fixed order: no atomics, the same bits every run.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from .launch import Launch, launch, processors


@triton.jit
def chunk_range(chunk, rows, chunks, ROWS: tl.constexpr):
    """The first tile of ROWS rows in a chunk, and the tile after its last."""
    tiles = tl.cdiv(rows, ROWS)
    first = tiles // chunks * chunk + tl.minimum(tiles % chunks, chunk)
    return first, first + tiles // chunks + (chunk < tiles % chunks).to(tl.int32)


@triton.jit
def store_partial(partials_ptr, chunk, column, width, inside, partial):
    """Write a chunk's sums if needed. `partial` has the sums of each row of a tile."""
    if partials_ptr is not None:
        at = partials_ptr + chunk.to(tl.int64) * width + column
        tl.store(at, tl.sum(partial, 0), mask=inside)


@triton.jit
def _add_up(
    grad_ptr, partials_ptr, chunks, column, width, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for start in tl.range(0, chunks, CHUNKS, loop_unroll_factor=4):
        chunk = (start + tl.arange(0, CHUNKS)).to(tl.int64)[:, None]
        total += tl.load(
            partials_ptr + chunk * width + column[None, :],
            mask=(chunk < chunks) & (column < width)[None, :],
            other=0,
        )
    grad = tl.sum(total, 0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + column, grad, mask=column < width)


@triton.jit(do_not_specialize=["chunks"])
def _add_chunks(
    grad_weight_ptr,
    grad_bias_ptr,
    weight_partials_ptr,
    bias_partials_ptr,
    chunks,
    width,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if grad_weight_ptr is not None:
        _add_up(grad_weight_ptr, weight_partials_ptr, chunks, column, width, CHUNKS, BLOCK)
    if grad_bias_ptr is not None:
        _add_up(grad_bias_ptr, bias_partials_ptr, chunks, column, width, CHUNKS, BLOCK)


def chunks_of(row_tiles: int, column_tiles: int, device: torch.device, programs: int = 16) -> int:
    """The number of chunks for so many programs of one tile of columns on a multiprocessor."""
    # By default several waves of programs, since a single wave would seldom fill the GPU.
    return max(1, min(programs * processors(device) // max(column_tiles, 1), row_tiles))


def partials_of(
    gradients: Sequence[torch.Tensor | None], chunks: int, width: int
) -> list[torch.Tensor | None]:
    """Allocate the chunks' sums for each gradient; None for one that is not needed."""
    return [
        None if grad is None else grad.new_empty((chunks, width), dtype=torch.float32)
        for grad in gradients
    ]


def add_chunks_launches(
    gradients: Sequence[torch.Tensor | None],
    partials: Sequence[torch.Tensor | None],
    chunks: int,
    width: int,
    *,
    wide: bool = False,
) -> Iterator[Launch]:
    """Add up the chunks' sums into the needed gradients of weight and bias."""
    if all(gradient is None for gradient in gradients):
        return
    # Wide rows leave few chunks, but enough columns to fill the GPU with wider blocks.
    block = 256 if wide else 32
    yield launch(
        _add_chunks,
        triton.cdiv(width, block),
        *(*gradients, *partials, chunks, width),
        CHUNKS=8 if wide else 32,
        BLOCK=block,
        num_warps=4,
        # Rows that Triton does not know to be aligned need more registers for addresses.
        maxnreg=128 if wide or width % 16 else 64,
    )
