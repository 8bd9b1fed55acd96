"""What tests and benchmarks try of an op: arguments, sizes worth measuring, bounds of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchweld.dispatch.autograd import as_tuple
from torchweld.registry import OPS

Arguments = tuple[Any, ...]
# A factor of every result, or of some results by name.
Factor = float | Mapping[str, float]
_DEFAULTS = {"fp32": 2.0, "rounding": 1.1, "eager": 1.1}

# By the name of the op. Each file of this folder adds its family's; others are derived.
CASES: dict[str, Cases] = {}

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
# Benchmark shapes, [rows, width]: small, a transformer's hidden layer, and wide.
MEASURED = ((64, 256), (2048, 3072), (1024, 11008))
MEASURED_ON_GPU = ((4096, 4096), (8192, 16384), (32768, 11008))


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


def vary_all(name: str, shapes: Iterable[tuple[int, ...]], **changes: Any) -> tuple[Arguments, ...]:
    """The op's arguments of these shapes."""
    return tuple(vary(name, shape[:-1], shape[-1:], **changes) for shape in shapes)


def derive(name: str) -> Cases:
    """Cases of an op of single elements or rows, whose results are sums of products."""
    return Cases(
        samples=vary_all(name, SHAPES),
        benchmarks=vary_all(name, MEASURED),
        benchmarks_on_gpu=vary_all(name, MEASURED_ON_GPU),
        tiny=vary(name, (1,), (64,)),
        terms=partial(derive_terms, name),
    )


def derive_terms(name: str, *inputs: Any, **grads: torch.Tensor) -> dict[str, torch.Tensor]:
    """The terms of an op whose results are sums of products: its reference of the magnitudes."""
    op, size = OPS[name], {}
    for argument, value in zip(op.forward_signature.arguments, inputs, strict=True):
        is_learnt = argument in op.differentiable and value is not None
        size[argument] = value.detach().double().abs().requires_grad_() if is_learnt else value
        if isinstance(value, float):
            size[argument] = abs(value)
    results = dict(zip(op.public, as_tuple(op.reference(*size.values())), strict=True))
    leaves = {n: size[n] for n in op.differentiable if size[n] is not None}
    wanted = [grads[f"grad_{n}"].double().abs() for n in results]
    made = torch.autograd.grad(list(results.values()), list(leaves.values()), wanted)
    terms = {f"grad_{n}": t for n, t in zip(leaves, made, strict=True)}
    return {n: t.detach() for n, t in (results | terms).items()}
