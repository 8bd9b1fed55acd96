"""layer_norm, also of a sum that other operations read, with a dropout before the sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step, as_float


class _Norm(NamedTuple):
    step: Step
    x: Ref
    shape: tuple[int, ...]
    weight: int
    bias: int
    eps: float


def _norm(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _run_norm(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
    return functional.layer_norm(x, shape, weight, bias, eps)


def _sum(x: Any, residual: Any, p: float) -> Any:
    return torch.nn.functional.dropout(x, p, True) + residual if p else x + residual


def _norm_of_sum(x: Any, residual: Any, weight: Any, bias: Any, eps: float, p: float) -> Any:
    return torch.nn.functional.layer_norm(_sum(x, residual, p), weight.shape, weight, bias, eps)


def _run_norm_of_sum(x: Any, residual: Any, weight: Any, bias: Any, eps: float, p: float) -> Any:
    return functional.dropout_add_layer_norm(x, residual, weight, bias, eps=eps, p=p)


def _sum_and_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: float, p: float) -> Any:
    z = _sum(x, residual, p)
    return z, torch.nn.functional.layer_norm(z, weight.shape, weight, bias, eps)


def _run_sum_and_norm(x: Any, residual: Any, weight: Any, bias: Any, eps: float, p: float) -> Any:
    y, z = functional.dropout_add_layer_norm(
        x, residual, weight, bias, eps=eps, p=p, return_residual=True
    )
    return z, y


def find_layer_norm(record: Record, at: int) -> Iterator[Proposal]:
    if (norm := _read_norm(record.steps[at])) is not None:
        inputs, out = [norm.x.at, norm.weight, norm.bias], [norm.step.outs[0]]
        yield Proposal("layer_norm", inputs, out, _norm, _run_norm, (norm.shape, norm.eps))


def find_add_layer_norm(record: Record, at: int) -> Iterator[Proposal]:
    norm = _read_norm(record.steps[at])
    total = None if norm is None else record.maker(norm.x, aten.add.Tensor)
    if norm is None or total is None or len(norm.shape) != 1 or len(total.args) != 2:
        return
    for x, residual in (total.args, total.args[::-1]):
        if not (isinstance(x, Ref) and isinstance(residual, Ref)):
            return
        if record.shape(x) != record.shape(residual):
            return
        drop = record.maker(x, "dropout")
        p = 0.0 if drop is None else as_float(drop.args[1])
        if p is None:
            continue
        inside = x if drop is None else drop.args[0]
        name = "dropout_add_layer_norm"
        inputs, constants = [inside.at, residual.at, norm.weight, norm.bias], (norm.eps, p)
        y, z = norm.step.outs[0], norm.x.at
        yield Proposal(name, inputs, [y], _norm_of_sum, _run_norm_of_sum, constants)
        yield Proposal(name, inputs, [z, y], _sum_and_norm, _run_sum_and_norm, constants)


def _read_norm(step: Step) -> _Norm | None:
    if step.func is not aten.native_layer_norm.default:
        return None
    x, shape, weight, bias, eps = step.args
    sizes = [size.text for size in shape]
    number = as_float(eps)
    if number is None or not isinstance(weight, Ref) or not isinstance(bias, Ref):
        return None
    if not all(size.isdigit() for size in sizes):
        return None
    return _Norm(step, x, tuple(map(int, sizes)), weight.at, bias.at, number)
