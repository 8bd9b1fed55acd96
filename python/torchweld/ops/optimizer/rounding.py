"""Stochastic rounding of float32 to one of the two nearest bfloat16, unbiased.

A value is rounded up with the probability (value - lower) / (upper - lower). The random bits depend
on the parameter, the step, and the element's place in the whole tensor. So steps are reproducible,
and every backend, replica and shard takes the same bits. They are torchweld.random's, with key = 0
and

    counter = (element >> 3 & LOW, element >> 35, step, 1 + the parameter's number)

The four words hold the bits of eight elements, 16 each, the low half of a word first. Dropout's
counters end in 0.

A parameter's rounding offset is a tensor of int64 on the CPU: the number of the parameter, the
number of its first element in the whole tensor, and the strides of the whole tensor.
"""

from __future__ import annotations

import torch

from torchweld.random import LOW, philox

_AT_ONCE = 8
_LARGEST, _INFINITY, _NAN = 0x7F7F0000, 0x7F800000, 0x7FC0


def round_at(value: torch.Tensor, offset: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Round a parameter's float32 values to bfloat16 with the bits of this step, from 1."""
    number, first, *strides = offset.tolist()
    # Elements of a row, the last dimension's, lie side by side.
    shape, strides = (value.shape, strides) if value.ndim else ((1,), [1])
    rows = torch.full((), first, device=value.device)
    for dim, (size, stride) in enumerate(zip(shape[:-1], strides[:-1], strict=True)):
        along = [-1] + [1] * (len(shape) - 2 - dim)
        rows = rows + (torch.arange(size, device=value.device) * stride).view(along)
    rows = rows.expand(shape[:-1]).reshape(-1, 1)
    return round_stochastically(value, random_bits(rows, shape[-1], number, step).view(value.shape))


def random_bits(rows: torch.Tensor, width: int, number: int, step: torch.Tensor) -> torch.Tensor:
    """16 bits for each of the `width` elements from each row's first on; `rows` is [rows, 1]."""
    device = rows.device
    group = rows // _AT_ONCE + torch.arange(width // _AT_ONCE + 2, device=device)
    last = torch.full((), number + 1, device=device)
    zero = torch.zeros_like(last)
    counter = (group & LOW, group >> 32, step.long() & LOW, last)
    words = torch.stack(philox(counter, (zero, zero)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1).int()
    return halves.gather(1, rows % _AT_ONCE + torch.arange(width, device=device))


def round_stochastically(value: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 with 16 random bits each.

    From the largest bfloat16 on, round to the nearest, so that randomness creates no infinity.
    """
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    half = (bits + torch.where(magnitude < _LARGEST, random, 0x8000)) >> 16
    half = torch.where(magnitude > _INFINITY, _NAN, half)
    return half.to(torch.int16).view(torch.bfloat16)
