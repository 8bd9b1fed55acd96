"""The gradients of attention's keys and values for sm_90 by specialised warps.

As in specialised_forward.py, a producer copies tiles and lays bits into shared memory. Each
group of consumers has 64 keys of a column of blocks and both of their sums. Tiles of scores are
transposed, [keys, queries], so that weights and their gradients stay in registers; the queries'
bases and deltas lie in shared memory, too. Exponentials overlap the product for the gradients of
weights, and those the product that adds to the values' sums. Heads that share keys share a line,
and follow one another.
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
    column_walk,
    entry_of,
    heads_of,
    hear,
    place_of,
    seen_by_queries,
    seen_of_columns,
    tell,
    weights_of,
    words_of_columns,
)


@gluon.jit
def _fetch(sources, tiles, barriers, lists, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
           M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer."""
    k, v, q, grad, base_ptr, delta_ptr = sources
    k_tiles, v_tiles, q_tiles, grad_tiles, seen, bases, deltas, walks = tiles
    k_ready, k_free, q_ready, q_free = barriers
    lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride = lists
    count, planes, together, heads, key_heads, group, first_head, queries, keys, shift = sizes
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        plane, rank = place_of(tile, planes, together, lines)
        batch, key_head = plane // key_heads, plane % key_heads
        begin_head, end_head = heads_of(key_head, heads, group, first_head)
        own_head = gl.minimum(begin_head, heads - 1)
        own_lines_ptr = lines_ptr + 4 * (batch * lines_batch_stride + own_head * lines_head_stride)
        first, walk = column_walk(own_lines_ptr, entries_ptr, rank, keys, shift, BLOCK, CAUSAL)
        whole, total = walk[2], walk[5]
        mbarrier.wait(k_free, (done & 1) ^ 1)
        mbarrier.expect(k_ready, 2 * BLOCK * D * 2)
        for part in gl.static_range(BLOCK // 64):
            at = first + part * 64
            copy_in(k, [batch, key_head, at, 0], k_ready, k_tiles.index(part))
            copy_in(v, [batch, key_head, at, 0], k_ready, v_tiles.index(part))
        tell(walks, plane, first, whole, total)
        mbarrier.arrive(k_ready, count=1)
        for head in range(begin_head, end_head):
            saved = (batch * heads + head) * queries
            partner, mask = entry_of(entries_ptr, walk, 0)
            for n in range(0, total):
                coming, coming_mask = entry_of(entries_ptr, walk, n + 1)
                for part in gl.static_range(BLOCK // M):
                    slot = i % STAGES
                    row = partner * BLOCK + part * M
                    mbarrier.wait(q_free.index(slot), ((i // STAGES) & 1) ^ 1)
                    mbarrier.expect(q_ready.index(slot), 2 * M * D * 2)
                    copy_in(q, [batch, head, row, 0], q_ready.index(slot), q_tiles.index(slot))
                    copy_in(
                        grad, [batch, head, row, 0], q_ready.index(slot), grad_tiles.index(slot)
                    )
                    query = row + gl.arange(0, M, layout)
                    # A weight of a query that is not there is exp2(-inf).
                    base = gl.load(
                        base_ptr + saved + query, mask=query < queries, other=float("inf")
                    )
                    delta = gl.load(delta_ptr + saved + query, mask=query < queries, other=0)
                    bases.index(slot).store(base)
                    deltas.index(slot).store(delta)
                    if n >= whole:
                        words = seen_of_columns(
                            masks_ptr, mask, row, first, keys, shift, BLOCK, M, CAUSAL
                        )
                        seen.index(slot).store(words)
                    mbarrier.arrive(q_ready.index(slot), count=1)
                    i += 1
                partner, mask = coming, coming_mask
        done += 1


@gluon.jit
def _add(
    which: gl.constexpr, i, sums, own, tiles, barriers, scale, M: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CHECKED: gl.constexpr, s_layout: gl.constexpr, sum_layout: gl.constexpr,
):  # fmt: skip
    """Add what the i-th tile of queries contributes."""
    of_keys, of_values = sums
    k, v = own
    q_tiles, grad_tiles, seen, bases, deltas = tiles
    q_ready, q_free = barriers
    slot, phase = i % STAGES, (i // STAGES) & 1
    q, grad = q_tiles.index(slot).reshape([M, D]), grad_tiles.index(slot).reshape([M, D])
    zeros = gl.zeros([64, M], gl.float32, s_layout)
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    mbarrier.wait(q_ready.index(slot), phase)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grads = warpgroup_mma(v, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    base = bases.index(slot).load(gl.SliceLayout(0, s_layout))
    weights = weights_of(s * scale - base[None, :])
    if CHECKED:
        words = seen.index(slot).slice(which * 2, 2).load(words_of_columns(M))
        weights = gl.where(seen_by_queries(words, M, s_layout), weights, 0.0)
    rounded = gl.convert_layout(weights.to(q_tiles.dtype), weights_layout)
    of_values = warpgroup_mma(rounded, grad, of_values, is_async=True)
    grads = warpgroup_mma_wait(1, deps=(grads,))
    delta = deltas.index(slot).load(gl.SliceLayout(0, s_layout))
    products = (weights * (grads - delta[None, :])).to(q_tiles.dtype)
    mbarrier.wait(q_ready.index(slot), phase)  # a branch: products are computed before it
    of_keys = warpgroup_mma(gl.convert_layout(products, weights_layout), q, of_keys, is_async=True)
    of_keys, of_values = warpgroup_mma_wait(0, deps=(of_keys, of_values))
    mbarrier.arrive(q_free.index(slot), count=1)
    return of_keys, of_values


@gluon.jit
def _consume(
    which: gl.constexpr, results, tiles, barriers, sizes, scale, inner, CHECKED: gl.constexpr,
    BLOCK: gl.constexpr, M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gradients of 64 keys of each column of blocks."""
    grad_k, grad_v = results
    k_tiles, v_tiles, q_tiles, grad_tiles, seen, bases, deltas, walks = tiles
    k_ready, k_free, q_ready, q_free = barriers
    count, heads, key_heads, group, first_head = sizes
    SPLIT: gl.constexpr = BLOCK // M
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16]
    )
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    own_tiles, own_barriers = (q_tiles, grad_tiles, seen, bases, deltas), (q_ready, q_free)
    i = 0
    done = 0
    for _tile in range(gl.program_id(0), count, gl.num_programs(0)):
        mbarrier.wait(k_ready, done & 1)
        plane, first, whole, total = hear(walks)
        batch, key_head = plane // key_heads, plane % key_heads
        begin_head, end_head = heads_of(key_head, heads, group, first_head)
        first += which * 64
        k_tile, v_tile = k_tiles.index(which), v_tiles.index(which)
        k, v = k_tile.reshape([64, D]), v_tile.reshape([64, D])
        zeros = gl.zeros([64, D], gl.float32, sum_layout)
        sums = (zeros, zeros)
        for _head in range(begin_head, end_head):
            for _n in range(0, whole * SPLIT):
                sums = _add(
                    which, i, sums, (k, v), own_tiles, own_barriers, inner, M, D, STAGES, False,
                    s_layout, sum_layout,
                )  # fmt: skip
                i += 1
            if CHECKED:
                for _n in range(whole * SPLIT, total * SPLIT):
                    sums = _add(
                        which, i, sums, (k, v), own_tiles, own_barriers, inner, M, D, STAGES, True,
                        s_layout, sum_layout,
                    )  # fmt: skip
                    i += 1
        of_keys, of_values = sums
        k.store((of_keys * scale).to(q_tiles.dtype))
        v.store(of_values.to(q_tiles.dtype))
        fence_async_shared()
        copy_out(grad_k, [batch, key_head, first, 0], k_tile)
        copy_out(grad_v, [batch, key_head, first, 0], v_tile)
        wait_for_stores(0)
        mbarrier.arrive(k_free, count=1)
        done += 1


@gluon.jit(do_not_specialize=[*INTEGERS, "key_heads"])
def attention_dkv_specialised(
    k,
    v,
    q,
    grad,
    grad_k,
    grad_v,
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
    key_heads,
    group,
    first_head,
    queries,
    keys,
    shift,
    scale,
    inner,
    CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    CONSUMERS: gl.constexpr = BLOCK // 64
    CHECKED: gl.constexpr = CAUSAL or masks_ptr is not None
    of_numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    of_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, 64, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, 64, D], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, M, D], q.layout)
    grad_tiles = gl.allocate_shared_memory(grad.dtype, [STAGES, 1, 1, M, D], grad.layout)
    seen = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK // 32, M], of_words)
    bases = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_numbers)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, M], of_numbers)
    walks = gl.allocate_shared_memory(gl.int32, [4], of_numbers)
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_ready, count=2)  # of the copies, and of the walk
    mbarrier.init(k_free, count=CONSUMERS)
    for at in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(at), count=2)  # of the copies, and of the rest
        mbarrier.init(q_free.index(at), count=CONSUMERS)
    fence_async_shared()
    tiles = (k_tiles, v_tiles, q_tiles, grad_tiles, seen, bases, deltas, walks)
    barriers = (k_ready, k_free, q_ready, q_free)
    lists = (lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride)
    sizes = (count, planes, together, heads, key_heads, group, first_head, queries, keys, shift)
    own_sizes = (count, heads, key_heads, group, first_head)
    results = (grad_k, grad_v)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, results, tiles, barriers, own_sizes, scale, inner, CHECKED, BLOCK, M, D,
                        STAGES)),
            (_fetch, ((k, v, q, grad, base_ptr, delta_ptr), tiles, barriers, lists, sizes, CAUSAL,
                      BLOCK, M, D, STAGES)),
        ], [1], [PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, results, tiles, barriers, own_sizes, scale, inner, CHECKED, BLOCK, M, D,
                        STAGES)),
            (_consume, (1, results, tiles, barriers, own_sizes, scale, inner, CHECKED, BLOCK, M, D,
                        STAGES)),
            (_fetch, ((k, v, q, grad, base_ptr, delta_ptr), tiles, barriers, lists, sizes, CAUSAL,
                      BLOCK, M, D, STAGES)),
        ], [4, 1], [REGISTERS, PRODUCER])  # fmt: skip
