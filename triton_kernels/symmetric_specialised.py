"""Symmetric products for Hopper (sm_90) in Gluon, warp-specialised; symmetric.py has why.

As in linear_act_specialised.py, eight warps copy factors in and multiply, a tile of 128 x 256 at a
time, and drop it into shared memory. Four others finish it in squares of 64 x 64: one below the
diagonal is copied out as it is and transposed, one on it is made symmetric, one above it is left.
So every number is written once, and both of a pair have the same bits.

The sums in registers also take what is added: the warps that multiply fetch its tile into the
memory where they will drop theirs, some steps before the end.

At n = 8192 a product takes 33 x 32 tiles of 128 steps, each 1024 cycles of the tensor cores. Its
end takes the four warps 8 squares of about 400 cycles, which the next tile's products hide.
"""

# ruff: noqa: N803, SIM113 - constexprs are in capitals in Triton, which has no enumerate.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton

from .gluon_names import (
    TensorDescriptor,
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import Launch, launch, processors

_ROWS, _COLUMNS, _INNER, _STAGES = 128, 256, 64, 3
_BAND = 16  # rows of tiles whose factors stay in L2
SQUARE = gl.constexpr(64)
AHEAD = gl.constexpr(2)  # steps from the end at which what is added is fetched


@gluon.jit
def place_of(number, BAND: gl.constexpr):
    """Row and column of a tile of 128 x 256 that has numbers on or below the diagonal.

    Bands of rows follow one another, and in a band its columns. Band b has 1 + b BAND / 2 columns
    of BAND tiles, and then columns of two tiles fewer each.
    """
    WHOLE: gl.constexpr = BAND + (BAND // 2 - 1) * (BAND // 2)
    band = 0
    while number >= BAND * BAND // 2 * band + WHOLE:
        number -= BAND * BAND // 2 * band + WHOLE
        band += 1
    column, height, above = number // BAND, BAND, number
    if number >= BAND * (BAND // 2 * band + 1):
        column = BAND // 2 * band + 1
        height = BAND - 2
        above = number - BAND * column
        while above >= height:
            above -= height
            height -= 2
            column += 1
    row = band * BAND + BAND - height + above % height
    return row, column


@gluon.jit
def _fetch(factors, slots, ready, slot, place, sizes, BAND: gl.constexpr, ROWS: gl.constexpr,
           COLUMNS: gl.constexpr, INNER: gl.constexpr):  # fmt: skip
    """Start to copy the factors of a step, if there is one; returns the place of the next step."""
    tile, k, row, column = place
    size, inner, tiles, each = sizes
    if tile < tiles:
        if k == 0:
            row_tile, column_tile = place_of(tile % each, BAND)
            row = tile // each * size + row_tile * ROWS
            column = tile // each * size + column_tile * COLUMNS
        arrived = ready.index(slot)
        mbarrier.expect(arrived, (ROWS + COLUMNS) * INNER * 2)
        copy_in(factors[0], [row, k], arrived, slots[0].index(slot))
        copy_in(factors[1], [column, k], arrived, slots[1].index(slot))
    k += INNER
    if k >= inner:
        k = 0
        tile += gl.num_programs(0)
    return tile, k, row, column


@gluon.jit
def _multiply(factors, added, slots, dropping, barriers, sizes, alpha, beta, BAND: gl.constexpr,
              ROWS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 16]
    )
    PARTS: gl.constexpr = COLUMNS // SQUARE
    ready, dropped, taken, is_added = barriers
    size, inner, tiles, each = sizes
    flat: gl.constexpr = dropping.layout
    parts = reinterpret(dropping, dropping.dtype, [PARTS, ROWS, SQUARE], flat)
    place = gl.program_id(0), 0, 0, 0
    for first in gl.static_range(STAGES - 1):
        place = _fetch(factors, slots, ready, first, place, sizes, BAND, ROWS, COLUMNS, INNER)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    step, done = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(0, inner, INNER):
            if added is not None and k == gl.maximum(inner - AHEAD * INNER, 0) // INNER * INNER:
                mbarrier.wait(taken, (done & 1) ^ 1)
                row_tile, column_tile = place_of(tile % each, BAND)
                mbarrier.expect(is_added, ROWS * COLUMNS * 2)
                for part in gl.static_range(PARTS):
                    row = tile // each * size + row_tile * ROWS
                    corner = [row, column_tile * COLUMNS + part * SQUARE]
                    copy_in(added, corner, is_added, parts.index(part))
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            right = slots[1].index(slot).permute((1, 0))
            total = warpgroup_mma(slots[0].index(slot), right, total, use_acc=k > 0, is_async=True)
            # Now the product before this one has read its slot, which is the next to be filled.
            total = warpgroup_mma_wait(1, deps=(total,))
            slot = (step + STAGES - 1) % STAGES
            place = _fetch(factors, slots, ready, slot, place, sizes, BAND, ROWS, COLUMNS, INNER)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        if added is not None:
            mbarrier.wait(is_added, done & 1)
            total = total * alpha + dropping.load(layout).to(gl.float32) * beta
        else:
            mbarrier.wait(taken, (done & 1) ^ 1)
            total *= alpha
        dropping.store(total.to(dropping.dtype))
        fence_async_shared()
        mbarrier.arrive(dropped, count=1)
        done += 1


@gluon.jit
def _finish(result, dropping, turned, barriers, sizes, BAND: gl.constexpr, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    dropped, taken = barriers
    tiles, each = sizes
    at = gl.arange(0, SQUARE, gl.SliceLayout(1, layout))[:, None]
    is_lower = at >= gl.arange(0, SQUARE, gl.SliceLayout(0, layout))[None, :]
    HALVES: gl.constexpr = ROWS // SQUARE
    shape: gl.constexpr = [COLUMNS // SQUARE * HALVES, SQUARE, SQUARE]
    flat: gl.constexpr = dropping.layout
    squares = reinterpret(dropping, dropping.dtype, shape, flat)
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = place_of(tile % each, BAND)
        mbarrier.wait(dropped, done & 1)
        for part in range(COLUMNS // SQUARE):
            column = column_tile * COLUMNS + part * SQUARE
            for half in gl.static_range(HALVES):
                row = row_tile * ROWS + half * SQUARE
                if column <= row:
                    own = squares.index(part * HALVES + half)
                    value = own.load(layout)
                    wait_for_stores(0)
                    turned.permute((1, 0)).store(value)
                    if column == row:
                        # Factors that commute but for rounding leave one not quite symmetric.
                        mirrored = turned.load(layout)
                        turned.store(gl.where(is_lower, value, mirrored))
                        fence_async_shared()
                    else:
                        fence_async_shared()
                        copy_out(
                            result, [tile // each, row, column], own.reshape([1, SQUARE, SQUARE])
                        )
                    corner = [tile // each, column, row]
                    copy_out(result, corner, turned.reshape([1, SQUARE, SQUARE]))
        wait_for_stores(0)
        mbarrier.arrive(taken, count=1)
        done += 1


@gluon.jit(do_not_specialize=["tiles", "each"])
def symmetric_specialised(x, y, added, result, size, inner, tiles, each, alpha, beta,
                          BAND: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
                          INNER: gl.constexpr, STAGES: gl.constexpr, FINISHING: gl.constexpr,
                          REGISTERS: gl.constexpr):  # fmt: skip
    """alpha x y^T + beta added, of each matrix in the batch."""
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], x.layout)
    y_slots = gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, INNER], y.layout)
    dropping = gl.allocate_shared_memory(x.dtype, [ROWS, COLUMNS], x.layout)
    turned = gl.allocate_shared_memory(x.dtype, [SQUARE, SQUARE], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dropped = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    is_added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    mbarrier.init(dropped, count=1)
    mbarrier.init(taken, count=1)
    mbarrier.init(is_added, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, ((x, y), added, (x_slots, y_slots), dropping,
                         (ready, dropped, taken, is_added), (size, inner, tiles, each), alpha, beta,
                         BAND, ROWS, COLUMNS, INNER, STAGES)),
            (_finish, (result, dropping, turned, (dropped, taken), (tiles, each), BAND, ROWS,
                       COLUMNS)),
        ],
        [FINISHING],
        [REGISTERS],
    )  # fmt: skip


def _descriptor(matrices: torch.Tensor, *rows: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrices.dtype == torch.bfloat16 else gl.float16
    block = [*rows, SQUARE.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(matrices, block, layout)


def count_tiles(size: int) -> tuple[int, int]:
    """The tiles of one matrix, and the height of a band: an even part of its rows of tiles."""
    rows = 2 * triton.cdiv(size, 2 * _ROWS)
    return rows // 2 * (rows // 2 + 1), math.gcd(_BAND, rows)


def symmetric_launch(
    x: torch.Tensor, y: torch.Tensor | None, result: torch.Tensor, alpha: float, beta: float
) -> Launch:
    """alpha x y^T + beta x; without y, x is both factors."""
    count, size, inner = x.shape
    each, band = count_tiles(size)
    rows, other = x.view(-1, inner), (x if y is None else y).view(-1, inner)
    left = _descriptor(rows, _ROWS)
    return launch(
        symmetric_specialised,
        min(count * each, processors(x.device)),
        *(left, _descriptor(other, _COLUMNS), left if beta else None),
        *(_descriptor(result, 1, SQUARE.value), size, inner, count * each, each),
        *(float(alpha), float(beta)),
        BAND=band,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        STAGES=_STAGES,
        FINISHING=4,
        REGISTERS=88,
        num_warps=8,
        maxnreg=168,  # of twelve warps
    )._replace(least_capability=90)


def aot_cases(capability: int) -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    if capability != 90:
        return
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.empty(4, 4096, 4096, dtype=dtype, device="meta")
        name = f"symmetric {dtype}, warp-specialised".replace("torch.", "")
        yield name, symmetric_launch(x, None, x, 1.0, 0.0)
        yield f"{name}, added", symmetric_launch(x, x, x, 2.0, 0.5)
