"""linear_act and linear_gelu: a linear layer and its activation."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.dispatch.way import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue
from torchweld.registry import ROWS, Cases, Composite, Numerics
from torchweld.registry.cost import count_for_gemms


@short()
def linear_act(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """activation(linear(input, weight, bias)); one pass computes the activation's gradients.

    It saves input and the sum before the activation for the backward pass.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    return layers.run_recomputed(recompute, OP, input, weight, bias, activation, approximate)


@short()
def linear_gelu(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: Approximation = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """gelu(linear(input, weight, bias)): linear_act with torch's defaults for gelu.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        approximate: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    return layers.run_recomputed(recompute, OP, input, weight, bias, "gelu", approximate)


def _fused(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    if not layers.fits(x, weight, bias):
        _check_all(x, weight, bias, activation, approximate)
    return epilogue.linear_and_act(backend, x, weight, bias, activation, approximate)


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    if not layers.fits(x, weight, bias):
        _check_all(x, weight, bias, activation, approximate)
    return activations.activate(OP, linear(x, weight, bias), activation, approximate)


def _check_all(x: Any, weight: Any, bias: Any, activation: Any, approximate: Any) -> None:
    layers.check(OP.name, x, weight=weight, bias=bias)
    activations.check(OP.name, activation, approximate)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> tuple[torch.Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),)


def _terms(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """bias_act's terms, counting every product of the GEMMs as a term."""
    known = activations.ACTIVATIONS[activation, approximate]
    x, weight, grad = x.double().abs(), weight.double().abs(), grad_y.double().abs()
    z = linear(x, weight, None if bias is None else bias.double().abs())
    grad_z = grad * known.slope(z)
    return {
        "y": known.value(z),
        "grad_input": grad_z @ weight,
        "grad_weight": layers.outer(grad_z, x),
        "grad_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
    }


# Leading sizes, in_features, out_features: one element, odd and prime sizes, one to five
# dimensions, no rows, no features on either side, and enough features for pooled errors.
_SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((3,), 5, 7),
    ((2, 3), 31, 13),
    ((2, 1, 3), 8, 24),
    ((2, 1, 3, 1), 17, 19),
    ((256,), 67, 127),
    ((2,), 7, 8193),
    ((3,), 5, 4096),
    ((0,), 8, 5),
    ((2, 0, 3), 8, 5),
    ((3,), 0, 4),
    ((3,), 4, 0),
)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [(*layers.arguments(*shape), "gelu", "none") for shape in _SHAPES]
    samples += [
        (*layers.arguments(*shape), *kind)
        for shape in _SHAPES[1:6]
        for kind in activations.KINDS[1:]
    ]
    without = [
        (*layers.arguments(*shape)[:2], None, *kind)
        for shape in _SHAPES[1:3]
        for kind in activations.KINDS
    ]
    return (*samples, *without)


_RESULTS = ("y", "grad_input", "grad_weight", "grad_bias")

OP = Composite(
    name="linear_act",
    forward="(Tensor input, Tensor weight, Tensor? bias, str activation, str approximate)"
    " -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, str activation,"
    " str approximate) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    reference=_reference,
    fused=_fused,
    check=_check_all,
    fake=_fake,
    sharding=ROWS,
    cases=Cases(
        sized=lambda leading, row: (*layers.arguments(leading, *row, *row), "gelu", "none"),
        flops=lambda x, weight, *_: count_for_gemms(x.numel() * weight.shape[0]),
        samples=_samples(),
        benchmarks=tuple(
            (*layers.arguments((rows,), *features), "gelu", "none")
            for rows, *features in ((64, 768, 3072), (2048, 768, 3072), (2048, 4096, 11008))
        ),
        benchmarks_on_gpu=tuple(
            (*layers.arguments((8192,), *features), "gelu", kind)
            for features in ((1024, 4096), (4096, 16384))
            for kind in ("none", "tanh")
        ),
        tiny=(*layers.arguments((1,), 64, 64), "gelu", "none"),
        # A 16-bit z, or its gradient, is rounded before the result is.
        numerics=Numerics(
            fp32=dict.fromkeys(_RESULTS, 2.0), terms=_terms, rounding=dict.fromkeys(_RESULTS, 2.0)
        ),
    ),
    sources=epilogue.SOURCES,
    detail=epilogue.explain,
    made_of=epilogue.MADE_OF,
    small=65536,
)
