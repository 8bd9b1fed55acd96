"""gated_act: activation(gate) * up, the middle of a gated MLP."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.registry import ELEMENTS, Cases, Numerics, Op, activation
from torchweld.registry.cost import count_per_element


@short()
def gated_act(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: ActivationName = "silu",
    approximate: Approximation = "none",
) -> torch.Tensor:
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
    if isinstance(gate, torch.Tensor) and gate.ndim == 0 and isinstance(up, torch.Tensor):
        return call(OP, gate.reshape(1), up[None], activation, approximate).reshape(())
    return call(OP, gate, up, activation, approximate)


def _reference(
    gate: torch.Tensor, up: torch.Tensor, activation: str, approximate: str
) -> torch.Tensor:
    fits = gate.shape == up.shape and gate.dtype is up.dtype and gate.ndim > 0
    if not fits or not checks.all_dense(gate, up):
        _check_all(gate, up, activation, approximate)
    return (activations.activate(OP, gate, activation, approximate) * up).contiguous()


def _check_all(gate: Any, up: Any, activation: Any, approximate: Any) -> None:
    checks.dense(OP.name, "gate", gate, OP.dtypes, jagged=True)
    if gate.ndim == 0:
        raise ArgumentError(OP.name, "gate", "0-dimensional", "[*, width]")
    checks.dense(OP.name, "up", up, [gate.dtype], "gate", jagged=gate.is_nested)
    checks.like(OP.name, "up", up, gate, "gate")
    if up.shape != gate.shape:
        accepted = f"the shape of gate, {list(gate.shape)}"
        raise ArgumentError(OP.name, "up", f"of shape {list(up.shape)}", accepted)
    activations.check(OP.name, activation, approximate)


def _fake(
    gate: torch.Tensor, up: torch.Tensor, activation: str, approximate: str
) -> tuple[torch.Tensor, ...]:
    _check_all(gate, up, activation, approximate)
    return (torch.empty_like(gate, memory_format=torch.contiguous_format),)


def _terms(
    gate: torch.Tensor, up: torch.Tensor, activation: str, approximate: str, grad_y: torch.Tensor
) -> dict[str, torch.Tensor]:
    known = activations.ACTIVATIONS[activation, approximate]
    gate, up, grad = gate.double().abs(), up.double().abs(), grad_y.double().abs()
    activated, grad_gate = known.value(gate), grad * up * known.slope(gate)
    return {"y": activated * up, "grad_gate": grad_gate, "grad_up": grad * activated}


def _arguments(shape: tuple[int, ...], *kind: str) -> tuple[Any, ...]:
    return (activation(*shape), activation(*shape), *kind)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [_arguments(shape, "silu", "none") for shape in activations.SHAPES]
    kinds = [kind for kind in activations.KINDS if kind[0] != "silu"]
    return (*samples, *(_arguments(s, *kind) for s in activations.SHAPES_OF_ALL for kind in kinds))


OP = Op(
    name="gated_act",
    forward="(Tensor gate, Tensor up, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor gate, Tensor up, str activation, str approximate)"
    " -> (Tensor grad_gate, Tensor grad_up)",
    reference=_reference,
    check=_check_all,
    fake=_fake,
    sources=activations.SOURCES,
    sharding=ELEMENTS,
    cases=Cases(
        sized=lambda leading, row: _arguments((*leading, *row), "silu", "none"),
        flops=count_per_element(20, 30),
        samples=_samples(),
        benchmarks=tuple(_arguments(s, "silu", "none") for s in activations.MEASURED),
        benchmarks_on_gpu=tuple(_arguments(s, "silu", "none") for s in activations.MEASURED_ON_GPU),
        tiny=_arguments((1, 64), "silu", "none"),
        numerics=Numerics(fp32=dict.fromkeys(("y", "grad_gate", "grad_up"), 2.0), terms=_terms),
    ),
    small=131072,
    eager_rounds=True,
)
define(OP)
