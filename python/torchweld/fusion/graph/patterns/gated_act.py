"""gated_act: an activation times another tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import Activation, compute, list_acts
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Number, Record, Ref, Step


def _reference(gate: Any, up: Any, kind: Activation) -> Any:
    return compute(gate, kind) * up


def _run(gate: Any, up: Any, kind: Activation) -> Any:
    return functional.gated_act(gate, up, activation=kind.name, approximate=kind.approximate)


# What may stand between the factors: no gate then, which an explanation says.
_BETWEEN = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.mul.Tensor)


def find_gated_act(record: Record, at: int) -> Iterator[Proposal]:
    for gate, acted, kind in list_acts(record, at):
        near = [step.outs[0] for step in record.readers(acted, *_BETWEEN) if _has_number(step)]
        for factor in (acted, *near):
            for product in record.readers(factor, aten.mul.Tensor):
                a, b = product.args
                up = b if a == Ref(factor) else a
                if isinstance(up, Ref) and record.shape(up) == record.shape(gate):
                    inputs, outs = [gate.at, up.at], [product.outs[0]]
                    yield Proposal("gated_act", inputs, outs, _reference, _run, (kind,))


def _has_number(step: Step) -> bool:
    return any(isinstance(each, Number) for each in step.args)
