"""The random stream of dropout: what is dropped is a function of a seed and of the element's place.

The generator is Philox 4x32-10 in counter mode. The leading dimensions of the whole tensor make up
an element's row number. The element at (row, column) takes number `column & 7` of the eight that
the four words of

    philox(counter=(column >> 3, row & LOW, row >> 32, 0), key=(seed & LOW, seed >> 32))

have in 16 bits each, a word's low half first; LOW = 2**32 - 1. It is dropped if that number is
below round(p * 2**16), and kept elements are scaled by what this leaves. So every backend, every
shard of a tensor and every recomputation drops the same elements, and no mask is stored.

The seed of a call is drawn from torch's default generator of the device, so `torch.manual_seed`
governs it. On a GPU it is computed on the host, from the generator's own seed and its offset, which
advances as by a draw on the GPU; only graphs have their seeds in the GPU's memory. Passing a seed
with `seed=` repeats what it dropped. Processes that share a tensor must share the seed: seed their
generators alike, or pass it.

Stochastic rounding in optimizers uses other counters, which end in a parameter's number, from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchweld.checks import probability
from torchweld.dispatch.seeds import as_seed, draw, seed
from torchweld.errors import ArgumentError

__all__ = ["Shard", "make_mask", "seed"]  # the rest serves the ops

LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Shard(NamedTuple):
    """The place of a shard in the whole tensor.

    `sizes` are the whole tensor's, and `offsets` say where the shard begins, per dimension.
    """

    sizes: Sequence[int]
    offsets: Sequence[int]


def philox(
    counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Philox 4x32-10 on int64 tensors of 32-bit words: four of the counter, two of the key."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        # Products wrap around at 64 bits, which keeps all of their bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & LOW) ^ c1 ^ key0
        c2 = ((product0 >> 32) & LOW) ^ c3 ^ key1
        c1, c3 = product1 & LOW, product0 & LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & LOW, (key1 + _KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def make_mask(
    shape: Sequence[int],
    p: float,
    seed: torch.Tensor | int,
    *,
    shard: Shard | None = None,
    trailing: int = 1,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Make the mask of dropout with this seed: True where an element is kept.

    Args:
        shape: of the tensor.
        p: the probability of being dropped.
        seed: an int, or one int64 as drawn by `seed`.
        shard: where the tensor lies in the whole tensor; None: it is the whole.
        trailing: how many of the last dimensions are columns; for norms, those they normalise.
        device: where to compute the mask; None: on the seed's device.
    """
    seed = as_seed("make_mask", seed, device)
    whole, offset = split_shard(shard)
    numbers = _numbers(shape, trailing, seed, whole or shape, offset or [0] * len(shape))
    return (numbers >= find_threshold(p)).reshape(shape)


def find_threshold(p: float) -> int:
    """How many of 2**16 numbers drop an element: all of them only if p is 1."""
    return 2**16 if p == 1 else min(round(p * 2**16), 2**16 - 1)


def find_scale(p: float) -> float:
    """The factor of kept elements, with which dropout keeps the mean."""
    return 0.0 if p == 1 else 2**16 / (2**16 - find_threshold(p))


def _numbers(
    shape: Sequence[int],
    trailing: int,
    seed: torch.Tensor,
    whole: Sequence[int],
    offset: Sequence[int],
) -> torch.Tensor:
    """The random 16 bits of every element: [rows..., columns]."""
    leading, width = shape[: len(shape) - trailing], math.prod(shape[len(shape) - trailing :])
    row = torch.zeros((), dtype=torch.int64, device=seed.device)
    stride = 1
    for dim in reversed(range(len(leading))):
        coordinate = torch.arange(leading[dim], device=seed.device) + offset[dim]
        row = row + (coordinate * stride).view([-1] + [1] * (len(leading) - 1 - dim))
        stride = stride * whole[dim]
    first = offset[-1]
    skew = first % 8
    group = torch.arange((width + skew + 7) // 8, device=seed.device) + first // 8
    row = row.expand(leading).unsqueeze(-1)
    zero = torch.zeros_like(row)
    counter = (group, row & LOW, (row >> 32) & LOW, zero)
    words = torch.stack(philox(counter, (seed & LOW, (seed >> 32) & LOW)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.flatten(-3)[..., skew : skew + width]


# --- The arguments of ops with dropout ---------------------------------------------------------


def draw_seed(
    function: str,
    x_name: str,
    x: Any,
    p: float,
    training: bool,
    seed_: torch.Tensor | int | None,
    p_name: str = "p",
) -> tuple[float, torch.Tensor | None]:
    """The p and seed for an op; 0 and None, without drawing one, if nothing is dropped."""
    probability(function, p, p_name)
    if not training or p == 0:
        return 0.0, None
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(function, x_name, f"a {type(x).__name__}", "a tensor")
    return float(p), draw(x) if seed_ is None else as_seed(function, seed_, x.device)


def split_shard(shard: Shard | None) -> tuple[list[int], list[int]] | tuple[None, None]:
    """A shard as an op takes it: sizes of the whole and offsets; None if it is the whole.

    AOTInductor cannot pass empty lists, hence None.
    """
    return (None, None) if shard is None else (list(shard.sizes), list(shard.offsets))


def drop(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    trailing: int = 1,
) -> torch.Tensor:
    """Dropout in eager torch: 0 for a dropped element, else x times the scale."""
    if seed is None:
        return x
    shard = Shard(whole, offset) if whole and offset else None
    mask = make_mask(x.shape, p, seed, shard=shard, trailing=trailing, device=x.device)
    return x * mask * find_scale(p)
