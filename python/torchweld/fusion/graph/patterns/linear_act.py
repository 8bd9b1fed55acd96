"""linear_act: a linear layer, or GPT-2's Conv1D, and its activation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import Activation, compute, list_acts
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step

_CAST = aten._to_copy.default


def _linear(x: Any, weight: Any, bias: Any, kind: Activation) -> Any:
    return compute(torch.nn.functional.linear(x, weight, bias), kind)


def _linear_without_bias(x: Any, weight: Any, kind: Activation) -> Any:
    return compute(torch.nn.functional.linear(x, weight), kind)


def _run(x: Any, weight: Any, bias: Any, kind: Activation) -> Any:
    return functional.linear_act(
        x, weight, bias, activation=kind.name, approximate=kind.approximate
    )


def _run_without_bias(x: Any, weight: Any, kind: Activation) -> Any:
    return _run(x, weight, None, kind)


def _conv(x: Any, weight: Any, bias: Any, kind: Activation) -> Any:
    y = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return compute(y.view(*x.size()[:-1], weight.shape[1]), kind)


def _run_conv(x: Any, weight: Any, bias: Any, kind: Activation) -> Any:
    return _run(x, weight.t(), bias, kind)


def find_linear_act(record: Record, at: int) -> Iterator[Proposal]:
    for z, out, kind in list_acts(record, at):
        product = record.maker(record.strip(z, aten.view.default), *PRODUCTS)
        for inputs, runs in list_layers(record, product) if product is not None else ():
            yield Proposal("linear_act", inputs, [out], *runs, (kind,))


PRODUCTS = aten.addmm.default, aten.mm.default
_Runs = tuple[Callable[..., Any], Callable[..., Any]]


def list_layers(record: Record, product: Step) -> Iterator[tuple[list[int], _Runs]]:
    """Layers that a product may belong to: their inputs, and a reference and op with a kind."""
    *bias, flat, turned = product.args
    # Casts of autocast are a part of the layer, others are not; so is one view, before or after.
    for inner, is_shaped in itertools.product((False, True), (True, False)):
        strip = (lambda value: record.strip(value, _CAST)) if inner else (lambda value: value)
        x = strip(flat)
        if is_shaped:
            shaping = record.maker(x, aten.view.default)
            if shaping is None or record.shape(shaping.args[0])[-1] != record.shape(flat)[-1]:
                continue
            x = shaping.args[0]
        given = [strip(x), *map(strip, bias)]
        turning = record.maker(turned, aten.transpose.int)
        if not all(isinstance(each, Ref) for each in given):
            continue
        numbers = [each.at for each in given]
        if turning is not None:
            numbers.insert(1, strip(turning.args[0]).at)
            runs = (_linear, _run) if bias else (_linear_without_bias, _run_without_bias)
            yield numbers, runs
        if bias:
            yield [given[0].at, strip(turned).at, given[1].at], (_conv, _run_conv)
