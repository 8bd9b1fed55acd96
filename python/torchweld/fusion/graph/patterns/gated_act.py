"""gated_act: an activation times another tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import Activation, compute, list_acts
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref


def _reference(gate: Any, up: Any, kind: Activation) -> Any:
    return compute(gate, kind) * up


def _run(gate: Any, up: Any, kind: Activation) -> Any:
    return functional.gated_act(gate, up, activation=kind.name, approximate=kind.approximate)


def find_gated_act(record: Record, at: int) -> Iterator[Proposal]:
    for gate, acted, kind in list_acts(record, at):
        for product in record.readers(acted, aten.mul.Tensor):
            a, b = product.args
            up = b if a == Ref(acted) else a
            if isinstance(up, Ref) and record.shape(up) == record.shape(gate):
                inputs = [gate.at, up.at]
                yield Proposal("gated_act", inputs, [product.outs[0]], _reference, _run, (kind,))
