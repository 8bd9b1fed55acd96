"""batch_norm_act: a batch norm of rows and its activation, which update running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.patterns.activation import compute, list_acts
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float


def _fill(tensors: list[Any], present: tuple[bool, ...]) -> list[Any]:
    """Statistics, weight and bias, each of which may be None."""
    waiting = iter(tensors)
    return [next(waiting) if is_there else None for is_there in present]


def _reference(x: Any, *given: Any) -> Any:
    *tensors, present, how, kind = given
    y = torch.nn.functional.batch_norm(x, *_fill(tensors, present), *how)
    return compute(y, kind)


def _run(x: Any, *given: Any) -> Any:
    *tensors, present, how, kind = given
    names = {"activation": kind.name, "approximate": kind.approximate}
    return functional.batch_norm_act(x, *_fill(tensors, present), *how, **names)


def find_batch_norm_act(record: Record, at: int) -> Iterator[Proposal]:
    for z, out, kind in list_acts(record, at):
        made = record.made_by.get(z.at)
        norm = None if made is None else record.steps[made]
        if norm is None or norm.func != "batch_norm" or len(record.shape(z)) != 2:
            continue
        x, *columns, training, momentum, eps = norm.args
        tensors = [each for each in columns if isinstance(each, Ref)]
        present = tuple(isinstance(each, Ref) for each in columns)
        how = (training, as_float(momentum), as_float(eps))
        inputs = [x.at, *(each.at for each in tensors)]
        statistics = [each.at for each in columns[:2] if isinstance(each, Ref)]
        constants = (present, how, kind)
        name = "batch_norm_act"
        yield Proposal(name, inputs, [out], _reference, _run, constants, unsaved=statistics)
