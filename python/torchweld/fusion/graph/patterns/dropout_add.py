"""bias_dropout_add without a bias: a dropout and the addition of a residual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float


def _reference(x: Any, residual: Any, p: float) -> Any:
    return torch.nn.functional.dropout(x, p, True) + residual


def _run(x: Any, residual: Any, p: float) -> Any:
    return functional.bias_dropout_add(x, None, residual, p=p)


def find_dropout_add(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is not aten.add.Tensor or len(step.args) != 2:
        return
    for dropped, residual in (step.args, step.args[::-1]):
        drop = record.maker(dropped, "dropout")
        p = None if drop is None else as_float(drop.args[1])
        if drop is None or p is None or not isinstance(residual, Ref):
            continue
        if record.shape(dropped) == record.shape(residual):
            inputs = [drop.args[0].at, residual.at]
            yield Proposal("bias_dropout_add", inputs, [step.outs[0]], _reference, _run, (p,))
