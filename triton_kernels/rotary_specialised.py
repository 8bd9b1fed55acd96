"""Rotary embeddings with a norm by warps with roles, on sm_90: heads of 128 in 16 bits.

One warp of a program copies tiles of 32 rows by TMA, up to four of them ahead; four warps normalise
and rotate them, and store results by TMA. Addresses and masks are the copies' work. Three programs
share a multiprocessor, of 136 registers a thread and 41 KB each; backward of 58 KB, three tiles
ahead. There a program keeps its rows' sums for the gradients of the weights in registers, first
those of x, then those of k; chunks.py adds them.

A tile has as many heads of a token as divide both 32 and its heads, and so that many tokens; both
halves of a row lie apart, so that a pair is in one thread. Outside of a tensor are zeros, which no
copy writes back.

No GPU has measured it. `torchweld tune` times it against the kernels of `rotary.py`, which serve
until then.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    wait_for_stores,
)
from .launch import Launch, launch, processors
from .linear_act_specialised import runs_on
from .rotary_rows import ROUND_PAIR
from .tiled import Tile

ROWS, WIDTH, HALF = 32, 128, gl.constexpr(64)
_PROGRAMS = 3  # of a multiprocessor
_PARTS = gl.constexpr(2)  # of a tile, backward: 32 rows at once would be spilled
TILE = Tile(ROWS, WIDTH, 4, 4, specialised=True, persistent=True)
BACKWARD_TILE = TILE._replace(stages=3)


@gluon.jit
def _find_corner(tile, heads, tokens, TOKENS: gl.constexpr, HEADS: gl.constexpr):
    """Batch, token and head where a tile begins."""
    head_tiles, token_tiles = heads // HEADS, gl.cdiv(tokens, TOKENS)
    rest = tile // head_tiles
    return rest // token_tiles, rest % token_tiles * TOKENS, tile % head_tiles * HEADS


@gluon.jit
def _copy_rows(x, slots, slot, arrived, corner, TOKENS: gl.constexpr, HEADS: gl.constexpr):
    batch, token, head = corner
    for half in gl.static_range(2):
        target = slots.index(2 * slot + half).reshape([1, TOKENS, HEADS, HALF])
        copy_in(x, [batch, token, head, half * HALF], arrived, target)


@gluon.jit
def _fetch_tile(sources, slots, slot, arrived, tile, tokens, ROWS: gl.constexpr,
                HEADS: gl.constexpr, SOURCES: gl.constexpr):  # fmt: skip
    corner = _find_corner(tile, sources[0], tokens, ROWS // HEADS, HEADS)
    for at in gl.static_range(SOURCES):
        place = slot * SOURCES + at
        _copy_rows(sources[1 + at], slots, place, arrived, corner, ROWS // HEADS, HEADS)


@gluon.jit
def _fetch(streams, slots, barriers, sizes, ROWS: gl.constexpr, HEADS: gl.constexpr,
           K_HEADS: gl.constexpr, STAGES: gl.constexpr, SOURCES: gl.constexpr):  # fmt: skip
    """`streams` have the heads of x and of k, then what is copied of each."""
    ready, free = barriers
    tokens, tiles, all_tiles = sizes
    x, k = streams
    step = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        slot = step % STAGES
        mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)
        arrived = ready.index(slot)
        mbarrier.expect(arrived, ROWS * 2 * HALF * 2 * SOURCES)
        if tile < tiles:
            _fetch_tile(x, slots, slot, arrived, tile, tokens, ROWS, HEADS, SOURCES)
        elif k[1] is not None:
            own = tile - tiles
            _fetch_tile(k, slots, slot, arrived, own, tokens, ROWS, K_HEADS, SOURCES)
        step += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _load_angle(ptr, start, stride, bad, inside, layout: gl.constexpr, FULL: gl.constexpr):
    """The angles of a row or of rows, for the first and for the second of each pair."""
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    first = gl.load(ptr + start + column * stride, mask=inside, other=0).to(gl.float32)
    second = first
    if FULL:
        second = gl.load(ptr + start + (column + HALF) * stride, mask=inside, other=0)
        second = second.to(gl.float32)
    if bad is not None:
        first = gl.where(bad, float("nan"), first)
        second = gl.where(bad, float("nan"), second)
    return first, second


@gluon.jit
def _load_angles(angles, batch, token, inside, layout: gl.constexpr, FULL: gl.constexpr):
    cos_ptr, sin_ptr, positions_ptr, table_rows = angles[0], angles[1], angles[2], angles[3]
    if positions_ptr is None:
        bad = None
        cos_start = batch * angles[4] + token * angles[5]
        sin_start = batch * angles[7] + token * angles[8]
    else:
        at = batch * angles[10] + token * angles[11]
        position = gl.load(positions_ptr + at, mask=inside, other=0)
        bad = (position < 0) | (position >= table_rows)
        inside = inside & (position >= 0) & (position < table_rows)
        position = gl.where(bad, 0, position)
        cos_start, sin_start = position * angles[5], position * angles[8]
    cos = _load_angle(cos_ptr, cos_start, angles[6], bad, inside, layout, FULL)
    sin = _load_angle(sin_ptr, sin_start, angles[9], bad, inside, layout, FULL)
    return cos, sin


@gluon.jit
def round_in_pairs(value):
    kinds: gl.constexpr = "=r,=r,f,f"
    bits = gl.inline_asm_elementwise(ROUND_PAIR, kinds, [value], gl.int32, is_pure=True, pack=2)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _round(value, dtype: gl.constexpr, IS_ROUNDED: gl.constexpr):
    if not IS_ROUNDED:
        return value
    elif dtype == gl.bfloat16:
        return round_in_pairs(value)
    else:
        return value.to(dtype).to(gl.float32)


@gluon.jit
def _load_weight(ptr, half, PLUS_ONE: gl.constexpr, layout: gl.constexpr):
    if ptr is None:
        return 1.0
    else:
        column = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        weight = gl.load(ptr + column).to(gl.float32)[None, :]
        return weight + 1 if PLUS_ONE else weight


@gluon.jit
def _rotate_tile(stream, slots, results, barriers, step, tile, tokens, angles, eps,
                 PLUS_ONE: gl.constexpr, ROUNDED: gl.constexpr, FULL: gl.constexpr,
                 ROWS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    TOKENS: gl.constexpr = ROWS // HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    y, weight_ptr, rstd_ptr = stream[1], stream[2], stream[3]
    ready, free = barriers
    batch, token, head = _find_corner(tile, stream[4], tokens, TOKENS, HEADS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token_of_row = token + row // HEADS
    inside = token_of_row < tokens
    # Before the tile's wait, which hides them.
    if TOKENS == 1:
        cos, sin = _load_angles(angles, batch, token, token < tokens, layout, FULL)
    else:
        places = token_of_row[:, None], inside[:, None]
        cos, sin = _load_angles(angles, batch, *places, layout, FULL)
    slot = step % STAGES
    mbarrier.wait(ready.index(slot), step // STAGES & 1)
    first = slots.index(2 * slot).load(layout).to(gl.float32)
    second = slots.index(2 * slot + 1).load(layout).to(gl.float32)
    mbarrier.arrive(free.index(slot), count=1)
    squares = gl.sum(first * first, 1) + gl.sum(second * second, 1)
    rstd = 1 / gl.sqrt_rn(squares * (0.5 / HALF) + eps)
    at = batch * stream[5] + token_of_row * stream[6] + (head + row % HEADS) * stream[7]
    gl.store(rstd_ptr + at, rstd, mask=inside)
    first = _round(first * rstd[:, None], y.dtype, ROUNDED > 1)
    second = _round(second * rstd[:, None], y.dtype, ROUNDED > 1)
    first *= _load_weight(weight_ptr, 0, PLUS_ONE, layout)
    second *= _load_weight(weight_ptr, 1, PLUS_ONE, layout)
    first = _round(first, y.dtype, ROUNDED > 0)
    second = _round(second, y.dtype, ROUNDED > 0)
    wait_for_stores(0)
    results.index(0).store((first * cos[0] - second * sin[0]).to(y.dtype))
    results.index(1).store((second * cos[1] + first * sin[1]).to(y.dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        source = results.index(half).reshape([1, TOKENS, HEADS, HALF])
        copy_out(y, [batch, token, head, half * HALF], source)


@gluon.jit
def _rotate(streams, slots, results, barriers, sizes, angles, eps, PLUS_ONE: gl.constexpr,
            ROUNDED: gl.constexpr, FULL: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
            K_HEADS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    tokens, tiles, all_tiles = sizes
    x, k = streams
    step = 0
    for tile in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        if tile < tiles:
            _rotate_tile(x, slots, results, barriers, step, tile, tokens, angles, eps, PLUS_ONE,
                         ROUNDED, FULL, ROWS, HEADS, STAGES)  # fmt: skip
        elif k[0] is not None:
            _rotate_tile(k, slots, results, barriers, step, tile - tiles, tokens, angles, eps,
                         PLUS_ONE, ROUNDED, FULL, ROWS, K_HEADS, STAGES)  # fmt: skip
        step += 1  # noqa: SIM113 - Gluon has no enumerate
    wait_for_stores(0)


@gluon.jit
def _allocate(dtype: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
              SOURCES: gl.constexpr):  # fmt: skip
    """Slots of tiles, results, and barriers."""
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    slots = gl.allocate_shared_memory(dtype, [2 * SOURCES * STAGES, ROWS, HALF], rows_layout)
    results = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], rows_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    return slots, results, (ready, free)


@gluon.jit(do_not_specialize=["tokens", "tiles", "all_tiles", "heads", "k_heads", "table_rows"])
def rotate_specialised(x, y, weight_ptr, rstd_ptr, heads, rstd_batch_stride, rstd_token_stride,
                       rstd_head_stride, k, k_y, k_weight_ptr, k_rstd_ptr, k_heads,
                       k_rstd_batch_stride, k_rstd_token_stride, k_rstd_head_stride, cos_ptr,
                       sin_ptr, positions_ptr, table_rows, cos_batch_stride, cos_token_stride,
                       cos_stride, sin_batch_stride, sin_token_stride, sin_stride,
                       position_batch_stride, position_token_stride, tokens, tiles, all_tiles, eps,
                       PLUS_ONE: gl.constexpr, ROUNDED: gl.constexpr, FULL: gl.constexpr,
                       ROWS: gl.constexpr, HEADS: gl.constexpr, K_HEADS: gl.constexpr,
                       STAGES: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Tiles of x, then of k; each program takes every so many."""
    slots, results, barriers = _allocate(x.dtype, ROWS, STAGES, 1)
    streams = (
        (x, y, weight_ptr, rstd_ptr, heads, rstd_batch_stride, rstd_token_stride,
         rstd_head_stride),
        (k, k_y, k_weight_ptr, k_rstd_ptr, k_heads, k_rstd_batch_stride, k_rstd_token_stride,
         k_rstd_head_stride),
    )  # fmt: skip
    angles = (
        cos_ptr, sin_ptr, positions_ptr, table_rows, cos_batch_stride, cos_token_stride,
        cos_stride, sin_batch_stride, sin_token_stride, sin_stride, position_batch_stride,
        position_token_stride,
    )  # fmt: skip
    sizes, sources = (tokens, tiles, all_tiles), ((heads, x), (k_heads, k))
    gl.warp_specialize(
        [
            (_rotate, (streams, slots, results, barriers, sizes, angles, eps, PLUS_ONE, ROUNDED,
                       FULL, ROWS, HEADS, K_HEADS, STAGES)),
            (_fetch, (sources, slots, barriers, sizes, ROWS, HEADS, K_HEADS, STAGES, 1)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


# --- Backward ---


@gluon.jit
def _differentiate_rows(stream, slots, results, barriers, step, tile, tokens, angles, weight, sums,
                        FULL: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
                        STAGES: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """The gradients of a tile's rows, and the sums with their terms added."""
    TOKENS: gl.constexpr = ROWS // HEADS
    OWN: gl.constexpr = ROWS // _PARTS
    rstd_ptr = stream[4]
    ready, free = barriers
    batch, token, head = _find_corner(tile, stream[6], tokens, TOKENS, HEADS)
    slot = step % STAGES
    own = gl.arange(0, OWN, gl.SliceLayout(1, layout))
    if TOKENS == 1:  # before the tile's wait, which hides it
        cos, sin = _load_angles(angles, batch, token, token < tokens, layout, FULL)
    mbarrier.wait(ready.index(slot), step // STAGES & 1)
    first_sum, second_sum = sums
    for part in gl.static_range(_PARTS):
        row = own + part * OWN
        token_of_row = token + row // HEADS
        inside = token_of_row < tokens
        if TOKENS > 1:
            places = token_of_row[:, None], inside[:, None]
            cos, sin = _load_angles(angles, batch, *places, layout, FULL)
        at = batch * stream[7] + token_of_row * stream[8] + (head + row % HEADS) * stream[9]
        rstd = gl.load(rstd_ptr + at, mask=inside, other=0)[:, None]
        u1 = slots.index(4 * slot).slice(part * OWN, OWN).load(layout).to(gl.float32)
        u2 = slots.index(4 * slot + 1).slice(part * OWN, OWN).load(layout).to(gl.float32)
        first = slots.index(4 * slot + 2).slice(part * OWN, OWN).load(layout).to(gl.float32) * rstd
        second = slots.index(4 * slot + 3).slice(part * OWN, OWN).load(layout).to(gl.float32) * rstd
        if part == _PARTS - 1:
            mbarrier.arrive(free.index(slot), count=1)
        g1 = u1 * cos[0] + u2 * sin[1]
        g2 = u2 * cos[1] - u1 * sin[0]
        if stream[5] is not None:
            first_sum += g1 * first
            second_sum += g2 * second
        g1 *= weight[0]
        g2 *= weight[1]
        mean = (gl.sum(g1 * first, 1) + gl.sum(g2 * second, 1)) * (0.5 / HALF)
        g1 = (g1 - first * mean[:, None]) * rstd
        g2 = (g2 - second * mean[:, None]) * rstd
        if part == 0:
            wait_for_stores(0)
        results.index(0).slice(part * OWN, OWN).store(g1.to(stream[2].dtype))
        results.index(1).slice(part * OWN, OWN).store(g2.to(stream[2].dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        source = results.index(half).reshape([1, TOKENS, HEADS, HALF])
        copy_out(stream[2], [batch, token, head, half * HALF], source)
    return first_sum, second_sum


@gluon.jit
def _store_sums(ptr, sums, layout: gl.constexpr):
    if ptr is not None:
        column = gl.arange(0, HALF, gl.SliceLayout(0, layout))
        start = ptr + gl.program_id(0) * 2 * HALF + column
        gl.store(start, gl.sum(sums[0], 0))
        gl.store(start + HALF, gl.sum(sums[1], 0))


@gluon.jit
def _differentiate_stream(stream, slots, results, barriers, step, begin, tiles, tokens, angles,
                          PLUS_ONE: gl.constexpr, FULL: gl.constexpr, ROWS: gl.constexpr,
                          HEADS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """This program's tiles from `begin` on; returns the steps that were taken."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    weight = (
        _load_weight(stream[3], 0, PLUS_ONE, layout),
        _load_weight(stream[3], 1, PLUS_ONE, layout),
    )
    first_sum = gl.zeros([ROWS // _PARTS, HALF], gl.float32, layout)
    second_sum = gl.zeros([ROWS // _PARTS, HALF], gl.float32, layout)
    for tile in range(begin, tiles, gl.num_programs(0)):
        first_sum, second_sum = _differentiate_rows(
            stream, slots, results, barriers, step, tile, tokens, angles, weight,
            (first_sum, second_sum), FULL, ROWS, HEADS, STAGES, layout,
        )  # fmt: skip
        step += 1
    _store_sums(stream[5], (first_sum, second_sum), layout)
    return step


@gluon.jit
def _differentiate(streams, slots, results, barriers, sizes, angles, PLUS_ONE: gl.constexpr,
                   FULL: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
                   K_HEADS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    tokens, tiles, all_tiles = sizes
    x, k = streams
    program, programs = gl.program_id(0), gl.num_programs(0)
    step = gl.to_tensor(0)
    step = _differentiate_stream(x, slots, results, barriers, step, program, tiles, tokens, angles,
                                 PLUS_ONE, FULL, ROWS, HEADS, STAGES)  # fmt: skip
    if k[0] is not None:
        begin = program + step * programs - tiles
        _differentiate_stream(k, slots, results, barriers, step, begin, all_tiles - tiles, tokens,
                              angles, PLUS_ONE, FULL, ROWS, K_HEADS, STAGES)  # fmt: skip
    wait_for_stores(0)


@gluon.jit(do_not_specialize=["tokens", "tiles", "all_tiles", "heads", "k_heads", "table_rows"])
def differentiate_specialised(grad, x, result, weight_ptr, rstd_ptr, partials_ptr, heads,
                              rstd_batch_stride, rstd_token_stride, rstd_head_stride, k_grad, k,
                              k_result, k_weight_ptr, k_rstd_ptr, k_partials_ptr, k_heads,
                              k_rstd_batch_stride, k_rstd_token_stride, k_rstd_head_stride, cos_ptr,
                              sin_ptr, positions_ptr, table_rows, cos_batch_stride,
                              cos_token_stride, cos_stride, sin_batch_stride, sin_token_stride,
                              sin_stride, position_batch_stride, position_token_stride, tokens,
                              tiles, all_tiles, PLUS_ONE: gl.constexpr, FULL: gl.constexpr,
                              ROWS: gl.constexpr, HEADS: gl.constexpr, K_HEADS: gl.constexpr,
                              STAGES: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Gradients of the tiles of x, then of k, and of their weights the sums of each program."""
    slots, results, barriers = _allocate(x.dtype, ROWS, STAGES, 2)
    streams = (
        (grad, x, result, weight_ptr, rstd_ptr, partials_ptr, heads, rstd_batch_stride,
         rstd_token_stride, rstd_head_stride),
        (k_grad, k, k_result, k_weight_ptr, k_rstd_ptr, k_partials_ptr, k_heads,
         k_rstd_batch_stride, k_rstd_token_stride, k_rstd_head_stride),
    )  # fmt: skip
    angles = (
        cos_ptr, sin_ptr, positions_ptr, table_rows, cos_batch_stride, cos_token_stride,
        cos_stride, sin_batch_stride, sin_token_stride, sin_stride, position_batch_stride,
        position_token_stride,
    )  # fmt: skip
    sizes, sources = (tokens, tiles, all_tiles), ((heads, grad, x), (k_heads, k_grad, k))
    gl.warp_specialize(
        [
            (_differentiate, (streams, slots, results, barriers, sizes, angles, PLUS_ONE, FULL,
                              ROWS, HEADS, K_HEADS, STAGES)),
            (_fetch, (sources, slots, barriers, sizes, ROWS, HEADS, K_HEADS, STAGES, 2)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


# --- Launches ---


def _find_heads(heads: int) -> int:
    """The heads of a token that a tile has: a power of two that divides them."""
    return math.gcd(heads, ROWS)


def _describe(tensor: torch.Tensor, call: Any) -> tuple[list[int], list[int]]:
    """Sizes and strides of batch, token, head and column. A size of 1 has any stride."""
    heads, places = call.heads(tensor)
    sizes = [places // call.tokens, call.tokens, heads, WIDTH]
    strides = [stride or WIDTH for stride in call.strides(tensor)]
    return sizes, [*strides, 1]


def may_serve(call: Any, tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the kernels run for these tensors, which TMA copies, and their tiles are full."""
    x = tensors[0]
    assert x is not None
    pairs, distance, width = call.layout
    if not runs_on(x.device) or x.element_size() != 2 or call.options["INTERLEAVED"]:
        return False
    if (2 * pairs, 2 * distance, width) != (WIDTH,) * 3 or not x.numel():
        return False
    return all(_fits(tensor, call) for tensor in tensors if tensor is not None)


def _fits(tensor: torch.Tensor, call: Any) -> bool:
    sizes, strides = _describe(tensor, call)
    is_full = sizes[1] >= ROWS // _find_heads(sizes[2])
    counts = zip(sizes[:3], call.strides(tensor), strict=True)
    has_rows = all(stride > 0 for size, stride in counts if size > 1)  # an expanded one has not
    aligned = not any(stride % 8 for stride in strides[:3])
    address = 0 if tensor.device.type == "meta" else tensor.data_ptr()
    return is_full and has_rows and aligned and address % 16 == 0 and tensor.numel() < 2**31


def _descriptor(tensor: torch.Tensor | None, call: Any) -> TensorDescriptor | None:
    if tensor is None:
        return None
    sizes, strides = _describe(tensor, call)
    heads = _find_heads(sizes[2])
    block = [1, ROWS // heads, heads, HALF.value]
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, sizes, strides, block, layout)


def _count(call: Any, tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], list[int]]:
    """The tiles of x and of k, and the heads that a tile of each has."""
    tiles, heads = [], []
    for tensor in tensors:
        own, places = call.heads(tensor)
        heads.append(_find_heads(own))
        batches, tokens_of_tile = places // call.tokens, ROWS // heads[-1]
        tiles.append(batches * triton.cdiv(call.tokens, tokens_of_tile) * (own // heads[-1]))
    return tiles, heads


def count_programs(call: Any, tensors: Sequence[torch.Tensor | None]) -> int:
    """The programs of a launch for x and k."""
    x = tensors[0]
    assert x is not None
    return min(sum(_count(call, tensors)[0]), _PROGRAMS * processors(x.device))


def _launch(
    kernel: Any,
    tile: Tile,
    call: Any,
    tensors: Sequence[torch.Tensor | None],
    given: Sequence[Any],
    *numbers: float,
    **options: Any,
) -> Launch:
    """A launch for x and k; `given` are the arguments before the angles."""
    tiles, heads = _count(call, tensors)
    return launch(
        kernel,
        count_programs(call, tensors),
        *(*given, *call.angles, call.tokens, tiles[0], sum(tiles), *numbers),
        **options,
        FULL=call.options["FULL"],
        ROWS=ROWS,
        HEADS=heads[0],
        K_HEADS=heads[1],
        STAGES=tile.stages,
        REGISTERS=24,
        num_warps=tile.warps,
        maxnreg=80,  # of eight warps, so that the four that rotate have 136
    )._replace(least_capability=90)


def specialised_launch(
    call: Any, streams: Sequence[tuple[Any, ...]], eps: float, plus_one: bool, rounded: int
) -> Launch:
    """`streams` as of rotary.py: the input, the result, the weight and rstd."""
    given: list[Any] = []
    for source, result, weight, rstd in streams:
        given += [_descriptor(source, call), _descriptor(result, call), weight, rstd]
        given += [call.heads(source)[0], *call.strides(rstd, 0)]
    sources = [stream[0] for stream in streams]
    options = {"PLUS_ONE": plus_one, "ROUNDED": rounded}
    return _launch(rotate_specialised, TILE, call, sources, given, eps, **options)


def specialised_backward_launch(
    call: Any,
    streams: Sequence[tuple[Any, ...]],
    partials: Sequence[torch.Tensor | None],
    plus_one: bool,
) -> Launch:
    """`streams` as of rotary.py: gradient, input, result, weight, rstd, weight's gradient.

    `partials` are the sums of each program for the weights' gradients.
    """
    given: list[Any] = []
    for (*tensors, weight, rstd, _), partial in zip(streams, partials, strict=True):
        given += [_descriptor(tensor, call) for tensor in tensors]
        given += [weight, rstd, partial, call.heads(tensors[0])[0], *call.strides(rstd, 0)]
    sources, kernel = [stream[0] for stream in streams], differentiate_specialised
    return _launch(kernel, BACKWARD_TILE, call, sources, given, PLUS_ONE=plus_one)
