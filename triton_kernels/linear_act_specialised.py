"""linear_act's GEMM for Hopper (sm_90) in Gluon, warp-specialised.

`linear_act.py` has the bytes, the products and the floor: with z it is 1.04x the GEMM at
(8192, 4096) x 16384 and 1.16x at (8192, 1024) x 4096, without z the GEMM itself.

Eight warps multiply (wgmma), and copy their factors in (TMA) some steps ahead. They drop a
finished tile into shared memory, as 16 bits, and go on with the next one. Meanwhile four other
warps add the bias, apply the activation and copy the tile out. So with a bias z is rounded twice.
The tensor cores need 1024 cycles
for 64 of `inner` in a tile of 128 x 256: 16k a tile at K = 1024, 66k at K = 4096. Its end takes
each of the four warps about 256 x 25 instructions. The tensor cores rest while a thread rounds and
drops its 128 sums, some 600 cycles: 4% of a tile at K = 1024, 1% at K = 4096.

On an H200 (bfloat16, multiples of the bare GEMM's time; eager is GEMM and pass):

    (M, K) x N            GEMM, ms   tanh: y   y and z   eager   erf: y   y and z   eager
    (8192, 4096) x 16384    1.404     0.99      1.02      1.12    1.01     1.04      1.14
    (8192, 1024) x 4096     0.102     1.02      1.16      1.40    1.33     1.28      1.47

Bands of 16 tiles save 0.5% of bands of 8, and bands of 4 lose 3% to 5%. At K = 1024 the end by erf
takes longer than the products of the next tile. Tiles of 128 x 128 with eight warps to finish them
lose 12%. `up` is the second factor of a gated MLP: two products in one tile of 128 x 128 took 0.98
of two GEMMs' time at (8192, 4096) x 14336, 1.03 with both products stored, where two GEMMs and a
pass took 1.07.

Barriers: `ready`, a slot's factors are there; `dropped`, a tile is in shared memory; `taken`, it
was read, so that the next one may be dropped. Slots need no barrier of their own: the warps that
refill a slot are those that waited for the product that read it.
"""

# ruff: noqa: N803, SIM113 - constexprs are in capitals in Triton, which has no enumerate.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton

from .act import KINDS, _gaussian, activate
from .approximate import reciprocal
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
from .tile import Tile, tile_in_band

# Columns that are finished at a time: 128 bytes, the width of a layout's swizzle.
_PART = gl.constexpr(64)


@gluon.jit
def _fetch(factors, slots, ready, slot, place, sizes, TRANSPOSED: gl.constexpr,
           BAND: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
           INNER: gl.constexpr):  # fmt: skip
    """Start to copy the factors of a step, if there is one; returns the place of the next step."""
    tile, k, row, column = place
    rows, columns, inner, tiles = sizes
    x, weight, up = factors
    x_slots, weight_slots = slots
    if tile < tiles:
        if k == 0:
            row_tile, column_tile = tile_in_band(tile, rows, columns, BAND, ROWS, COLUMNS)
            row, column = row_tile * ROWS, column_tile * COLUMNS
        arrived = ready.index(slot)
        mbarrier.expect(arrived, (ROWS + (COLUMNS if up is None else 2 * COLUMNS)) * INNER * 2)
        copy_in(x, [row, k], arrived, x_slots.index(slot))
        if up is not None:
            copy_in(weight, [column, k], arrived, weight_slots.index(2 * slot))
            copy_in(up, [column, k], arrived, weight_slots.index(2 * slot + 1))
        elif TRANSPOSED:
            copy_in(weight, [k, column], arrived, weight_slots.index(slot))
        else:
            copy_in(weight, [column, k], arrived, weight_slots.index(slot))
    k += INNER
    if k >= inner:
        k = 0
        tile += gl.num_programs(0)
    return tile, k, row, column


