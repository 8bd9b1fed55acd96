"""mlp: two linear layers with an activation between them, a transformer's feed-forward block.

    mlp(x) = act(x up^T + up_bias) down^T + down_bias

Read on in: python/torchweld/ops/gemm/linear_act.py, python/torchweld/ops/gemm/act_linear.py,
csrc/cpu/act.cpp, triton_kernels/linear_act.py, triton_kernels/act.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.dispatch.warm.cache import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gemm
from torchweld.ops.gemm.act_linear import act_linear
from torchweld.registry import ROWS, Composite, weight
from torchweld.registry import activation as activation_spec
from torchweld.registry.cost import count_for_gemms


@short()
def mlp(
    input: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> Tensor:
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
    factors = (up_weight, up_bias, down_weight, down_bias)
    how = (activation, approximate, recompute)
    return layers.decide_recomputed(recompute, OP, input, *factors, *how)


def _plan(backend: str, x: Tensor, *rest: Any) -> Callable[..., Tensor]:
    up_weight, up_bias, _, _, *kind, recompute = rest
    if not _fits(x, *rest):
        _check(x, *rest)
    if recompute and backend == "cpu" and kind[0] != "identity":
        return _run_lean
    first = epilogue.plan(backend, x, up_weight, up_bias, *kind)
    return partial(_run, first, gemm.find_linear(x, *rest[2:4], *rest[:2]))


def _run(
    first: Callable[..., Tensor], second: Callable[..., Tensor], x: Tensor, *rest: Any
) -> Tensor:
    up_weight, up_bias, down_weight, down_bias, *_ = rest
    return second(first(x, up_weight, up_bias), down_weight, down_bias)


def _run_lean(x: Tensor, *rest: Any) -> Tensor:
    """The forward recomputed in a backward pass; it does not save the activation."""
    up_weight, up_bias, down_weight, down_bias, *kind, _ = rest
    z, bias = layers.run_gemm("cpu", x, up_weight, up_bias, kind[0])
    plain = type(down_weight) in (Tensor, torch.nn.Parameter)
    if gemm.wants_gradient(z, bias) and layers.may_overwrite(z) and plain:
        return act_linear(z, bias, down_weight, down_bias, *kind)
    return gemm.linear(layers.act("cpu", z, bias, *kind), down_weight, down_bias)


def _explain(backend: str, x: Tensor, up_weight: Tensor, up_bias: Tensor | None, *rest: Any) -> str:
    return epilogue.explain(backend, x, up_weight, up_bias, *rest[2:4])


def _fits(x: Tensor, *rest: Any) -> bool:
    return layers.fits(x, *rest[:2]) and layers.fits(x, *rest[2:4])


def _reference(x: Tensor, *rest: Any) -> Tensor:
    up_weight, up_bias, down_weight, down_bias, *kind, _ = rest
    if not _fits(x, *rest):
        _check(x, *rest)
    hidden = activations.activate(OP, linear(x, up_weight, up_bias), *kind)
    return linear(hidden, down_weight, down_bias)


def _check(x: Any, *rest: Any) -> None:
    up_weight, up_bias, down_weight, down_bias, *kind, _ = rest
    layers.check(OP.name, x, up_weight=up_weight, up_bias=up_bias)
    down = {"down_weight": down_weight, "down_bias": down_bias}
    layers.check(OP.name, layers.hidden_of(x, up_weight), "up_weight", **down)
    activations.check(OP.name, *kind)


def _flops(x: Tensor, up_weight: Tensor, _: Any, down_weight: Tensor, *__: Any) -> tuple[int, int]:
    rows = x.shape[:-1].numel()
    return count_for_gemms(rows * up_weight.numel(), rows * down_weight.numel())


def _size(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    second = (weight(*row, *row), activation_spec(*row))
    return (*layers.arguments(leading, *row, *row), *second, "gelu", "none", False)


OP = Composite(
    name="mlp",
    forward="(Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight,"
    " Tensor? down_bias, str activation, str approximate, bool recompute) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor up_weight, Tensor? up_bias, Tensor down_weight,"
    " Tensor? down_bias, str activation, str approximate, bool recompute) -> (Tensor grad_input,"
    " Tensor grad_up_weight, Tensor grad_up_bias, Tensor grad_down_weight, Tensor grad_down_bias)",
    reference=_reference,
    plan=_plan,
    check=_check,
    fake=lambda x, up_weight, up_bias, down_weight, *_: (
        x.new_empty((*x.shape[:-1], down_weight.shape[0])),
    ),
    sharding=ROWS,
    sized=_size,
    flops=_flops,
    sources=epilogue.SOURCES,
    slower=(torch.float64,),
    detail=_explain,
    made_of=epilogue.MADE_OF,
)
