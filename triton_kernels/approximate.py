"""Functions that take one or two instructions on a GPU, with errors of one or two roundings.

`tl.exp` and `1 / x` take three to six: they check for numbers below 2^-126, which are 0 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """1 / x; 0 for x beyond 2^126."""
    if _INTERPRETED:  # which has no assembler
        return 1 / x
    else:
        code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [x], tl.float32, is_pure=True, pack=1)
