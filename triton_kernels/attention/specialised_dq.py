"""The gradient of attention's queries for sm_90 by specialised warps.

As in specialised_forward.py, a producer copies tiles and each group of consumers takes 64
queries. While a consumer computes exponentials, the product of the gradients of the scores before
and their keys is under way. These gradients stay in registers, which do not hold more than 64 keys.
The first tile is always checked.
"""

# ruff: noqa: N803, SIM113 - constexprs are in capitals in Triton, which has no enumerate,
# and all parts of a kernel take the same tuples.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ..gluon_names import (
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .specialised_walks import (
    INTEGERS,
    hear,
    keys_of,
    place_of,
    row_walk,
    seen_of_rows,
    sees_keys,
    tell,
    weights_of,
    words_of_rows,
)


@gluon.jit
def _fetch(sources, tiles, barriers, lists, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
           N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer."""
    q, grad, k, v, base_ptr, delta_ptr = sources
    q_tiles, grad_tiles, k_tiles, v_tiles, seen, bases, deltas, walks = tiles
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride = lists
    count, planes, together, heads, group, first_head, queries, keys, shift = sizes
    SPLIT: gl.constexpr = BLOCK // N
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    i = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        plane, rank = place_of(tile, planes, together, lines)
        batch, head = plane // heads, plane % heads
        key_head = (head + first_head) // group
        own_lines_ptr = lines_ptr + 4 * (batch * lines_batch_stride + head * lines_head_stride)
        first, walk = row_walk(own_lines_ptr, entries_ptr, rank, keys, shift, BLOCK, CAUSAL)
        whole, steps = walk[2] * SPLIT, gl.maximum(walk[5], 1) * SPLIT
        mbarrier.wait(q_free, (done & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * BLOCK * D * 2)
        for part in gl.static_range(BLOCK // 64):
            at = first + part * 64
            copy_in(q, [batch, head, at, 0], q_ready, q_tiles.index(part))
            copy_in(grad, [batch, head, at, 0], q_ready, grad_tiles.index(part))
        for part in gl.static_range(BLOCK // 64):
            query = first + part * 64 + gl.arange(0, 64, layout)
            saved = plane * queries + query
            base = gl.load(base_ptr + saved, mask=query < queries, other=0)
            delta = gl.load(delta_ptr + saved, mask=query < queries, other=0)
            bases.index(part).store(base)
            deltas.index(part).store(delta)
        tell(walks, plane, first, whole, steps)
        mbarrier.arrive(q_ready, count=1)
        own_keys = keys_of(entries_ptr, walk, 0, N, BLOCK)
        for n in range(0, steps):
            coming = keys_of(entries_ptr, walk, n + 1, N, BLOCK)
            slot = i % STAGES
            phase = ((i // STAGES) & 1) ^ 1
            row = own_keys[0]
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_ready.index(slot), N * D * 2)
            copy_in(k, [batch, key_head, row, 0], k_ready.index(slot), k_tiles.index(slot))
            if n >= whole or n == 0:
                words = seen_of_rows(masks_ptr, own_keys, first, keys, shift, BLOCK, N, CAUSAL)
                seen.index(slot).store(words)
            mbarrier.arrive(k_ready.index(slot), count=1)
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_ready.index(slot), N * D * 2)
            copy_in(v, [batch, key_head, row, 0], v_ready.index(slot), v_tiles.index(slot))
            i += 1
            own_keys = coming
        done += 1


@gluon.jit
def _differentiate(
    which: gl.constexpr, i, state, own, tiles, barriers, scale, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr, CHECKED: gl.constexpr, s_layout: gl.constexpr,
    sum_layout: gl.constexpr,
):  # fmt: skip
    """The gradients of the scores of the i-th tile of keys, while those before meet their keys."""
    sums, of_scores = state
    q, grad, base, delta = own
    k_tiles, v_tiles, seen = tiles
    k_ready, k_free, v_ready, v_free = barriers
    slot, phase = i % STAGES, (i // STAGES) & 1
    k, v = k_tiles.index(slot).reshape([N, D]), v_tiles.index(slot).reshape([N, D])
    zeros = gl.zeros([64, N], gl.float32, s_layout)
    mbarrier.wait(k_ready.index(slot), phase)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(slot), phase)
    grads = warpgroup_mma(grad, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if FIRST:
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        before = k_tiles.index((i - 1) % STAGES).reshape([N, D])
        sums = warpgroup_mma(of_scores, before, sums, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
    if CHECKED:
        words = seen.index(slot).slice(which * 64, 64).load(words_of_rows(N))
        s = gl.where(sees_keys(words, N, s_layout), s, -float("inf"))
    weights = weights_of(s * scale - base[:, None])
    mbarrier.wait(v_ready.index(slot), phase)  # a branch: weights are computed before it
    if FIRST:
        grads = warpgroup_mma_wait(0, deps=(grads,))
    else:
        grads, sums = warpgroup_mma_wait(0, deps=(grads, sums))
        mbarrier.arrive(k_free.index((i - 1) % STAGES), count=1)
    mbarrier.arrive(v_free.index(slot), count=1)
    products = (weights * (grads - delta[:, None])).to(k_tiles.dtype)
    return sums, gl.convert_layout(products, gl.DotOperandLayout(0, sum_layout, 2))


@gluon.jit
def _consume(
    which: gl.constexpr, result, tiles, barriers, sizes, scale, inner, N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gradient of 64 queries of each row of blocks."""
    q_tiles, grad_tiles, k_tiles, v_tiles, seen, bases, deltas, walks = tiles
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    count, heads = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    i = 0
    done = 0
    for _tile in range(gl.program_id(0), count, gl.num_programs(0)):
        mbarrier.wait(q_ready, done & 1)
        plane, first, whole, steps = hear(walks)
        batch, head = plane // heads, plane % heads
        first += which * 64
        base = bases.index(which).load(gl.SliceLayout(1, s_layout))
        delta = deltas.index(which).load(gl.SliceLayout(1, s_layout))
        q_tile = q_tiles.index(which)
        q = q_tile.reshape([64, D])
        own = (q, grad_tiles.index(which).reshape([64, D]), base, delta)
        used = (k_ready, k_free, v_ready, v_free)
        taken = (k_tiles, v_tiles, seen)
        sums = gl.zeros([64, D], gl.float32, sum_layout)
        state = _differentiate(
            which, i, (sums, 0), own, taken, used, inner, N, D, STAGES, True, True, s_layout,
            sum_layout,
        )  # fmt: skip
        i += 1
        for _n in range(1, whole):
            state = _differentiate(
                which, i, state, own, taken, used, inner, N, D, STAGES, False, False, s_layout,
                sum_layout,
            )  # fmt: skip
            i += 1
        for _n in range(gl.maximum(whole, 1), steps):
            state = _differentiate(
                which, i, state, own, taken, used, inner, N, D, STAGES, False, True, s_layout,
                sum_layout,
            )  # fmt: skip
            i += 1
        sums, of_scores = state
        slot = (i - 1) % STAGES
        k = k_tiles.index(slot).reshape([N, D])
        sums = warpgroup_mma(of_scores, k, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(k_free.index(slot), count=1)
        q.store((sums * scale).to(k_tiles.dtype))
        fence_async_shared()
        copy_out(result, [batch, head, first, 0], q_tile)
        wait_for_stores(0)
        mbarrier.arrive(q_free, count=1)
        done += 1


@gluon.jit(do_not_specialize=INTEGERS)
def attention_dq_specialised(
    q,
    grad,
    k,
    v,
    result,
    base_ptr,
    delta_ptr,
    lines_ptr,
    entries_ptr,
    masks_ptr,
    lines,
    lines_batch_stride,
    lines_head_stride,
    count,
    planes,
    together,
    heads,
    group,
    first_head,
    queries,
    keys,
    shift,
    scale,
    inner,
    CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    CONSUMERS: gl.constexpr = BLOCK // 64
    of_numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    of_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, 64, D], q.layout)
    grad_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, 64, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout)
    seen = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, N // 32], of_words)
    bases = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 64], of_numbers)
    deltas = gl.allocate_shared_memory(gl.float32, [CONSUMERS, 64], of_numbers)
    walks = gl.allocate_shared_memory(gl.int32, [4], of_numbers)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=2)  # of the copies, and of the rest
    mbarrier.init(q_free, count=CONSUMERS)
    for at in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(at), count=2)  # of the copies, and of the bits
        mbarrier.init(k_free.index(at), count=CONSUMERS)
        mbarrier.init(v_ready.index(at), count=1)
        mbarrier.init(v_free.index(at), count=CONSUMERS)
    fence_async_shared()
    tiles = (q_tiles, grad_tiles, k_tiles, v_tiles, seen, bases, deltas, walks)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    lists = (lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride)
    sizes = (count, planes, together, heads, group, first_head, queries, keys, shift)
    sources = (q, grad, k, v, base_ptr, delta_ptr)
    own_sizes = (count, heads)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, result, tiles, barriers, own_sizes, scale, inner, N, D, STAGES)),
            (_fetch, (sources, tiles, barriers, lists, sizes, CAUSAL, BLOCK, N, D, STAGES)),
        ], [1], [56])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, result, tiles, barriers, own_sizes, scale, inner, N, D, STAGES)),
            (_consume, (1, result, tiles, barriers, own_sizes, scale, inner, N, D, STAGES)),
            (_fetch, (sources, tiles, barriers, lists, sizes, CAUSAL, BLOCK, N, D, STAGES)),
        ], [4, 1], [REGISTERS, 56])  # fmt: skip
