"""What bias_act and gated_act have in common beside their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, relu, silu

from torchweld.errors import ArgumentError
from torchweld.registry import Op

SOURCES = {"cpu": ("csrc/cpu/act.cpp",), "triton": ("triton_kernels/act.py",)}

# Every (activation, approximate) there is.
KINDS = (("gelu", "none"), ("gelu", "tanh"), ("relu", "none"), ("silu", "none"))

# Sizes of the contract's samples: one element, odd and prime widths, widths past a vector's and a
# block's, one to five dimensions, no rows, no width.
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
# Of these, those that every activation is tried on.
SHAPES_OF_ALL = ((1,), (5, 7), (33, 64), (17, 1000))
# [rows, width] that are measured: small, a transformer's hidden layer, and wide.
MEASURED = ((64, 256), (2048, 3072), (1024, 11008))
MEASURED_ON_GPU = ((4096, 4096), (8192, 16384), (32768, 11008))


def activate(op: Op, z: torch.Tensor, activation: str, approximate: str) -> torch.Tensor:
    """Eager torch's activation."""
    if activation == "gelu" and approximate in ("none", "tanh"):
        return gelu(z, approximate=approximate)
    if activation in _PLAIN and approximate == "none":
        return _PLAIN[activation](z)
    raise error(op, activation, approximate)


_PLAIN = {"relu": relu, "silu": silu}


def check(op: Op, activation: Any, approximate: Any) -> None:
    """One of KINDS."""
    if (activation, approximate) not in KINDS:
        raise error(op, activation, approximate)


def error(op: Op, activation: Any, approximate: Any) -> ArgumentError:
    """What is wrong with a kind that is not one of KINDS."""
    names = [name for name, _ in KINDS]
    if activation not in names:
        accepted = " or ".join(dict.fromkeys(names))
        return ArgumentError(op.name, "activation", repr(activation), accepted)
    accepted = " or ".join(kind for name, kind in KINDS if name == activation)
    came = f"{approximate!r} with activation={activation!r}"
    return ArgumentError(op.name, "approximate", came, accepted)
