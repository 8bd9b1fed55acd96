"""Activations as a record shows them; bias_act for activations of several passes."""

from __future__ import annotations

from collections.abc import Iterator
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


_TANH = Activation("gelu by tanh in parts", "gelu", "tanh")
_QUICK = Activation("x * sigmoid(1.702 x)", "quick_gelu")
_SQUARED = Activation("relu squared", "relu2")
# Activations of several passes in plain torch.
_IN_PASSES = (_TANH, _QUICK, _SQUARED)
_BY_OP = {
    aten.silu.default: Activation("silu", "silu"),
    aten.relu.default: Activation("relu", "relu"),
}


def compute(z: Any, kind: Activation) -> Any:
    """The activation in plain torch."""
    if kind == _TANH:
        return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z.pow(3.0))))
    if kind == _QUICK:
        return z * torch.sigmoid(1.702 * z)
    if kind == _SQUARED:
        return torch.nn.functional.relu(z).square()
    if kind.name == "gelu":
        return torch.nn.functional.gelu(z, approximate=kind.approximate)
    return getattr(torch.nn.functional, kind.name)(z)


def read(record: Record, at: int) -> tuple[Ref, int, Activation] | None:
    """The input, the result and the kind of an activation that this step belongs to."""
    step = record.steps[at]
    if step.func is aten.relu.default:
        acted = Ref(step.outs[0])
        for square in record.readers(acted.at, aten.mul.Tensor):
            if square.args == (acted, acted):
                return step.args[0], square.outs[0], _SQUARED
    if step.func is aten.sigmoid.default:
        scaled = record.maker(step.args[0], aten.mul.Tensor)
        if scaled is not None and as_float(scaled.args[1]) == 1.702:
            for product in record.readers(step.outs[0], aten.mul.Tensor):
                if scaled.args[0] in product.args:
                    return scaled.args[0], product.outs[0], _QUICK
    if step.func in _BY_OP:
        return step.args[0], step.outs[0], _BY_OP[step.func]
    if step.func is aten.gelu.default:
        approximate = dict(step.kwargs).get("approximate", "none")
        return step.args[0], step.outs[0], Activation("gelu", "gelu", approximate)
    if step.func is aten.tanh.default:
        for plus in record.readers(step.outs[0], aten.add.Tensor):
            for times in record.readers(plus.outs[0], aten.mul.Tensor):
                for factor in times.args:
                    half = record.maker(factor, aten.mul.Tensor)
                    if half is not None and isinstance(half.args[0], Ref):
                        return half.args[0], times.outs[0], _TANH
    return None


def _run(z: Any, kind: Activation) -> Any:
    return functional.bias_act(z, activation=kind.name, approximate=kind.approximate)


def find_act(record: Record, at: int) -> Iterator[Proposal]:
    found = read(record, at)
    if found is not None and found[2] in _IN_PASSES:
        z, out, kind = found
        yield Proposal("bias_act", [z.at], [out], compute, _run, (kind,))
