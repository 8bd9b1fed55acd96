"""Activations, shapes and checks that bias_act and gated_act share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, relu, silu

from torchweld.errors import ArgumentError
from torchweld.registry import Op

SOURCES = {"cpu": ("csrc/cpu/act.cpp",), "triton": ("triton_kernels/act.py",)}


@dataclass(frozen=True)
class Activation:
    """Eager torch's function, and how an error of its argument affects its result.

    `size` is the sum of the magnitudes of the argument's terms. `value(size)` is the same sum for
    the result, and `slope(size)` for the derivative; docs/numerics.md derives them.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    value: Callable[[Any], Any] = lambda size: size
    slope: Callable[[Any], Any] = lambda size: 1 + size


def _quick_gelu(z: torch.Tensor) -> torch.Tensor:
    return z * torch.sigmoid(1.702 * z)


def _relu2(z: torch.Tensor) -> torch.Tensor:
    return relu(z).square()


# By (activation, approximate). A new activation takes a line here, a line in csrc/core/act.h, and
# its branches in triton_kernels/act.py.
ACTIVATIONS = {
    ("gelu", "none"): Activation(gelu),
    ("gelu", "tanh"): Activation(partial(gelu, approximate="tanh")),
    ("relu", "none"): Activation(relu),
    ("silu", "none"): Activation(silu),
    ("quick_gelu", "none"): Activation(_quick_gelu),
    ("relu2", "none"): Activation(_relu2, lambda size: size * size, lambda size: 2 * size),
    ("sigmoid", "none"): Activation(
        torch.sigmoid, lambda size: 1 + size / 4, lambda size: (1 + size) / 4
    ),
    ("tanh", "none"): Activation(torch.tanh),
    ("identity", "none"): Activation(lambda z: z, slope=torch.ones_like),
}
KINDS = tuple(ACTIVATIONS)

# Sizes of the contract's samples: one element, odd and prime widths, widths beyond a vector and a
# block, one to five dimensions, no rows, no width.
SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (3, 1),
    (5, 7),
    (2, 3, 31),
    (2, 1, 3, 1, 48),
    (33, 64),
    (17, 1000),
    (3, 1, 2, 4096),
    (2, 8193),
    (0, 64),
    (2, 0, 3, 7),
    (3, 0),
)
# Sizes on which every activation is tried.
SHAPES_OF_ALL = ((1,), (5, 7), (33, 64), (17, 1000))
# Benchmark shapes, [rows, width]: small, a transformer's hidden layer, and wide.
MEASURED = ((64, 256), (2048, 3072), (1024, 11008))
MEASURED_ON_GPU = ((4096, 4096), (8192, 16384), (32768, 11008))


def activate(op: Op, z: torch.Tensor, activation: str, approximate: str) -> torch.Tensor:
    """Eager torch's activation; z itself for "identity"."""
    if (activation, approximate) not in ACTIVATIONS:
        check(op.name, activation, approximate)
    return ACTIVATIONS[activation, approximate].function(z)


def check(function: str, activation: Any, approximate: Any) -> None:
    """Check for one of KINDS."""
    if (activation, approximate) in KINDS:
        return
    accepted = [form for name, form in KINDS if name == activation]
    if not accepted:
        names = " or ".join(dict.fromkeys(name for name, _ in KINDS))
        raise ArgumentError(function, "activation", repr(activation), names)
    actual = f"{approximate!r} with activation={activation!r}"
    raise ArgumentError(function, "approximate", actual, " or ".join(accepted))
