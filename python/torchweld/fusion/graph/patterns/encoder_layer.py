"""torch's encoder layer as one operation, which it calls in evaluation without gradients.

In 16 bits, on CPUs where torch's products are plain loops, it is by float32 GEMMs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float
from torchweld.names import ActivationName
from torchweld.ops.attention.converted import attention
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.ops.gemm.product import is_converted

_LAYER = aten._transformer_encoder_layer_fwd.default
_OF_TOKENS = 1  # the type of a mask of each text's tokens


def _compute(x: Any, *given: Any) -> Any:
    *tensors, (heads, how, mask_type) = given
    weights, mask = tensors[:12], tensors[12] if tensors[12:] else None
    return _LAYER(x, x.shape[-1], heads, *weights[:4], *how, *weights[4:], mask, mask_type)


def _run(x: Any, *given: Any) -> Any:
    *tensors, (heads, (is_gelu, norms_first, eps), mask_type) = given
    qkv, out, first, second, up, down = (tensors[at : at + 2] for at in range(0, 12, 2))
    mask = None
    if tensors[12:]:  # what is not zero is left out, also of floats
        mask = ~tensors[12].to(torch.bool)
        mask = mask[:, None, None, :] if mask_type == _OF_TOKENS else mask

    def normalize(x: Any, norm: Any) -> Any:
        weight, bias = norm
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    def attend(x: Any) -> Any:
        made = linear_as_torch(x, *qkv).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in made)
        return linear_as_torch(attention(q, k, v, mask).transpose(1, 2).flatten(2), *out)

    def feed(x: Any) -> Any:
        kind: ActivationName = "gelu" if is_gelu else "relu"
        return linear_as_torch(functional.linear_act(x, *up, activation=kind), *down)

    if norms_first:
        x = x + attend(normalize(x, first))
        return x + feed(normalize(x, second))
    x = normalize(x + attend(x), first)
    return normalize(x + feed(x), second)


def find_encoder_layer(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is not _LAYER:
        return
    out = record.values[step.outs[0]]
    if out.device.type != "cpu" or not is_converted(out, out.dtype):
        return
    inputs = [each.at for each in step.args if isinstance(each, Ref)]
    heads, mask_type = (int(step.args[at].text) if step.args[at:] else None for at in (2, 19))
    how = step.args[7], step.args[8], as_float(step.args[9])
    constants = ((heads, how, mask_type),)
    yield Proposal("encoder_layer", inputs, [step.outs[0]], _compute, _run, constants)
