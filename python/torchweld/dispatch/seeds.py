"""Draws seeds of dropout from torch's default generators.

On a GPU a seed is computed on the host, from the generator's own seed and its offset: no tensor is
allocated there, and no kernel launched. Graphs, which draw at each replay, have their seeds in the
GPU's memory.
"""

from __future__ import annotations

import functools
import numbers
import threading

import torch

from torchweld import state
from torchweld.dispatch.library import LIBRARY
from torchweld.errors import ArgumentError

# torch's generators of GPUs have offsets, which are multiples of 4; a draw takes as many.
_TAKEN = 4
_HAS_OFFSETS = hasattr(torch.Generator, "get_offset") and hasattr(torch.Generator, "set_offset")
_BITS = 2**64 - 1
_drawing = threading.Lock()
_ONE = torch.ones(1, dtype=torch.int64, device="cpu")


def seed(device: torch.device | str = "cpu") -> torch.Tensor:
    """Draw a seed from torch's default generator of the device: one int64, from 0 to 2**63 - 1."""
    if state.is_compiling():
        return torch.ops.torchweld.seed(torch.empty(1, device=device))
    if state.is_transforming():  # vmap cannot draw in place
        # The same draw as random_(): all 64 bits except the first.
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device) & (2**63 - 1)
    return torch.empty(1, dtype=torch.int64, device=device).random_()


def as_seed(
    function: str, value: torch.Tensor | int, device: torch.device | str | None
) -> torch.Tensor:
    """A seed as the ops take it: one int64 on the device."""
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64 or value.numel() != 1:
            actual = f"a {value.dtype} tensor of shape {list(value.shape)}"
            raise ArgumentError(function, "seed", actual, "an int or one int64")
        is_here = value.is_cpu and (device is None or torch.device(device).type == "cpu")
        return value if value.shape == (1,) and is_here else value.to(device).reshape(1)
    number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not number or not 0 <= value < 2**63:
        raise ArgumentError(
            function, "seed", repr(value), "an int from 0 to 2**63 - 1, or a tensor"
        )
    return torch.full((1,), int(value), dtype=torch.int64, device=device)


def draw(x: torch.Tensor) -> torch.Tensor:
    """Draw the seed of a call on x: on x's device, or, if that is a GPU, on the host."""
    return _draw_on_host(x) if x.is_cuda and is_known_to_host(x) else seed(x.device)


def draw_again(x: torch.Tensor) -> torch.Tensor:
    """As `draw`, for a call like one that nothing recorded; a CUDA graph may capture any call."""
    is_captured = not x.is_cuda or state.is_capturing()
    return seed(x.device) if is_captured or not _HAS_OFFSETS else _draw_on_host(x)


def _draw_on_host(x: torch.Tensor) -> torch.Tensor:
    number = draw_number(torch.cuda.default_generators[x.get_device()])
    return _ONE.new_full((1,), number)


def is_known_to_host(x: torch.Tensor) -> bool:
    """Whether the seed of a call on x, which is on a GPU, is a number: nothing records the call."""
    return (
        _HAS_OFFSETS
        and not state.is_compiling()
        and not state.is_capturing()
        and not state.is_transforming()
        and not state.is_tracing()
        and not state.is_recording()
        and not state.is_faking()
        and not state.is_fake(x)
    )


def draw_number(generator: torch.Generator) -> int:
    """A number from a GPU's generator, which advances.

    It is odd and has 63 bits, since Triton would compile other kernels for multiples of 16 and for
    numbers of 32 bits.
    """
    with _drawing:
        offset = generator.get_offset()
        generator.set_offset(offset + _TAKEN)
    return _scramble(_find_key(generator.initial_seed()) ^ offset) >> 1 | 1 << 62 | 1


@functools.lru_cache(16)
def _find_key(seed: int) -> int:
    return _scramble((seed & _BITS) + 0x9E3779B97F4A7C15 & _BITS)


def _scramble(number: int) -> int:
    """A bijection of 64 bits in which each bit depends on all: the end of SplitMix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _BITS
    return number ^ number >> 31


def _seed(fresh: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device=fresh.device).random_()


def _fake_seed(fresh: torch.Tensor) -> torch.Tensor:
    return fresh.new_empty(1, dtype=torch.int64)


LIBRARY.impl("seed", _seed, "CompositeExplicitAutograd")
torch.library.register_fake("torchweld::seed", _fake_seed, lib=LIBRARY)