@gluon.jit
def _multiply(factors, slots, dropping, barriers, sizes, TRANSPOSED: gl.constexpr,
              BAND: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
              INNER: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    WIDTH: gl.constexpr = COLUMNS if factors[2] is None else 2 * COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDTH, 16]
    )
    ready, dropped, taken = barriers
    inner, tiles = sizes[2:]
    fetched = slots
    if factors[2] is not None:
        weight_layout: gl.constexpr = factors[1].layout
        halves = reinterpret(slots[1], dropping.dtype, [2 * STAGES, COLUMNS, INNER], weight_layout)
        fetched = slots[0], halves
    place = gl.program_id(0), 0, 0, 0
    for first in gl.static_range(STAGES - 1):
        place = _fetch(factors, fetched, ready, first, place, sizes, TRANSPOSED, BAND, ROWS,
                       COLUMNS, INNER)  # fmt: skip
    total = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    step, done = 0, 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(0, inner, INNER):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            weight = slots[1].index(slot)
            if not TRANSPOSED:
                weight = weight.permute((1, 0))
            total = warpgroup_mma(slots[0].index(slot), weight, total, use_acc=k > 0, is_async=True)
            # Now the product before this one has read its slot, which is the next to be filled.
            total = warpgroup_mma_wait(1, deps=(total,))
            slot = (step + STAGES - 1) % STAGES
            place = _fetch(factors, fetched, ready, slot, place, sizes, TRANSPOSED, BAND, ROWS,
                           COLUMNS, INNER)  # fmt: skip
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.wait(taken, (done & 1) ^ 1)
        dropping.store(total.to(dropping.dtype))
        fence_async_shared()
        mbarrier.arrive(dropped, count=1)
        done += 1


@gluon.jit
def _activate(z, ACTIVATION: gl.constexpr):
    """The activation of a result that is rounded to 16 bits: gelu is off by at most 2^-15 of it."""
    if ACTIVATION == "gelu":
        # act.py's `_normal_integral` with three terms less: wgmma slows these instructions down.
        t = reciprocal(1 + 0.44 * gl.abs(z))
        tail = 0.07780426 + t * (0.35532556 - t * 0.12811189)
        tail = _gaussian(z) * (-0.00178523 + t * (0.19675583 + t * tail))
        return z * gl.where(z < 0, tail, 1 - tail)
    else:
        return activate(z, ACTIVATION)


