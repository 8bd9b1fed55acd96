"""Products of matrices that are known to be symmetric, in batches: half of the operations.

A program computes a tile on or below the diagonal and also stores its transpose. A product of n x m
matrices takes n^2 m operations, not 2 n^2 m; tiles on the diagonal are computed in full, so that at
n = 2048 there are 136 of 256. On an H200, in ms against torch.bmm's (cuBLAS): 4 of 2048 x 2048
0.081 of 0.094, 4096 x 4096 0.118 of 0.176, 8192 x 8192 0.91 of 1.40; with an added matrix, which
bmm first copies, 0.087 of 0.119, 0.128 of 0.196 and 1.00 of 1.62. At 1024 rows it is slower.

On sm_90, symmetric_specialised.py serves matrices of 16-byte rows. Tiles are copied by descriptors
(TMA, sm_90 and later). A tile may begin in one matrix of the batch
and end in the next one; what it has of the next is not stored.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch, launch, replayed, run
from .linear_act_specialised import runs_on
from .symmetric_specialised import symmetric_launch
from .tile import fits

_TILE, _INNER = 128, 64


@triton.jit
def _place(number):
    """Row and column of a tile on or below the diagonal, counted row by row."""
    row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1) - 1) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@triton.jit
def _symmetric(
    x,
    y,
    added_ptr,
    result_ptr,
    size,
    inner,
    alpha,
    beta,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
):
    """alpha x y^T + beta added, of each matrix in the batch."""
    tiles = tl.cdiv(size, TILE)
    tiles = tiles * (tiles + 1) // 2
    matrix = tl.program_id(0) // tiles
    row_tile, column_tile = _place(tl.program_id(0) % tiles)
    first_row, first_column = row_tile * TILE, column_tile * TILE
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, inner, INNER):
        left = x.load([matrix * size + first_row, k])
        right = y.load([matrix * size + first_column, k])
        total = tl.dot(left, right.T, total)
    total *= alpha
    row, column = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    inside = (row < size)[:, None] & (column < size)[None, :]
    begin = matrix.to(tl.int64) * size * size
    if added_ptr is not None:
        at = added_ptr + begin + row[:, None] * size + column[None, :]
        total += beta * tl.load(at, mask=inside, other=0).to(tl.float32)
    result_ptr += begin
    value = total.to(result_ptr.dtype.element_ty)
    mirrored = value.T
    # Factors that commute but for rounding leave a diagonal tile that is not quite symmetric.
    value = tl.where(row[:, None] >= column[None, :], value, mirrored)
    tl.store(result_ptr + row[:, None] * size + column[None, :], value, mask=inside)
    if row_tile != column_tile:
        inside = (column < size)[:, None] & (row < size)[None, :]
        tl.store(result_ptr + column[:, None] * size + row[None, :], mirrored, mask=inside)


def _launch(
    x: torch.Tensor, y: torch.Tensor | None, result: torch.Tensor, alpha: float, beta: float
) -> Launch:
    count, size, inner = x.shape
    tiles = triton.cdiv(size, _TILE)
    factors = (x, x) if y is None else (x, y)
    return launch(
        _symmetric,
        count * tiles * (tiles + 1) // 2,
        *[TensorDescriptor.from_tensor(t.view(-1, inner), [_TILE, _INNER]) for t in factors],
        *(x if beta else None, result, size, inner, float(alpha), float(beta)),
        TILE=_TILE,
        INNER=_INNER,
        num_warps=8,
        num_stages=4,
    )._replace(least_capability=90)


# --- Called by dispatch, with the signature of the op's schema ---


@replayed
def symmetric_product(
    x: torch.Tensor, y: torch.Tensor | None, alpha: float, beta: float
) -> torch.Tensor:
    """alpha x y^T + beta x; without y, x is both factors."""
    count, size, inner = x.shape
    result = x.new_empty(count, size, size)
    every = [x] if y is None else [x, y]
    if any(t.shape != x.shape for t in every) or (beta and size != inner):
        raise ValueError("y does not fit x, or x is not square")
    if any(t.dtype != x.dtype or t.device != x.device or not t.is_contiguous() for t in every):
        raise ValueError("the matrices differ in dtype or device, or are not contiguous")
    if max(x.numel(), result.numel()) >= 2**31:
        raise ValueError("the batch has 2**31 elements or more")
    if not x.numel():
        return result.zero_()
    if not fits(*[t.view(-1, inner) for t in every]):
        raise ValueError("rows do not begin at multiples of 16 bytes")
    is_specialised = runs_on(x.device) and fits(result.view(-1, size))
    make = symmetric_launch if is_specialised else _launch
    run(x, make(x, y, result, alpha, beta))
    return result


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.empty(4, 2048, 2048, dtype=dtype, device="meta")
        name = f"symmetric {dtype}".replace("torch.", "")
        yield name, _launch(x, None, x, 1.0, 0.0)
        yield f"{name} added", _launch(x, None, x, 2.0, 0.5)
