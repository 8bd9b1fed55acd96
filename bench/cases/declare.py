"""What tests and benchmarks try of an op: arguments, sizes worth measuring, bounds of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.registry import OPS

Arguments = tuple[Any, ...]
# A factor of every result, or of some results by name.
Factor = float | Mapping[str, float]
_DEFAULTS = {"fp32": 2.0, "rounding": 1.1, "eager": 1.1}

# By the name of the op. Each file of this folder adds its family's.
CASES: dict[str, Cases] = {}


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Arguments of an op's forward, and how exact it is, derived in docs/numerics.md.

    A 16-bit result may be off by `rounding` times the error of rounding the exact result, and by
    `eager` times eager's error. A float32 result may be off by as many times eager's error, or by
    `fp32` unit roundoffs of the sum of its terms' magnitudes; `eager` applies to 16-bit inputs
    only. `terms` takes the forward's arguments and `grad_y`, and returns these sums by name.
    """

    samples: tuple[Arguments, ...]
    # Worth measuring: on the CPU, on a GPU, and so small that only the call costs time.
    benchmarks: tuple[Arguments, ...]
    benchmarks_on_gpu: tuple[Arguments, ...]
    tiny: Arguments
    terms: Callable[..., dict[str, torch.Tensor]]
    fp32: Factor = _DEFAULTS["fp32"]
    rounding: Factor = _DEFAULTS["rounding"]
    eager: Factor = _DEFAULTS["eager"]
    # Plain torch for the benchmark, if the reference is slower. With dropout it is, since it
    # reproduces our masks and torch's own dropout does not.
    plain: Callable[..., Any] | None = None
    # Whether the reference's memory grows with the square of a size: benchmarks judge a sample.
    has_dense_reference: bool = False

    def factor(self, kind: str, name: str) -> float:
        """The factor of a result: `kind` is "fp32", "rounding" or "eager"."""
        value: Factor = getattr(self, kind)
        return value.get(name, _DEFAULTS[kind]) if isinstance(value, Mapping) else value


def vary(name: str, leading: tuple[int, ...], row: tuple[int, ...], **changes: Any) -> Arguments:
    """The op's arguments of this size, with changes by name. Without dropout there is no seed."""
    op = OPS[name]
    made = dict(zip(op.forward_signature.arguments, op.sized(leading, row), strict=True)) | changes
    if not made.get("p", True):
        made["seed"] = None
    return tuple(made.values())
