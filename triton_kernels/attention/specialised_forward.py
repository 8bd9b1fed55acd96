"""Attention's forward pass for sm_90 by specialised warps; block_sparse_attention.py has the
arithmetic.

A warp, the producer, copies tiles by TMA: the queries of a row of blocks, then the keys and values
of its entries, several of them ahead. Groups of four warps, the consumers, take 64 queries each and
share those tiles. The product of the next scores and that of weights and values are under way
while a consumer computes exponentials, and weights stay in registers.

A program takes several rows of blocks if there are more of them than multiprocessors. The producer
then fetches the next row's tiles while consumers finish a row.

For tiles that need a check the producer also lays bits into shared memory, of keys past the last
one, of the causal mask and of partial blocks: windows and documents. Consumers know nothing else of
them. A line without an entry takes one block, past all keys and hidden.
"""

# ruff: noqa: N803, RUF059, SIM113 - constexprs are in capitals in Triton, which has no enumerate,
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
    LOG2_E,
    hear,
    keys_of,
    place_of,
    row_walk,
    seen_of_rows,
    sees_keys,
    tell,
    words_of_rows,
)


@gluon.jit
def _fetch(sources, tiles, barriers, lists, sizes, CAUSAL: gl.constexpr, BLOCK: gl.constexpr,
           N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
           Q_STAGES: gl.constexpr):  # fmt: skip
    """The producer."""
    q, k, v = sources
    q_tiles, k_tiles, v_tiles, seen, walks = tiles
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride = lists
    count, planes, together, heads, group, first_head, queries, keys, shift = sizes
    CONSUMERS: gl.constexpr = BLOCK // 64
    SPLIT: gl.constexpr = (BLOCK + N - 1) // N
    PARTS: gl.constexpr = (N + BLOCK - 1) // BLOCK
    ROWS: gl.constexpr = N // PARTS
    i = 0
    done = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        plane, rank = place_of(tile, planes, together, lines)
        batch, head = plane // heads, plane % heads
        key_head = (head + first_head) // group
        own_lines_ptr = lines_ptr + 4 * (batch * lines_batch_stride + head * lines_head_stride)
        first, walk = row_walk(own_lines_ptr, entries_ptr, rank, keys, shift, BLOCK, CAUSAL)
        whole = walk[2] // PARTS * SPLIT
        steps = gl.maximum((walk[5] + PARTS - 1) // PARTS, 1) * SPLIT
        slot = done % Q_STAGES
        mbarrier.wait(q_free.index(slot), ((done // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), BLOCK * D * 2)
        for part in gl.static_range(CONSUMERS):
            copy_in(
                q,
                [batch, head, first + part * 64, 0],
                q_ready.index(slot),
                q_tiles.index(slot * CONSUMERS + part),
            )
        tell(walks.index(slot), plane, first, whole, steps)
        mbarrier.arrive(q_ready.index(slot), count=1)
        own_keys = keys_of(entries_ptr, walk, 0, N, BLOCK)
        for n in range(0, steps):
            coming = keys_of(entries_ptr, walk, n + 1, N, BLOCK)
            slot = i % STAGES
            phase = ((i // STAGES) & 1) ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_ready.index(slot), N * D * 2)
            for part in gl.static_range(PARTS):
                own = k_tiles.index(slot).slice(part * ROWS, ROWS, 2)
                copy_in(k, [batch, key_head, own_keys[part], 0], k_ready.index(slot), own)
            if n >= whole:
                words = seen_of_rows(masks_ptr, own_keys, first, keys, shift, BLOCK, N, CAUSAL)
                seen.index(slot).store(words)
            mbarrier.arrive(k_ready.index(slot), count=1)
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_ready.index(slot), N * D * 2)
            for part in gl.static_range(PARTS):
                own = v_tiles.index(slot).slice(part * ROWS, ROWS, 2)
                copy_in(v, [batch, key_head, own_keys[part], 0], v_ready.index(slot), own)
            i += 1
            own_keys = coming
        done += 1


@gluon.jit
def _weigh(s, highest, total, scale):
    """A step of the online softmax: weights, their maximum and sum, and the factor of old sums.

    Maxima are unscaled, for the reason that `_split_scale` of forward.py gives.
    """
    above = gl.maximum(highest, gl.max(s, 1))
    base = gl.where(above == -float("inf"), 0.0, above)
    shrunk = gl.exp2((highest - base) * scale)
    e = gl.exp2((s - base[:, None]) * scale)
    return e, above, total * shrunk + gl.sum(e, 1), shrunk


@gluon.jit
def _attend(
    which: gl.constexpr, i, state, q, tiles, barriers, scale, N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CHECKED: gl.constexpr, s_layout: gl.constexpr, y_layout: gl.constexpr,
):  # fmt: skip
    """The scores of the i-th tile of keys, while the weights of the one before meet its values."""
    sums, weights, highest, total = state
    k_tiles, v_tiles, seen = tiles
    k_ready, k_free, v_ready, v_free = barriers
    slot, phase = i % STAGES, (i // STAGES) & 1
    last, last_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
    zeros = gl.zeros([64, N], gl.float32, s_layout)
    k, v = k_tiles.index(slot).reshape([N, D]), v_tiles.index(last).reshape([N, D])
    mbarrier.wait(k_ready.index(slot), phase)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(last), last_phase)
    sums = warpgroup_mma(weights, v, sums, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if CHECKED:
        words = seen.index(slot).slice(which * 64, 64).load(words_of_rows(N))
        s = gl.where(sees_keys(words, N, s_layout), s, -float("inf"))
    mbarrier.arrive(k_free.index(slot), count=1)
    e, highest, total, shrunk = _weigh(s, highest, total, scale)
    coming = gl.convert_layout(e.to(k_tiles.dtype), gl.DotOperandLayout(0, y_layout, 2))
    mbarrier.wait(v_ready.index(last), last_phase)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(v_free.index(last), count=1)
    sums = sums * gl.convert_layout(shrunk, gl.SliceLayout(1, y_layout))[:, None]
    return sums, coming, highest, total


@gluon.jit
def _consume(
    which: gl.constexpr, y, lse_ptr, sinks_ptr, tiles, barriers, sizes, scale,
    BLOCK: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 queries of each row of blocks."""
    q_tiles, k_tiles, v_tiles, seen, walks = tiles
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    count, heads, queries = sizes
    CONSUMERS: gl.constexpr = BLOCK // 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    y_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    i = 0
    done = 0
    for _tile in range(gl.program_id(0), count, gl.num_programs(0)):
        q_slot = done % Q_STAGES
        mbarrier.wait(q_ready.index(q_slot), (done // Q_STAGES) & 1)
        plane, first, whole, steps = hear(walks.index(q_slot))
        batch, head = plane // heads, plane % heads
        first += which * 64
        q_tile = q_tiles.index(q_slot * CONSUMERS + which)
        q = q_tile.reshape([64, D])
        slot = i % STAGES
        mbarrier.wait(k_ready.index(slot), (i // STAGES) & 1)
        zeros = gl.zeros([64, N], gl.float32, s_layout)
        s = warpgroup_mma(
            q, k_tiles.index(slot).reshape([N, D]).permute((1, 0)), zeros, use_acc=False,
            is_async=True,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=(s,))
        if whole == 0:
            words = seen.index(slot).slice(which * 64, 64).load(words_of_rows(N))
            s = gl.where(sees_keys(words, N, s_layout), s, -float("inf"))
        mbarrier.arrive(k_free.index(slot), count=1)
        highest = gl.full([64], -float("inf"), gl.float32, rows)
        total = gl.zeros([64], gl.float32, rows)
        if sinks_ptr is not None:  # a key without a value
            sink = gl.load(sinks_ptr + head + gl.zeros([64], gl.int32, rows)).to(gl.float32)
            highest = sink * (LOG2_E / scale)
            total = gl.where(highest == -float("inf"), 0.0, 1.0)
        e, highest, total, _ = _weigh(s, highest, total, scale)
        weights = gl.convert_layout(e.to(k_tiles.dtype), gl.DotOperandLayout(0, y_layout, 2))
        i += 1
        sums = gl.zeros([64, D], gl.float32, y_layout)
        state = (sums, weights, highest, total)
        inner = (k_ready, k_free, v_ready, v_free)
        for _n in range(1, whole):
            state = _attend(
                which, i, state, q, (k_tiles, v_tiles, seen), inner, scale, N, D, STAGES, False,
                s_layout, y_layout,
            )  # fmt: skip
            i += 1
        for _n in range(gl.maximum(whole, 1), steps):
            state = _attend(
                which, i, state, q, (k_tiles, v_tiles, seen), inner, scale, N, D, STAGES, True,
                s_layout, y_layout,
            )  # fmt: skip
            i += 1
        sums, weights, highest, total = state
        slot = (i - 1) % STAGES
        mbarrier.wait(v_ready.index(slot), ((i - 1) // STAGES) & 1)
        sums = warpgroup_mma(weights, v_tiles.index(slot).reshape([N, D]), sums, is_async=True)
        nothing = total == 0
        base = gl.where(nothing, 0.0, highest) * scale
        total = gl.where(nothing, 1.0, total)
        lse = gl.where(nothing, -float("inf"), (base + gl.log2(total)) * 0.6931471805599453)
        query = first + gl.arange(0, 64, rows)
        gl.store(lse_ptr + plane * queries + query, lse, mask=query < queries)
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1 / total), gl.SliceLayout(1, y_layout))
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_free.index(slot), count=1)
        # A value of a hidden key may be infinite.
        result = gl.where((factor == 0)[:, None], 0.0, sums * factor[:, None])
        q.store(result.to(k_tiles.dtype))
        fence_async_shared()
        copy_out(y, [batch, head, first, 0], q_tile)
        wait_for_stores(0)
        mbarrier.arrive(q_free.index(q_slot), count=1)
        done += 1


@gluon.jit(do_not_specialize=INTEGERS)
def attention_forward_specialised(
    q,
    k,
    v,
    y,
    lse_ptr,
    sinks_ptr,
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
    CAUSAL: gl.constexpr,
    BLOCK: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    CONSUMERS: gl.constexpr = BLOCK // 64
    of_numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    of_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_STAGES * CONSUMERS, 1, 1, 64, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, N, D], v.layout)
    seen = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, N // 32], of_words)
    walks = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 4], of_numbers)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(Q_STAGES):
        mbarrier.init(q_ready.index(at), count=2)  # of the copies, and of the walk
        mbarrier.init(q_free.index(at), count=CONSUMERS)
    for at in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(at), count=2)  # of the copies, and of the bits
        mbarrier.init(k_free.index(at), count=CONSUMERS)
        mbarrier.init(v_ready.index(at), count=1)
        mbarrier.init(v_free.index(at), count=CONSUMERS)
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles, seen, walks)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    lists = (lines_ptr, entries_ptr, masks_ptr, lines, lines_batch_stride, lines_head_stride)
    own_sizes = (count, heads, queries)
    sizes = (count, planes, together, heads, group, first_head, queries, keys, shift)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, y, lse_ptr, sinks_ptr, tiles, barriers, own_sizes, scale, BLOCK, N, D,
                        STAGES, Q_STAGES)),
            (_fetch, ((q, k, v), tiles, barriers, lists, sizes, CAUSAL, BLOCK, N, D, STAGES,
                      Q_STAGES)),
        ], [1], [56])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, y, lse_ptr, sinks_ptr, tiles, barriers, own_sizes, scale, BLOCK, N, D,
                        STAGES, Q_STAGES)),
            (_consume, (1, y, lse_ptr, sinks_ptr, tiles, barriers, own_sizes, scale, BLOCK, N, D,
                        STAGES, Q_STAGES)),
            (_fetch, ((q, k, v), tiles, barriers, lists, sizes, CAUSAL, BLOCK, N, D, STAGES,
                      Q_STAGES)),
        ], [4, 1], [REGISTERS, 56])  # fmt: skip
