"""softmax_dropout: scores, scaled and masked, and a dropout after their softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Number, Record, Ref, as_float


def _masked(x: Any, mask: Any, scale: float, p: float) -> Any:
    y = torch.nn.functional.softmax(x * scale + mask if scale != 1 else x + mask, dim=-1)
    return torch.nn.functional.dropout(y, p, True) if p else y


def _run_masked(x: Any, mask: Any, scale: float, p: float) -> Any:
    return functional.softmax_dropout(x, mask, scale=scale, p=p)


def _filled(x: Any, excluded: Any, scale: float, p: float) -> Any:
    z = (x * scale if scale != 1 else x).masked_fill(excluded, -torch.inf)
    y = torch.nn.functional.softmax(z, dim=-1)
    return torch.nn.functional.dropout(y, p, True) if p else y


def _run_filled(x: Any, excluded: Any, scale: float, p: float) -> Any:
    return functional.softmax_dropout(x, ~excluded, scale=scale, p=p)


def _plain(x: Any, scale: float, p: float) -> Any:
    y = torch.nn.functional.softmax(x * scale if scale != 1 else x, dim=-1)
    return torch.nn.functional.dropout(y, p, True) if p else y


def _run_plain(x: Any, scale: float, p: float) -> Any:
    return functional.softmax_dropout(x, scale=scale, p=p)


def find_softmax(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is not aten._softmax.default:
        return
    ends = [
        (drop.outs[0], p)
        for drop in record.readers(step.outs[0], "dropout")
        if (p := as_float(drop.args[1])) is not None
    ]
    for out, p in (*ends, (step.outs[0], 0.0)):
        z = step.args[0]
        total = record.maker(z, aten.add.Tensor)
        if total is not None and len(total.args) == 2 and isinstance(total.args[1], Ref):
            x, scale = _read_scale(record, total.args[0])
            mask = total.args[1]
            yield Proposal(
                "softmax_dropout", [x.at, mask.at], [out], _masked, _run_masked, (scale, p)
            )
        filled = record.maker(z, aten.masked_fill.Scalar)
        if filled is not None and filled.args[2:] == (Number("-inf"),):
            x, scale = _read_scale(record, filled.args[0])
            numbers = [x.at, filled.args[1].at]
            yield Proposal("softmax_dropout", numbers, [out], _filled, _run_filled, (scale, p))
        x, scale = _read_scale(record, z)
        if p or scale != 1:  # a softmax by itself is one pass of torch's
            yield Proposal("softmax_dropout", [x.at], [out], _plain, _run_plain, (scale, p))


def _read_scale(record: Record, value: Any) -> tuple[Ref, float]:
    scaled = record.maker(value, aten.mul.Tensor)
    scale = None if scaled is None else as_float(scaled.args[1])
    return (value, 1.0) if scaled is None or scale is None else (scaled.args[0], scale)
