"""The positions of the rows of a shard, or of a broadcast tensor, in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks it up in the module of a kernel's parts

# The factors and divisors of `place`. Triton specialises on a value of 1, which saves a division,
# but not on alignment, since they are not addresses.
NUMBERING = ["size1", "size2", "stride0", "stride1", "stride2"]


@triton.jit
def place(row, first, size1, size2, stride0, stride1, stride2):
    """The place of rows with three leading dimensions: the sizes of the last two, all strides."""
    above1 = row // size2
    above0 = above1 // size1
    at = first + above0 * stride0 + (above1 - above0 * size1) * stride1
    return at + (row - above1 * size2) * stride2


def row_map(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Sizes and strides for `place`, or None if merging leaves more than three dimensions."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 3:
        return None
    dims += [(1, 0)] * (3 - len(dims))  # last, where `place` would have to divide
    return (dims[1][0], dims[2][0], dims[0][1], dims[1][1], dims[2][1])
