"""bias_act and gated_act: activations after a GEMM, and in the middle of a gated MLP.

    bias_act(x) = act(x + bias)
    gated_act(gate, up) = act(gate) * up

Read on in: csrc/core/act.h, csrc/cpu/act.cpp, csrc/bind/act.cpp, triton_kernels/act.py,
bench/cases/activation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from torchweld import checks
from torchweld.dispatch.call import call, decide
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.registry import ELEMENTS, Op, parameter
from torchweld.registry import activation as activation_spec
from torchweld.registry.cost import count_per_element

SOURCES = {"cpu": ("csrc/cpu/act.cpp",), "triton": ("triton_kernels/act.py",)}


@dataclass(frozen=True)
class Activation:
    """Eager torch's function, and how an error of its argument affects its result.

    `size` is the sum of the magnitudes of the argument's terms. `value(size)` is the same sum for
    the result, and `slope(size)` for the derivative; docs/numerics.md derives them.
    """

    function: Callable[[Tensor], Tensor]
    value: Callable[[Any], Any] = lambda size: size
    slope: Callable[[Any], Any] = lambda size: 1 + size


# By (activation, approximate). A new activation takes a line here, a line in csrc/core/act.h, and
# its branches in triton_kernels/act.py.
ACTIVATIONS = {
    ("gelu", "none"): Activation(gelu),
    ("gelu", "tanh"): Activation(partial(gelu, approximate="tanh")),
    ("relu", "none"): Activation(relu),
    ("silu", "none"): Activation(silu),
    ("quick_gelu", "none"): Activation(lambda z: z * torch.sigmoid(1.702 * z)),
    ("relu2", "none"): Activation(
        lambda z: relu(z).square(), lambda size: size * size, lambda size: 2 * size
    ),
    ("sigmoid", "none"): Activation(
        torch.sigmoid, lambda size: 1 + size / 4, lambda size: (1 + size) / 4
    ),
    ("tanh", "none"): Activation(torch.tanh),
    ("identity", "none"): Activation(lambda z: z, slope=torch.ones_like),
}
KINDS = tuple(ACTIVATIONS)


def activate(op: Op, z: Tensor, activation: str, approximate: str) -> Tensor:
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


# --- bias_act -------------------------------------------------------------------------------------


@short()
def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> Tensor:
    """activation(input + bias) in one pass; one more pass computes both gradients.

    Args:
        input: [*, width], or one number without a bias; float32, bfloat16, float16 (or float64).
        bias: [width], in input's dtype, or float32 for 16-bit input.
        activation: "gelu", "relu", "silu", "quick_gelu" (z * sigmoid(1.702 z)), "relu2" (relu's
            square), "sigmoid", "tanh" or "identity" (no activation).
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A contiguous tensor of input's shape and dtype.
    """
    if bias is None and isinstance(input, Tensor) and input.ndim == 0:
        return call(BIAS_ACT, input.reshape(1), bias, activation, approximate).reshape(())
    return decide(BIAS_ACT, input, bias, activation, approximate)


def _bias_act(x: Tensor, bias: Tensor | None, *kind: str) -> Tensor:
    z = x
    if bias is not None:
        if bias.shape != x.shape[-1:] or bias.dtype is not x.dtype:
            _check_bias_act(x, bias, *kind)
        z = x + bias
    if x.ndim == 0:
        _check_bias_act(x, bias, *kind)
    y = activate(BIAS_ACT, z, *kind)
    if y is x:
        return x.clone(memory_format=torch.contiguous_format)
    y = y.contiguous()
    return y if y.dtype is x.dtype else y.to(x.dtype)


def _check_bias_act(x: Any, bias: Any, *kind: Any) -> None:
    name = BIAS_ACT.name
    checks.dense(name, "input", x, BIAS_ACT.dtypes, jagged=True)
    if x.ndim == 0:
        raise ArgumentError(name, "input", "0-dimensional", "[*, width]")
    if bias is not None:
        checks.dense(name, "bias", bias, checks.beside(x), "input")
        checks.like(name, "bias", bias, x, "input")
        checks.shaped(name, "bias", bias, x.shape[-1:], "the last size of input")
    check(name, *kind)


BIAS_ACT = Op(
    name="bias_act",
    forward="(Tensor input, Tensor? bias, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor? bias, str activation, str approximate,"
    " bool need_bias) -> (Tensor grad_input, Tensor grad_bias)",
    reference=_bias_act,
    check=_check_bias_act,
    sources=SOURCES,
    sharding=ELEMENTS,
    slower=(torch.float64,),
    sized=lambda leading, row: (
        *(activation_spec(*leading, *row), parameter(row[-1])),
        *("gelu", "none"),
    ),
    flops=count_per_element(20, 25),
    left_to_compiler=lambda *_: True,
)
define(BIAS_ACT)


# --- gated_act ------------------------------------------------------------------------------------


@short()
def gated_act(
    gate: Tensor,
    up: Tensor,
    *,
    activation: ActivationName = "silu",
    approximate: Approximation = "none",
) -> Tensor:
    """activation(gate) * up in one pass, forward and backward; only its inputs are saved.

    Args:
        gate: [*, width], or one number; float32, bfloat16, float16 (or float64). gate and up may be
            halves of one tensor, which are not copied.
        up: of gate's shape and dtype.
        activation: "silu" (SwiGLU), "gelu" (GeGLU), "relu" (ReGLU) or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A contiguous tensor of gate's shape and dtype.
    """
    if isinstance(gate, Tensor) and gate.ndim == 0 and isinstance(up, Tensor):
        return call(GATED_ACT, gate.reshape(1), up[None], activation, approximate).reshape(())
    return decide(GATED_ACT, gate, up, activation, approximate)


def _gated_act(gate: Tensor, up: Tensor, *kind: str) -> Tensor:
    fits = gate.shape == up.shape and gate.dtype is up.dtype and gate.ndim > 0
    if not fits or not checks.all_dense(gate, up):
        _check_gated_act(gate, up, *kind)
    return (activate(GATED_ACT, gate, *kind) * up).contiguous()


def _check_gated_act(gate: Any, up: Any, *kind: Any) -> None:
    name = GATED_ACT.name
    checks.dense(name, "gate", gate, GATED_ACT.dtypes, jagged=True)
    if gate.ndim == 0:
        raise ArgumentError(name, "gate", "0-dimensional", "[*, width]")
    checks.dense(name, "up", up, [gate.dtype], "gate", jagged=gate.is_nested)
    checks.like(name, "up", up, gate, "gate")
    checks.shaped(name, "up", up, gate.shape, "the shape of gate")
    check(name, *kind)


GATED_ACT = Op(
    name="gated_act",
    forward="(Tensor gate, Tensor up, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor gate, Tensor up, str activation, str approximate)"
    " -> (Tensor grad_gate, Tensor grad_up)",
    reference=_gated_act,
    check=_check_gated_act,
    sources=SOURCES,
    sharding=ELEMENTS,
    slower=(torch.float64,),
    sized=lambda leading, row: (*[activation_spec(*leading, *row)] * 2, "silu", "none"),
    flops=count_per_element(20, 30),
    eager_rounds=True,
    left_to_compiler=lambda *_: True,
)
define(GATED_ACT)
