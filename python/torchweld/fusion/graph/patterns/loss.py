"""linear_cross_entropy: the last layer of a language model and its loss."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Late, Proposal
from torchweld.fusion.graph.record import Record, Ref, Step, as_float
from torchweld.fusion.patterns.logits import Deferred
from torchweld.names import Reduction

_REDUCTIONS = ("none", "mean", "sum")
_CAST, _VIEW = aten._to_copy.default, aten.view.default
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_SCALES = {aten.mul.Tensor: operator.mul, aten.div.Tensor: operator.truediv}

# What stands between the last layer and the loss, as in `Deferred`: a function and a number.
_Steps = tuple[tuple[Any, ...], ...]


def _flatten(logits: Any) -> Any:
    return logits.view(-1, logits.shape[-1])


def _reference(
    h: Any, weight: Any, bias: Any, target: Any, steps: _Steps, ignored: int, reduction: Reduction
) -> Any:
    z = torch.nn.functional.linear(h, weight, bias)
    for function, *given in steps:
        z = function(z, *given)
    return torch.nn.functional.cross_entropy(z, target, ignore_index=ignored, reduction=reduction)


def _run(
    h: Any, weight: Any, bias: Any, target: Any, steps: _Steps, ignored: int, reduction: Reduction
) -> Any:
    scale, cap = Deferred(h, 0, steps).read_scale_and_cap()
    is_wide, device = (torch.Tensor.float,) in steps, h.device.type
    # Under autocast the loss of 16-bit logits is float32, as with logits.float().
    keeps = not is_wide or h.dtype.itemsize != 2 or torch.is_autocast_enabled(device)
    with nullcontext() if keeps else torch.autocast(device, h.dtype):
        return functional.linear_cross_entropy(
            h.reshape(-1, h.shape[-1]),
            weight,
            target,
            linear_bias=bias,
            ignore_index=ignored,
            reduction=reduction,
            logit_scale=scale,
            softcap=cap,
        )


def _without_bias(h: Any, weight: Any, target: Any, *constants: Any) -> Any:
    return _reference(h, weight, None, target, *constants)


def _run_without_bias(h: Any, weight: Any, target: Any, *constants: Any) -> Any:
    return _run(h, weight, None, target, *constants)


def find_loss(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is not aten.nll_loss_forward.default:
        return
    logs, target, class_weight, reduction, ignored = step.args
    soft = record.maker(logs, aten._log_softmax.default)
    found = None if soft is None or class_weight is not None else _climb(record, soft.args[0])
    if found is None:
        return
    product, path = found
    *bias, flat, turned = product.args
    turning = record.maker(turned, aten.transpose.int)
    if turning is None or sum(function is torch.tanh for _, (function, *_) in path[1:]) > 1:
        return
    steps = tuple(kind for _, kind in path[1:])
    constants = steps, int(ignored.text), _REDUCTIONS[int(reduction.text)]
    results: dict[int, Any] = {}  # what the model may return, and the steps before it
    for number, (function, *_) in path:
        if function is _flatten:
            break
        results[number] = steps[: len(results)]
    for inner in (False, True):  # autocast's casts are a part of the layer
        given = [record.strip(flat, _VIEW), turning.args[0], *bias]
        if inner:
            given = [record.strip(each, _CAST) for each in given]
            given[0] = record.strip(given[0], _VIEW)
        if not all(isinstance(each, Ref) for each in given):
            return
        numbers = [each.at for each in given]
        reference, run = (_reference, _run) if bias else (_without_bias, _run_without_bias)
        h, weight, *biases = numbers
        late = Late(results, h, weight, biases[0] if bias else None)
        inputs, out = [*numbers, target.at], step.outs[0]
        yield Proposal("linear_cross_entropy", inputs, [out], reference, run, constants, late)


def _climb(record: Record, value: Any) -> tuple[Step, list[tuple[int, Any]]] | None:
    """The product that logits come from, and the tensors and steps from there to the loss."""
    path: list[tuple[int, Any]] = []
    while isinstance(value, Ref) and value.at in record.made_by:
        step = record.steps[record.made_by[value.at]]
        product = step if step.func in _PRODUCTS else None
        if step.func is _VIEW:  # the linear layer's own
            product = record.maker(step.args[0], *_PRODUCTS)
        if product is not None:
            return product, [(value.at, (torch.nn.functional.linear,)), *reversed(path)]
        number = as_float(step.args[1]) if len(step.args) == 2 else None
        if step.func is _VIEW and len(step.args[1]) == 2:
            path.append((value.at, (_flatten,)))
        elif step.func is _CAST and dict(step.kwargs) == {"dtype": torch.float32}:
            path.append((value.at, (torch.Tensor.float,)))
        elif step.func is aten.tanh.default:
            path.append((value.at, (torch.tanh,)))
        elif step.func in _SCALES and number:
            path.append((value.at, (_SCALES[step.func], number)))
        else:
            return None
        value = step.args[0]
    return None
