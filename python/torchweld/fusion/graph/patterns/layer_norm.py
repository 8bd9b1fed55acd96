"""layer_norm, also of a sum that other operations read, with a dropout before the sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step, as_float

_CAST = aten._to_copy.default


class _Norm(NamedTuple):
    step: Step
    x: Ref
    shape: tuple[int, ...]
    weights: list[int]  # a weight and a bias, only a weight, or neither
    eps: float


# After the weights come constants.


def _norm(x: Any, *more: Any) -> Any:
    *weights, shape, eps = more
    weight, bias = (*weights, None, None)[:2]
    return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)


def _run_norm(x: Any, *more: Any) -> Any:
    *weights, shape, eps = more
    weight, bias = (*weights, None, None)[:2]
    return functional.layer_norm(x, shape, weight, bias, eps)


def _sum(x: Any, residual: Any, p: float) -> Any:
    return torch.nn.functional.dropout(x, p, True) + residual if p else x + residual


def _norm_of_sum(x: Any, residual: Any, weight: Any, *more: Any) -> Any:
    return _sum_and_norm(x, residual, weight, *more)[1]


def _run_norm_of_sum(x: Any, residual: Any, weight: Any, *more: Any) -> Any:
    *bias, eps, p = more
    return functional.dropout_add_layer_norm(x, residual, weight, *bias, eps=eps, p=p)


def _sum_and_norm(x: Any, residual: Any, weight: Any, *more: Any) -> Any:
    *bias, eps, p = more
    z = _sum(x, residual, p)
    return z, _norm(z, weight, *bias, weight.shape, eps)


def _run_sum_and_norm(x: Any, residual: Any, weight: Any, *more: Any) -> Any:
    *bias, eps, p = more
    y, z = functional.dropout_add_layer_norm(
        x, residual, weight, *bias, eps=eps, p=p, return_residual=True
    )
    return z, y


def by_hand(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """As DeBERTa writes it, with a root and a bias, or without a bias as Cohere does, or plain."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    if bias is not None:
        return weight * ((wide - mean) / torch.sqrt(variance + eps)).to(x.dtype) + bias
    normed = (wide - mean) * torch.rsqrt(variance + eps)
    return (normed if weight is None else weight.to(wide.dtype) * normed).to(x.dtype)


def _without_bias(x: Any, weight: Any, eps: float) -> Any:
    return by_hand(x, weight, None, eps)


def _plain(x: Any, eps: float) -> Any:
    return by_hand(x, None, None, eps)


def _run_plain(x: Any, eps: float) -> Any:
    return functional.layer_norm(x, x.shape[-1:], None, None, eps)


def _run_by_hand(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _run_without_bias(x: Any, weight: Any, eps: float) -> Any:
    return functional.layer_norm(x, weight.shape, weight, None, eps)


def find_layer_norm_by_hand(record: Record, at: int) -> Iterator[Proposal]:
    """From the root of the variance down to what the weight and the bias make of it."""
    step = record.steps[at]
    if step.func not in (aten.rsqrt.default, aten.sqrt.default):
        return
    total = record.maker(step.args[0], aten.add.Tensor)
    mean = total and record.maker(total.args[0], aten.mean.dim)
    square = mean and record.maker(mean.args[0], aten.mul.Tensor)
    centered = square and record.maker(square.args[0], aten.sub.Tensor)
    eps = None if total is None else as_float(total.args[1])
    if not centered or eps is None or not isinstance(centered.args[0], Ref):
        return
    x = record.strip(centered.args[0], _CAST)
    for normed in record.readers(step.outs[0], aten.mul.Tensor, aten.div.Tensor):
        for scaled in _read_on(record, normed.outs[0], aten.mul.Tensor):
            for weight in (record.strip(each, _CAST) for each in scaled.args):
                if not isinstance(weight, Ref) or record.shape(weight) != record.shape(x)[-1:]:
                    continue
                for shifted in record.readers(scaled.outs[0], aten.add.Tensor):
                    bias = shifted.args[1]
                    if isinstance(bias, Ref):
                        inputs, out = [x.at, weight.at, bias.at], [shifted.outs[0]]
                        yield Proposal("layer_norm", inputs, out, by_hand, _run_by_hand, (eps,))
                for end in (*_list_casts(record, scaled.outs[0]), scaled.outs[0]):
                    inputs, run = [x.at, weight.at], _run_without_bias
                    yield Proposal("layer_norm", inputs, [end], _without_bias, run, (eps,))
        for end in (*_list_casts(record, normed.outs[0]), normed.outs[0]):
            yield Proposal("layer_norm", [x.at], [end], _plain, _run_plain, (eps,))


def _read_on(record: Record, number: int, func: Any) -> list[Step]:
    """What reads a tensor, or a cast of it."""
    numbers = (number, *_list_casts(record, number))
    return [step for each in numbers for step in record.readers(each, func)]


def _list_casts(record: Record, number: int) -> list[int]:
    return [step.outs[0] for step in record.readers(number, _CAST)]


def find_layer_norm(record: Record, at: int) -> Iterator[Proposal]:
    if (norm := _read_norm(record.steps[at])) is not None:
        inputs, out = [norm.x.at, *norm.weights], [norm.step.outs[0]]
        constants = norm.shape, norm.eps
        yield Proposal("layer_norm", inputs, out, _norm, _run_norm, constants, unsaved=out)


def find_add_layer_norm(record: Record, at: int) -> Iterator[Proposal]:
    norm = _read_norm(record.steps[at])
    total = None if norm is None else record.maker(norm.x, aten.add.Tensor)
    if norm is None or total is None or len(norm.shape) != 1 or len(total.args) != 2:
        return
    if not norm.weights:
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
        inputs, constants = [inside.at, residual.at, *norm.weights], (norm.eps, p)
        y, z = norm.step.outs[0], norm.x.at
        for outs, reference, run in (
            ([y], _norm_of_sum, _run_norm_of_sum),
            ([z, y], _sum_and_norm, _run_sum_and_norm),
        ):
            yield Proposal(name, inputs, outs, reference, run, constants, unsaved=[y])


def _read_norm(step: Step) -> _Norm | None:
    if step.func is not aten.native_layer_norm.default:
        return None
    x, shape, weight, bias, eps = step.args
    sizes = [size.text for size in shape]
    number = as_float(eps)
    weights = [each.at for each in (weight, bias) if isinstance(each, Ref)]
    if number is None or (weights and not isinstance(weight, Ref)):
        return None
    if not all(size.isdigit() for size in sizes):
        return None
    return _Norm(step, x, tuple(map(int, sizes)), weights, number)
