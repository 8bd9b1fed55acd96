"""The random stream of dropout in Triton, equal to that of torchweld.random in every element.

Triton's own `tl.philox` is the same Philox 4x32-10. One call makes the numbers of eight columns. It
is therefore called for every eighth column, and the numbers are put in column order.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .rows import place, row_map

# The sizes of the whole and the offset of a part in it, or nothing if the tensor is the whole.
Sizes = Sequence[int] | None
_HOST = torch.device("cpu")


@triton.jit
def factors(seed_ptr, number, first, threshold, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK]: 0 if an element is dropped, else `scale`.

    The columns are BLOCK from `first` on, a multiple of eight, in the whole tensor's rows `number`,
    which are int64. `threshold` has 16 bits.
    """
    return factors_of_groups(
        seed_ptr, number, first // 8 + tl.arange(0, BLOCK // 8), threshold, scale
    )


@triton.jit
def factors_of_groups(seed_ptr, number, group, threshold, scale):
    """`factors` of eight columns for each group, from column 8 * group on."""
    ROWS: tl.constexpr = number.shape[0]
    BLOCK: tl.constexpr = 8 * group.shape[0]
    group = group.to(tl.uint32)[None, :]
    low = number.to(tl.uint32)[:, None]
    high = (number >> 32).to(tl.uint32)[:, None]
    zero = tl.zeros([ROWS, BLOCK // 8], tl.uint32)
    # A seed that the host knows is a number; the seed of a captured graph is in memory.
    seed = tl.load(seed_ptr) if seed_ptr.dtype.is_ptr() else seed_ptr.to(tl.int64)
    word0, word1, word2, word3 = tl.philox(seed, zero + group, zero + low, zero + high, zero)
    # Both halves of a word are compared in its upper half.
    limit = threshold.to(tl.uint32) << 16
    low = tl.join(
        tl.join(word0 << 16 >= limit, word2 << 16 >= limit),
        tl.join(word1 << 16 >= limit, word3 << 16 >= limit),
    )
    even = tl.join(word0 >= limit, word2 >= limit)
    high = tl.join(even, tl.join(word1 >= limit, word3 >= limit))
    kept = tl.reshape(tl.join(low, high), [ROWS, BLOCK])
    return tl.where(kept, tl.cast(scale, tl.float32), 0.0)


@triton.jit
def dropped(x, row, first, dropout):
    """Apply dropout to x, [ROWS, BLOCK], whose rows are numbered from the part's first.

    Columns are as in `factors`. `dropout` is the result of `dropout_arguments`, with the rows'
    numbers in a tuple of their own. Without a seed nothing is dropped.
    """
    seed_ptr, threshold, scale, numbers = dropout
    if seed_ptr is None:
        return x
    else:
        number = place(row, *numbers)
        return x * factors(seed_ptr, number, first, threshold, scale, x.shape[0], x.shape[1])


def check_dropout(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sizes,
    offset: Sizes,
) -> torch.Tensor | int | None:
    """The seed for `dropout_arguments`; refuses what the native bindings refuse too."""
    if not 0 <= p <= 1:
        raise ValueError("p is not between 0 and 1")
    if p and (
        seed is None
        or seed.dtype != torch.int64
        or seed.numel() != 1
        or seed.device not in (x.device, _HOST)
    ):
        raise ValueError("seed is not one int64 on the device of x or on the CPU")
    if (whole or offset) and not (
        whole
        and offset
        and len(whole) == len(offset) == x.dim()
        and all(o >= 0 and o + n <= w for o, n, w in zip(offset, x.shape, whole, strict=True))
    ):
        raise ValueError("shard: x does not fit into the whole")
    return seed if seed is None or is_in_memory(seed, x) else int(seed.item())


def is_in_memory(seed: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether x's device can read the seed. Tests replace this function."""
    return seed.device == x.device


def dropout_arguments(
    p: float,
    seed: torch.Tensor | int | None,
    shape: Sequence[int],
    whole: Sizes,
    offset: Sizes,
) -> tuple[Any, ...]:
    """Seed, threshold, scale; the first row's number and, for `place`, the other rows' numbers.

    For a tensor whose last dimension is the columns and is not sharded.
    """
    threshold = min(round(p * 2**16), 2**16 - 1)
    sizes = whole or shape
    strides = [math.prod(sizes[i + 1 : -1]) for i in range(len(shape) - 1)]
    rows = row_map(shape[:-1], strides)
    if rows is None:
        raise ValueError("shard: a part of the whole in more than three leading dimensions")
    first = sum(map(math.prod, zip(offset or (), strides, strict=False)))
    scale = 0.0 if p == 1 else 2**16 / (2**16 - threshold)
    return (seed, threshold, scale, first, *rows)
