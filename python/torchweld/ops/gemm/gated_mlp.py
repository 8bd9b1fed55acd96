"""gated_mlp: a transformer's feed-forward block with a gate, such as SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.call import run_on
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.activation import gated_act
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import gemm
from torchweld.registry import ROWS, Cases, Composite, Numerics, activation, weight
from torchweld.registry.cost import count_for_gemms


@short()
def gated_mlp(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    activation: ActivationName = "silu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """linear(activation(linear(input, gate_weight)) * linear(input, up_weight), down_weight).

    It saves gate, up and the input of the last GEMM for the backward pass, but not the activated
    gate.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        gate_weight: [hidden_features, in_features].
        up_weight: [hidden_features, in_features].
        down_weight: [out_features, hidden_features].
        activation: "silu" (SwiGLU), "gelu" (GeGLU), "relu" (ReGLU) or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    return layers.run_recomputed(
        recompute, OP, input, gate_weight, up_weight, down_weight, activation, approximate
    )


def _fused(
    backend: str,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    if not checks.all_dense(x, gate_weight, up_weight, down_weight):
        _check(x, gate_weight, up_weight, down_weight, activation, approximate)
    gate, up = gemm.linear(x, gate_weight), gemm.linear(x, up_weight)
    hidden = run_on(gated_act.OP, backend, gate, up, activation, approximate)
    return gemm.linear(hidden, down_weight)


def _reference(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    factors = (gate_weight, up_weight, down_weight)
    if up_weight.shape != gate_weight.shape or not checks.all_dense(x, *factors):
        _check(x, *factors, activation, approximate)
    gate = activations.activate(OP, linear(x, gate_weight), activation, approximate)
    return linear(gate * linear(x, up_weight), down_weight)


def _check(
    x: Any, gate_weight: Any, up_weight: Any, down_weight: Any, activation: Any, approximate: Any
) -> None:
    layers.check(OP.name, x, gate_weight=gate_weight, bias=None)
    layers.check(OP.name, x, up_weight=up_weight, bias=None)
    if up_weight.shape != gate_weight.shape:
        accepted = f"the shape of gate_weight, {list(gate_weight.shape)}"
        actual = f"of shape {list(up_weight.shape)}"
        raise ArgumentError(OP.name, "up_weight", actual, accepted)
    hidden = layers.hidden_of(x, gate_weight)
    layers.check(OP.name, hidden, "gate_weight", down_weight=down_weight, bias=None)
    activations.check(OP.name, activation, approximate)


def _flops(x: torch.Tensor, *factors: torch.Tensor) -> tuple[int, int]:
    rows = x.shape[:-1].numel()
    return count_for_gemms(*(rows * factor.numel() for factor in factors[:3]))


def _terms(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str,
    approximate: str,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    known = activations.ACTIVATIONS[activation, approximate]
    x, *weights = (t.double().abs() for t in (x, gate_weight, up_weight, down_weight))
    grad = grad_y.double().abs()
    gate, up = linear(x, weights[0]), linear(x, weights[1])
    grad_hidden = grad @ weights[2]
    activated = known.value(gate)
    grad_gate, grad_up = grad_hidden * up * known.slope(gate), grad_hidden * activated
    return {
        "y": linear(activated * up, weights[2]),
        "grad_input": grad_gate @ weights[0] + grad_up @ weights[1],
        "grad_gate_weight": layers.outer(grad_gate, x),
        "grad_up_weight": layers.outer(grad_up, x),
        "grad_down_weight": layers.outer(grad, activated * up),
    }


def _arguments(leading: tuple[int, ...], width: int, features: int, *kind: str) -> tuple[Any, ...]:
    weights = (weight(features, width), weight(features, width), weight(width, features))
    return (activation(*leading, width), *weights, *kind)


_SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((2, 3), 5, 7),
    ((256,), 67, 127),
    ((3, 1), 8, 1021),
    ((0,), 8, 5),
)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [_arguments(*s, "silu", "none") for s in _SHAPES]
    return (*samples, *(_arguments(*_SHAPES[2], *kind) for kind in activations.KINDS))


_RESULTS = ("y", "grad_input", "grad_gate_weight", "grad_up_weight", "grad_down_weight")

OP = Composite(
    name="gated_mlp",
    forward="(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor down_weight, str"
    " activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor gate_weight, Tensor up_weight, Tensor"
    " down_weight, str activation, str approximate) -> (Tensor grad_input, Tensor grad_gate_weight,"
    " Tensor grad_up_weight, Tensor grad_down_weight)",
    reference=_reference,
    fused=_fused,
    check=_check,
    fake=lambda x, gate, up, down, *_: (x.new_empty((*x.shape[:-1], down.shape[0])),),
    sharding=ROWS,
    cases=Cases(
        sized=lambda leading, row: _arguments(leading, row[0], row[0], "silu", "none"),
        flops=_flops,
        samples=_samples(),
        benchmarks=tuple(_arguments((rows,), 768, 2048, "silu", "none") for rows in (64, 2048)),
        benchmarks_on_gpu=(_arguments((8192,), 4096, 14336, "silu", "none"),),
        tiny=_arguments((1,), 64, 64, "silu", "none"),
        # A chain of two GEMMs with three roundings to 16 bits between them.
        numerics=Numerics(
            fp32=dict.fromkeys(_RESULTS, 2.0),
            terms=_terms,
            rounding=dict.fromkeys(_RESULTS, 3.0),
        ),
    ),
    sources=activations.SOURCES,
    small=65536,
    eager_rounds=True,
)
