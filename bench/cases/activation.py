"""Cases of bias_act and gated_act."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchweld.bench.cases.declare import (
    CASES,
    MEASURED,
    MEASURED_ON_GPU,
    SHAPES,
    Arguments,
    Cases,
    vary,
    vary_all,
)
from torchweld.ops.activation import ACTIVATIONS, KINDS

# Sizes on which every activation is tried.
SHAPES_OF_ALL = ((1,), (5, 7), (33, 64), (17, 1000))


def activated(
    name: str,
    shapes: Iterable[tuple[int, ...]],
    kind: tuple[str, str] | None = None,
    **changes: Any,
) -> tuple[Arguments, ...]:
    """An op's arguments of these shapes, with this activation."""
    if kind is not None:
        changes |= dict(zip(("activation", "approximate"), kind, strict=True))
    return vary_all(name, shapes, **changes)


def every_kind(name: str, but: str) -> tuple[Arguments, ...]:
    """The arguments of all shapes, then of some with every other activation."""
    others = [kind for kind in KINDS if kind not in ((but, "none"),)]
    some = [activated(name, [s], kind) for s in SHAPES_OF_ALL for kind in others]
    return activated(name, SHAPES) + sum(some, ())


def _terms_of_bias_act(
    x: Tensor, bias: Tensor | None, *kind: str, grad_y: Tensor
) -> dict[str, Tensor]:
    known = ACTIVATIONS[kind]  # type: ignore[index]
    z = x.double().abs() + (0.0 if bias is None else bias.double().abs())
    grad_input = grad_y.double().abs() * known.slope(z)
    return {
        "y": known.value(z),
        "grad_input": grad_input,
        "grad_bias": grad_input.sum_to_size(x.shape[-1:]),
    }


_without_bias = [activated("bias_act", [(5, 48)], kind, bias=None) for kind in KINDS]
CASES["bias_act"] = Cases(
    samples=every_kind("bias_act", "gelu") + sum(_without_bias, ()),
    benchmarks=activated("bias_act", MEASURED),
    benchmarks_on_gpu=activated("bias_act", MEASURED_ON_GPU),
    tiny=vary("bias_act", (1,), (64,)),
    terms=_terms_of_bias_act,
)


def _terms_of_gated_act(gate: Tensor, up: Tensor, *kind: str, grad_y: Tensor) -> dict[str, Tensor]:
    known = ACTIVATIONS[kind]  # type: ignore[index]
    gate, up, grad = gate.double().abs(), up.double().abs(), grad_y.double().abs()
    value, grad_gate = known.value(gate), grad * up * known.slope(gate)
    return {"y": value * up, "grad_gate": grad_gate, "grad_up": grad * value}


CASES["gated_act"] = Cases(
    samples=every_kind("gated_act", "silu"),
    benchmarks=activated("gated_act", MEASURED),
    benchmarks_on_gpu=activated("gated_act", MEASURED_ON_GPU),
    tiny=vary("gated_act", (1,), (64,)),
    terms=_terms_of_gated_act,
)