@gluon.jit
def _finish(y, z, z_up, dropping, finishing, bias_ptr, barriers, sizes, IS_GATED: gl.constexpr,
            ACTIVATION: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    part_layout: gl.constexpr = y.layout
    PARTS: gl.constexpr = COLUMNS // _PART
    dropped, taken = barriers
    rows, columns, tiles = sizes
    shape: gl.constexpr = [2 * PARTS if IS_GATED else PARTS, ROWS, _PART]
    parts = reinterpret(dropping, y.dtype, shape, part_layout)
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_in_band(tile, rows, columns, BAND, ROWS, COLUMNS)
        mbarrier.wait(dropped, done & 1)
        for part in range(PARTS):
            corner = [row_tile * ROWS, column_tile * COLUMNS + part * _PART]
            sums = parts.index(part).load(layout).to(gl.float32)
            if bias_ptr is not None:
                column = corner[1] + gl.arange(0, _PART, gl.SliceLayout(0, layout))
                bias = gl.load(bias_ptr + column, mask=column < columns, other=0)
                sums += bias.to(gl.float32)[None, :]
            result = _activate(sums, ACTIVATION)
            if IS_GATED:
                result *= parts.index(PARTS + part).load(layout).to(gl.float32)
            wait_for_stores(0)
            finishing.store(result.to(y.dtype))
            if z is not None and bias_ptr is not None:
                parts.index(part).store(sums.to(y.dtype))
            fence_async_shared()
            if z is not None:
                copy_out(z, corner, parts.index(part))
            if z_up is not None:
                copy_out(z_up, corner, parts.index(PARTS + part))
            copy_out(y, corner, finishing)
        if z is not None:
            wait_for_stores(1)
        mbarrier.arrive(taken, count=1)
        done += 1
    wait_for_stores(0)


@gluon.jit(do_not_specialize=["rows"])
def linear_act_specialised(x, weight, up, bias_ptr, y, z, z_up, rows, columns, inner,
                     ACTIVATION: gl.constexpr, TRANSPOSED: gl.constexpr, BAND: gl.constexpr,
                     ROWS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr,
                     STAGES: gl.constexpr, FINISHING: gl.constexpr,
                     REGISTERS: gl.constexpr):  # fmt: skip
    """activate(x weight^T + bias) in tiles of COLUMNS, times x up^T if `up` is given."""
    WIDTH: gl.constexpr = COLUMNS if up is None else 2 * COLUMNS
    FACTOR: gl.constexpr = [STAGES, INNER, WIDTH] if TRANSPOSED else [STAGES, WIDTH, INNER]
    x_slots = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, INNER], x.layout)
    weight_slots = gl.allocate_shared_memory(x.dtype, FACTOR, weight.layout)
    dropping = gl.allocate_shared_memory(x.dtype, [ROWS, WIDTH], y.layout)
    finishing = gl.allocate_shared_memory(x.dtype, [ROWS, _PART], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dropped = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    mbarrier.init(dropped, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    tiles = gl.cdiv(rows, ROWS) * gl.cdiv(columns, COLUMNS)
    gl.warp_specialize(
        [
            (_multiply, ((x, weight, up), (x_slots, weight_slots), dropping,
                         (ready, dropped, taken), (rows, columns, inner, tiles), TRANSPOSED, BAND,
                         ROWS, COLUMNS, INNER, STAGES)),
            (_finish, (y, z, z_up, dropping, finishing, bias_ptr, (dropped, taken),
                       (rows, columns, tiles), up is not None, ACTIVATION, BAND, ROWS, COLUMNS)),
        ],
        [FINISHING],
        [REGISTERS],
    )  # fmt: skip


def runs_on(device: torch.device) -> bool:
    """Whether a GPU has wgmma, as sm_90 only; code for it can be compiled anywhere."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] == 9
    return device.type == "meta"


def _descriptor(matrix: torch.Tensor, *block: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return TensorDescriptor.from_tensor(matrix, list(block), layout)


def specialised_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    kind: str,
    tile: Tile,
    up: torch.Tensor | None = None,
    z_up: torch.Tensor | None = None,
) -> Launch:
    """The launch for matrices that fit; y, z and z_up are matrices too.

    With `up`, whose product multiplies the activation, z and z_up are both products or None.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    transposed = weight.stride(1) != 1
    stored = tile.rows, _PART.value
    block = (tile.inner, tile.columns) if transposed else (tile.columns, tile.inner)
    return launch(
        linear_act_specialised,
        min(tiles, processors(x.device)),
        _descriptor(x, tile.rows, tile.inner),
        _descriptor(weight.t() if transposed else weight, *block),
        None if up is None else _descriptor(up, *block),
        bias,
        _descriptor(y, *stored),
        None if z is None else _descriptor(z, *stored),
        None if z_up is None else _descriptor(z_up, *stored),
        *(rows, columns, inner),
        ACTIVATION=kind,
        TRANSPOSED=transposed,
        BAND=16,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        STAGES=tile.stages,
        FINISHING=4,
        REGISTERS=112 if z is None or up is not None else 104,  # where ptxas spills least
        num_warps=tile.warps,
        maxnreg=168,  # of twelve warps
    )


def aot_cases(capability: int) -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    if capability != 90:
        return
    tile = Tile(128, 256, 64, 8, 3, specialised=True)
    matrices = {
        each: torch.empty(4096, 4096, dtype=each, device="meta")
        for each in (torch.bfloat16, torch.float16)
    }
    x, half = matrices.values()
    for kind, z in itertools.product(KINDS, (x, None)):
        if kind != "identity" and (z is not None or kind in ("gelu", "gelu_tanh")):
            case = f"{kind} {tile}, {'y' if z is None else 'y and z'}"
            yield case, specialised_launch(x, x, x[0], x, z, kind, tile)
    narrow = tile._replace(columns=128)
    for kind, z in itertools.product(("silu", "gelu", "gelu_tanh"), (x, None)):
        case = f"{kind} {narrow}, gated, {'y' if z is None else 'y and both products'}"
        yield case, specialised_launch(x, x, None, x, z, kind, narrow, x, z)
    wide = x[0].float()
    yield f"gelu {tile}, wide bias", specialised_launch(x, x, wide, x, x, "gelu", tile)
    yield f"gelu {tile}, no bias", specialised_launch(x, x, None, x, x, "gelu", tile)
    yield f"tanh {tile}, transposed", specialised_launch(x, x.t(), x[0], x, x, "tanh", tile)
    yield (
        f"gelu {tile}, float16",
        specialised_launch(half, half, half[0], half, half, "gelu", tile),
    )
