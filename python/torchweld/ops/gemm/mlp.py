"""mlp: two linear layers with an activation between them, a transformer's feed-forward block."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.dispatch.way import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gemm
from torchweld.ops.gemm.act_linear import act_linear
from torchweld.registry import ROWS, Cases, Composite, Numerics, activation, weight
from torchweld.registry.cost import count_for_gemms


@short()
def mlp(
    input: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """linear(activation(linear(input, up_weight, up_bias)), down_weight, down_bias).

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        up_weight: [hidden_features, in_features].
        up_bias: [hidden_features].
        down_weight: [out_features, hidden_features].
        down_bias: [out_features].
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass, which on the CPU
            then holds two tensors of the hidden layer's size at a time, not three.

    Returns:
        A tensor [*, out_features].
    """
    return layers.run_recomputed(
        recompute,
        OP,
        input,
        up_weight,
        up_bias,
        down_weight,
        down_bias,
        activation,
        approximate,
        recompute,
    )


def _fused(
    backend: str,
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    recompute: bool,
) -> torch.Tensor:
    if not _fits(x, up_weight, up_bias, down_weight, down_bias):
        _check(x, up_weight, up_bias, down_weight, down_bias, activation, approximate, recompute)
    first = (backend, x, up_weight, up_bias, activation, approximate)
    if recompute and backend == "cpu" and activation != "identity":
        return _lean(*first, down_weight, down_bias)
    return gemm.linear(epilogue.linear_and_act(*first), down_weight, down_bias)


def _lean(
    backend: str,
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The forward recomputed in a backward pass; it does not save the activation."""
    z, bias = layers.run_gemm(backend, x, up_weight, up_bias, activation)
    plain = type(down_weight) in (torch.Tensor, torch.nn.Parameter)
    if gemm.wants_gradient(z, bias) and layers.may_overwrite(z) and plain:
        return act_linear(z, bias, down_weight, down_bias, activation, approximate)
    return gemm.linear(
        layers.act(backend, z, bias, activation, approximate), down_weight, down_bias
    )


def _explain(
    backend: str,
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    recompute: bool,
) -> str:
    return epilogue.explain(backend, x, up_weight, up_bias, activation, approximate)


def _fits(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> bool:
    return layers.fits(x, up_weight, up_bias) and layers.fits(x, down_weight, down_bias)


def _reference(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    recompute: bool,
) -> torch.Tensor:
    if not _fits(x, up_weight, up_bias, down_weight, down_bias):
        _check(x, up_weight, up_bias, down_weight, down_bias, activation, approximate, recompute)
    return linear(
        activations.activate(OP, linear(x, up_weight, up_bias), activation, approximate),
        down_weight,
        down_bias,
    )


def _check(
    x: Any,
    up_weight: Any,
    up_bias: Any,
    down_weight: Any,
    down_bias: Any,
    activation: Any,
    approximate: Any,
    recompute: Any,
) -> None:
    layers.check(OP.name, x, up_weight=up_weight, up_bias=up_bias)
    layers.check(
        OP.name,
        layers.hidden_of(x, up_weight),
        "up_weight",
        down_weight=down_weight,
        down_bias=down_bias,
    )
    activations.check(OP.name, activation, approximate)


def _flops(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    *_: Any,
) -> tuple[int, int]:
    rows = x.shape[:-1].numel()
    return count_for_gemms(rows * up_weight.numel(), rows * down_weight.numel())


def _terms(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    recompute: bool,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Terms, counting every product of the four GEMMs."""
    known = activations.ACTIVATIONS[activation, approximate]
    x, up_weight, down_weight, grad = (
        t.double().abs() for t in (x, up_weight, down_weight, grad_y)
    )
    z = linear(x, up_weight, None if up_bias is None else up_bias.double().abs())
    grad_z, hidden = (grad @ down_weight) * known.slope(z), known.value(z)
    return {
        "y": linear(hidden, down_weight, None if down_bias is None else down_bias.double().abs()),
        "grad_input": grad_z @ up_weight,
        "grad_up_weight": layers.outer(grad_z, x),
        "grad_up_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_down_weight": layers.outer(grad, hidden),
        "grad_down_bias": grad.sum_to_size(grad.shape[-1:]),
    }


def arguments(
    leading: tuple[int, ...],
    width: int,
    features: int,
    out: int,
    *kind: str,
    recompute: bool = False,
) -> tuple[Any, ...]:
    """The arguments of a sample."""
    first = layers.arguments(leading, width, features)
    return (*first, weight(out, features), activation(out), *kind, recompute)


# Leading sizes, in_features, hidden_features, out_features.
_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((), 1, 1, 1),
    ((2, 3), 5, 7, 3),
    ((256,), 67, 127, 61),
    ((16,), 31, 10007, 17),
    ((64,), 31, 67, 10007),
    ((0,), 8, 5, 3),
)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [arguments(*s, "gelu", "none") for s in _SHAPES]
    samples += [arguments(*_SHAPES[2], *kind) for kind in activations.KINDS[1:]]
    samples += [arguments(*s, "gelu", "none", recompute=True) for s in _SHAPES[1:3]]
    x, up_weight, _, down_weight, *_ = arguments(*_SHAPES[1])
    return (
        *samples,
        *((x, up_weight, None, down_weight, None, "gelu", "tanh", lean) for lean in (False, True)),
    )


_RESULTS = (
    "y",
    "grad_input",
    "grad_up_weight",
    "grad_up_bias",
    "grad_down_weight",
    "grad_down_bias",
)

OP = Composite(
    name="mlp",
    forward="(Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight,"
    " Tensor? down_bias, str activation, str approximate, bool recompute) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight,"
    " Tensor? down_bias, str activation, str approximate, bool recompute) -> (Tensor grad_input,"
    " Tensor grad_up_weight, Tensor grad_up_bias, Tensor grad_down_weight, Tensor grad_down_bias)",
    reference=_reference,
    fused=_fused,
    check=_check,
    fake=lambda x, up_weight, up_bias, down_weight, *_: (
        x.new_empty((*x.shape[:-1], down_weight.shape[0])),
    ),
    sharding=ROWS,
    cases=Cases(
        sized=lambda leading, row: arguments(leading, *(row[0], row[0], row[0]), "gelu", "none"),
        flops=_flops,
        samples=_samples(),
        benchmarks=tuple(arguments((rows,), 768, 3072, 768, "gelu", "none") for rows in (64, 2048)),
        benchmarks_on_gpu=tuple(
            arguments((8192,), width, 4 * width, width, "gelu", kind)
            for width in (1024, 4096)
            for kind in ("none", "tanh")
        ),
        tiny=arguments((1,), 64, 64, 64, "gelu", "none"),
        # A chain of two GEMMs with two roundings to 16 bits between them.
        numerics=Numerics(
            fp32=dict.fromkeys(_RESULTS, 2.0),
            terms=_terms,
            rounding=dict.fromkeys(_RESULTS, 3.0),
        ),
    ),
    sources=epilogue.SOURCES,
    detail=_explain,
    made_of=epilogue.MADE_OF,
    small=65536,
)
