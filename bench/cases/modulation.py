"""Cases of adaptive norms and gated residuals."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from torchweld.bench.cases.declare import CASES, Cases, derive_terms, vary
from torchweld.ops.modulation import (
    ADAPTIVE_LAYER_NORM,
    ADAPTIVE_RMS_NORM,
    GATED_RESIDUAL,
    GATED_RESIDUAL_LAYER_NORM,
    GATED_RESIDUAL_RMS_NORM,
)
from torchweld.registry import OPS, Op, residual

# One element, odd and prime widths, widths beyond every internal limit, no rows, no width. Batches
# with few and many rows for a modulation, and more modulations than chunks.
SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (3, 1),
    (5, 7),
    (2, 3, 31),
    (2, 1, 3, 1, 48),
    (3, 33, 64),
    (70, 2, 40),
    (2, 50, 768),
    (3, 7, 1000),
    (2, 3, 4096),
    (2, 2, 8193),
    (1, 3, 32771),
    (0, 5, 64),
    (2, 0, 7),
    (2, 3, 0),
)
# Benchmark shapes, [batch, tokens, width]: small, DiT-XL, and the widths of Flux and Wan.
MEASURED = ((2, 32, 256), (4, 256, 1152), (2, 1024, 3072))
MEASURED_ON_GPU = ((128, 256, 1152), (8, 4096, 3072), (2, 16384, 5120))


def _terms(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    *_: Any,
    grad_y: Tensor,
    centered: bool,
    size: Tensor | None = None,
) -> dict[str, Tensor]:
    """For each result the sum of its terms' magnitudes; `size` has x's before cancellation."""
    x, grad_y = x.double(), grad_y.double().abs()
    size = x.abs() if size is None else size
    mean = x.mean(-1, keepdim=True) if centered else x.new_zeros(())
    rstd = (x - mean).square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    # The error of a mean scales with the size of its summands, even if they cancel.
    x_hat = (size + (size.mean(-1, keepdim=True) if centered else 0)) * rstd
    weight = 1 + scale.double().abs()
    g = grad_y * weight
    grad = g + (g * x_hat).mean(-1, keepdim=True) * x_hat
    if centered:
        grad = grad + g.mean(-1, keepdim=True)
    return {
        "y": x_hat * weight + (0.0 if shift is None else shift.double().abs()),
        "grad_input": rstd * grad,
        "grad_scale": (grad_y * x_hat).sum_to_size(scale.shape),
        "grad_shift": grad_y.sum_to_size(scale.shape),
    }


def _gated_terms(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    *modulations: Any,
    grad_z: Tensor,
    grad_y: Tensor,
    centered: bool,
) -> dict[str, Tensor]:
    gate, branch = gate.double(), branch.double()
    z, size = x.double() + gate * branch, x.double().abs() + (gate * branch).abs()
    terms = _terms(z, *modulations, grad_y=grad_y, centered=centered, size=size)
    grad = terms["grad_input"] + grad_z.double().abs()
    return terms | {
        "z": size,
        "grad_input": grad,
        "grad_gate": (grad * branch.abs()).sum_to_size(gate.shape),
        "grad_branch": grad * gate.abs(),
    }


def _modulations_of(op: Op) -> tuple[str, ...]:
    arguments = op.forward_signature.arguments
    return tuple(name for name in ("gate", "scale", "shift") if name in arguments)


def _plain(norm: Op, x: Tensor, scale: Tensor, shift: Tensor | None, eps: Any) -> Tensor:
    """What a model calls, with autocast's rule for the norm."""
    y = norm.reference(x, x.shape[-1:], *[None] * norm.forward.count("Tensor?"), eps) * (1 + scale)
    return y if shift is None else y + shift


def _declare(op: Op, **more: Any) -> None:
    def given(shape: tuple[int, ...], **changes: Any) -> tuple[Any, ...]:
        return vary(op.name, shape[:-1], shape[-1:], **changes)

    def modulated(shape: tuple[int, ...], *its: int) -> tuple[Any, ...]:
        return given(shape, **dict.fromkeys(_modulations_of(op), residual(*its)))

    samples = [given(shape) for shape in SHAPES]
    # A modulation for each token, for each frame, and for all.
    tokens, frames = (2, 37, 96), (2, 3, 11, 80)
    samples += [modulated(tokens, *tokens), modulated((2, 3, 8193), 2, 3, 8193)]
    samples += [modulated(frames, 2, 3, 1, 80), modulated(tokens, 1, 1, 96)]
    if "shift" in _modulations_of(op):
        samples.append(given((2, 33, 64), shift=None))
    if "eps" in op.forward_signature.arguments and op.name.endswith("rms_norm"):
        samples.append(given((2, 33, 64), eps=None))
    CASES[op.name] = Cases(
        samples=tuple(samples),
        benchmarks=tuple(map(given, MEASURED)),
        benchmarks_on_gpu=tuple(map(given, MEASURED_ON_GPU)),
        tiny=given((1, 64)),
        **more,
    )


_declare(GATED_RESIDUAL, terms=functools.partial(derive_terms, GATED_RESIDUAL.name))
for _op in (ADAPTIVE_LAYER_NORM, ADAPTIVE_RMS_NORM):
    _declare(
        _op,
        terms=functools.partial(_terms, centered=_op is ADAPTIVE_LAYER_NORM),
        plain=functools.partial(_plain, OPS[_op.name.removeprefix("adaptive_")]),
    )
for _op in (GATED_RESIDUAL_LAYER_NORM, GATED_RESIDUAL_RMS_NORM):
    _declare(
        _op,
        terms=functools.partial(_gated_terms, centered=_op is GATED_RESIDUAL_LAYER_NORM),
        fp32=dict.fromkeys(
            ("y", "grad_input", "grad_gate", "grad_branch", "grad_scale", "grad_shift"), 2.5
        ),
        rounding={"grad_scale": 2.0, "grad_gate": 2.0},  # z was saved in 16 bits
    )
