"""Activations as a record shows them; bias_act for activations of several passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float
from torchweld.names import ActivationName, Approximation


class Activation(NamedTuple):
    """An activation: how it is written, and the names that torchweld has for it."""

    written: str
    name: ActivationName
    approximate: Approximation = "none"


IDENTITY = Activation("no activation", "identity")
_TANH = Activation("gelu by tanh in parts", "gelu", "tanh")
_FAST = Activation("gelu by tanh of x * (1 + 0.044715 x * x)", "gelu", "tanh")
_ERF = Activation("gelu by erf in parts", "gelu")
_QUICK = Activation("x * sigmoid(1.702 x)", "quick_gelu")
_SWISH = Activation("x * sigmoid(x)", "silu")
_SQUARED = Activation("relu squared", "relu2")
# Activations of several passes in plain torch.
_IN_PASSES: dict[Activation, Callable[[Any], Any]] = {
    _TANH: lambda z: 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z.pow(3.0)))),
    _FAST: lambda z: 0.5 * z * (1.0 + torch.tanh(z * 0.7978845608 * (1.0 + 0.044715 * z * z))),
    _ERF: lambda z: z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))),
    _QUICK: lambda z: z * torch.sigmoid(1.702 * z),
    _SWISH: lambda z: z * torch.sigmoid(z),
    _SQUARED: lambda z: torch.nn.functional.relu(z).square(),
}
_IN_PLACE = " in place"
_BY_OP = {
    aten.silu.default: Activation("silu", "silu"),
    aten.silu_.default: Activation(f"silu{_IN_PLACE}", "silu"),
    aten.relu.default: Activation("relu", "relu"),
    aten.relu_.default: Activation(f"relu{_IN_PLACE}", "relu"),
    aten.sigmoid.default: Activation("sigmoid", "sigmoid"),
    aten.tanh.default: Activation("tanh", "tanh"),
}
# From the root in an activation that takes 1 + root, to how it may be written.
_OF_ROOTS = {aten.tanh.default: (_TANH, _FAST), aten.erf.default: (_ERF,)}


def compute(z: Any, kind: Activation) -> Any:
    """The activation in plain torch."""
    if kind == IDENTITY:
        return z
    if kind in _IN_PASSES:
        return _IN_PASSES[kind](z)
    if kind.name == "gelu":
        return torch.nn.functional.gelu(z, approximate=kind.approximate)
    function = getattr(torch.nn.functional, kind.name)
    return function(z, inplace=True) if kind.written.endswith(_IN_PLACE) else function(z)


def list_acts(record: Record, at: int) -> Iterator[tuple[Ref, int, Activation]]:
    """Inputs, results and kinds of activations that this step may belong to, the largest first."""
    step = record.steps[at]
    func, out = step.func, step.outs[0] if step.outs else -1
    larger = False  # else a gate by the step alone would take the place of a larger one
    if func is aten.relu.default:
        for square in record.readers(out, aten.mul.Tensor):
            if square.args == (Ref(out), Ref(out)):
                larger = True
                yield step.args[0], square.outs[0], _SQUARED
    if func is aten.sigmoid.default:
        for product in record.readers(out, aten.mul.Tensor):
            scaled = record.maker(step.args[0], aten.mul.Tensor)
            is_quick = scaled is not None and as_float(scaled.args[1]) == 1.702
            if scaled is not None and is_quick and scaled.args[0] in product.args:
                larger = True
                yield scaled.args[0], product.outs[0], _QUICK
            if step.args[0] in product.args:
                larger = True
                yield step.args[0], product.outs[0], _SWISH
    for plus in record.readers(out, aten.add.Tensor) if func in _OF_ROOTS else ():
        for times in record.readers(plus.outs[0], aten.mul.Tensor):
            for factor in times.args:
                half = record.maker(factor, aten.mul.Tensor)
                if half is not None and isinstance(half.args[0], Ref):
                    x = record.values[half.args[0].at]
                    for kind in _OF_ROOTS[func]:
                        if kind != _FAST or x.dtype != torch.float64:  # its constant has ten digits
                            yield half.args[0], times.outs[0], kind
    if func is aten.gelu.default:
        approximate = dict(step.kwargs).get("approximate", "none")
        yield step.args[0], out, Activation("gelu", "gelu", approximate)
    if func in _BY_OP and not larger:
        yield step.args[0], out, _BY_OP[func]


def _run(z: Any, kind: Activation) -> Any:
    return functional.bias_act(z, activation=kind.name, approximate=kind.approximate)


def find_act(record: Record, at: int) -> Iterator[Proposal]:
    for z, out, kind in list_acts(record, at):
        if kind in _IN_PASSES:
            yield Proposal("bias_act", [z.at], [out], compute, _run, (kind,))
