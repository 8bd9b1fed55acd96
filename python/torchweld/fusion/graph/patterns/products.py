"""Linear layers, products and attention in 16 bits, on CPUs where torch has only plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import IDENTITY
from torchweld.fusion.graph.patterns.linear_act import PRODUCTS, list_layers
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float
from torchweld.ops.attention.converted import attention
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.ops.gemm.product import is_converted, multiply

_LAYOUTS = aten.view.default, aten.expand.default, aten.clone.default


def _run_layer(x: Any, weight: Any, *more: Any) -> Any:
    *bias, _ = more
    return linear_as_torch(x, weight, *bias)


def _run_conv(x: Any, weight: Any, bias: Any, kind: Any) -> Any:
    return linear_as_torch(x, weight.t(), bias)


def find_linear(record: Record, at: int) -> Iterator[Proposal]:
    """A linear layer, or GPT-2's Conv1D, that no other op has taken."""
    step = record.steps[at]
    if step.func not in PRODUCTS or not _is_slow(record, step.outs[0]):
        return
    shaped = [each.outs[0] for each in record.readers(step.outs[0], aten.view.default)]
    for inputs, (reference, _) in list_layers(record, step):
        run = _run_conv if reference.__name__ == "_conv" else _run_layer
        for out in (*shaped, step.outs[0]):
            yield Proposal("linear", inputs, [out], reference, run, (IDENTITY,))


def find_product(record: Record, at: int) -> Iterator[Proposal]:
    """A product of batches of matrices, such as scores of attention."""
    step = record.steps[at]
    if step.func is not aten.bmm.default or not _is_slow(record, step.outs[0]):
        return
    shaped = [each.outs[0] for each in record.readers(step.outs[0], aten.view.default)]
    inner = [record.strip(each, *_LAYOUTS) for each in step.args]
    for inputs, outs in ((inner, shaped), (step.args, [step.outs[0]])):
        for out in outs:
            numbers = [each.at for each in inputs]
            yield Proposal("product", numbers, [out], torch.matmul, multiply)


def _attend(q: Any, k: Any, v: Any, *given: Any) -> Any:
    *masks, how = given
    mask = masks[0] if masks else None
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **dict(how))


def _run_attention(q: Any, k: Any, v: Any, *given: Any) -> Any:
    *masks, how = given
    return attention(q, k, v, masks[0] if masks else None, **dict(how))


def find_slow_attention(record: Record, at: int) -> Iterator[Proposal]:
    """Torch's attention."""
    step = record.steps[at]
    if step.func != "scaled_dot_product_attention" or not _is_slow(record, step.outs[0]):
        return
    q, k, v, mask, p, causal, scale, is_grouped = step.args
    how = {"dropout_p": as_float(p), "is_causal": causal, "enable_gqa": is_grouped}
    how["scale"] = None if scale is None else as_float(scale)
    numbers = [each.at for each in (q, k, v, mask) if isinstance(each, Ref)]
    constants = (tuple(how.items()),)
    name = "scaled_dot_product_attention"
    yield Proposal(name, numbers, [step.outs[0]], _attend, _run_attention, constants)


def _is_slow(record: Record, out: int) -> bool:
    x = record.values[out]
    return is_converted(x, x.dtype)
