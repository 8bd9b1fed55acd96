"""A small Gluon kernel for Hopper with all that the imitation imitates: y = round(a @ b.T) twice.

A producer fetches, a group of warps multiplies, and others double the result and store it. `main`
compiles it for sm_90 and prints what it takes.
"""

# ruff: noqa: N803, SIM113 - constexprs are in capitals in Triton, which has no enumerate.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import json
import sys
from typing import Any

from torchweld.triton_kernels.gluon_names import (
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


@gluon.jit
def multiply(a_tiles, b_tiles, z_tile, ready, free, z_ready, z_free, tiles, steps, M: gl.constexpr,
             N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    i = 0
    done = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([M, N], gl.float32, layout)
        for _step in range(0, steps):
            slot = i % STAGES
            mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
            acc = warpgroup_mma(
                a_tiles.index(slot), b_tiles.index(slot).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free.index(slot), count=1)
            i += 1
        mbarrier.wait(z_free, (done & 1) ^ 1)
        z_tile.store(acc.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(z_ready, count=1)
        done += 1


@gluon.jit
def finish(a, b, y, z_tile, y_tile, z_ready, z_free, tiles, M: gl.constexpr, N: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(z_ready, done & 1)
        z = z_tile.load(layout)
        mbarrier.arrive(z_free, count=1)
        wait_for_stores(0)
        y_tile.store((z.to(gl.float32) * 2).to(gl.bfloat16))
        fence_async_shared()
        copy_out(y, [tile * M, 0], y_tile)
        done += 1
    wait_for_stores(0)


@gluon.jit
def fetch(a, b, y, a_tiles, b_tiles, ready, free, tiles, steps, M: gl.constexpr, N: gl.constexpr,
          K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for step in range(0, steps):
            slot = i % STAGES
            mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (M + N) * K * 2)
            copy_in(a, [tile * M, step * K], ready.index(slot), a_tiles.index(slot))
            copy_in(b, [0, step * K], ready.index(slot), b_tiles.index(slot))
            i += 1


@gluon.jit
def product(a, b, y, tiles, steps, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    a_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, M, K], a.layout)
    b_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, K], b.layout)
    z_tile = gl.allocate_shared_memory(gl.bfloat16, [M, N], y.layout)
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [M, N], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    z_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    z_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(z_ready, count=1)
    mbarrier.init(z_free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    a_tiles,
                    b_tiles,
                    z_tile,
                    ready,
                    free,
                    z_ready,
                    z_free,
                    tiles,
                    steps,
                    M,
                    N,
                    STAGES,
                ),
            ),
            (finish, (a, b, y, z_tile, y_tile, z_ready, z_free, tiles, M, N)),
            (fetch, (a, b, y, a_tiles, b_tiles, ready, free, tiles, steps, M, N, K, STAGES)),
        ],
        [4, 1],
        [64, 24],
    )


def compile_it() -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    constants = {"M": 64, "N": 64, "K": 64, "STAGES": 2}
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    matrix = f"tensordesc<bf16[64, 64],{layout!r}>"
    types = {"a": matrix, "b": matrix, "y": matrix, "tiles": "i32", "steps": "i32"}
    types |= dict.fromkeys(constants, "constexpr")
    at = {(list(types).index(name),): value for name, value in constants.items()}
    source = GluonASTSource(product, types, at, {})
    options = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    import resources

    json.dump(resources._of_machine_code(compile_it().asm["cubin"]), sys.stdout)


if __name__ == "__main__":
    main()
