"""gated_mlp: a transformer's feed-forward block with a gate, such as SwiGLU.

    gated_mlp(x) = (act(x gate^T) * x up^T) down^T

Read on in: python/torchweld/ops/gemm/gated_epilogue.py, python/torchweld/ops/gemm/act_linear.py,
csrc/cpu/act.cpp, triton_kernels/linear_act.py, triton_kernels/act.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.warm.cache import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gated_epilogue, gemm
from torchweld.registry import ROWS, Composite, weight
from torchweld.registry import activation as activation_spec
from torchweld.registry.cost import count_for_gemms


@short()
def gated_mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: ActivationName = "silu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> Tensor:
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
    return layers.decide_recomputed(
        recompute, OP, input, gate_weight, up_weight, down_weight, activation, approximate
    )


def _plan(backend: str, x: Tensor, *rest: Any) -> Callable[..., Tensor]:
    gate_weight, up_weight, down_weight, *kind = rest
    if not checks.all_dense(x, gate_weight, up_weight, down_weight):
        _check(x, *rest)
    first = gated_epilogue.plan(backend, x, gate_weight, up_weight, *kind)
    return partial(_run, first, gemm.find_linear(x, down_weight, gate_weight, up_weight))


def _run(
    first: Callable[..., Tensor], second: Callable[..., Tensor], x: Tensor, *rest: Any
) -> Tensor:
    gate_weight, up_weight, down_weight, *_ = rest
    return second(first(x, gate_weight, up_weight), down_weight)


def _reference(x: Tensor, *rest: Any) -> Tensor:
    gate_weight, up_weight, down_weight, *kind = rest
    if up_weight.shape != gate_weight.shape or not checks.all_dense(x, *rest[:3]):
        _check(x, *rest)
    gate = activations.activate(OP, linear(x, gate_weight), *kind)
    return linear(gate * linear(x, up_weight), down_weight)


def _check(x: Any, gate_weight: Any, up_weight: Any, down_weight: Any, *kind: Any) -> None:
    layers.check(OP.name, x, gate_weight=gate_weight, bias=None)
    layers.check(OP.name, x, up_weight=up_weight, bias=None)
    checks.shaped(OP.name, "up_weight", up_weight, gate_weight.shape, "the shape of gate_weight")
    hidden = layers.hidden_of(x, gate_weight)
    layers.check(OP.name, hidden, "gate_weight", down_weight=down_weight, bias=None)
    activations.check(OP.name, *kind)


def _flops(x: Tensor, *factors: Tensor) -> tuple[int, int]:
    rows = x.shape[:-1].numel()
    return count_for_gemms(*(rows * factor.numel() for factor in factors[:3]))


def _size(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    return (activation_spec(*leading, *row), *[weight(*row, *row)] * 3, "silu", "none")


OP = Composite(
    name="gated_mlp",
    forward="(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor down_weight, str"
    " activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor gate_weight, Tensor up_weight, Tensor"
    " down_weight, str activation, str approximate) -> (Tensor grad_input, Tensor grad_gate_weight,"
    " Tensor grad_up_weight, Tensor grad_down_weight)",
    reference=_reference,
    plan=_plan,
    check=_check,
    fake=lambda x, gate, up, down, *_: (x.new_empty((*x.shape[:-1], down.shape[0])),),
    sharding=ROWS,
    sized=_size,
    flops=_flops,
    sources=epilogue.SOURCES,
    detail=gated_epilogue.explain,
    made_of="torch's GEMMs; after the first two {}. On Hopper one kernel replaces the first GEMMs"
    " and that pass where it fills the GPU",
    eager_rounds=True,
)
