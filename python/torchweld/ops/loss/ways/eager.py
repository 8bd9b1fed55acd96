"""Plain torch with all logits, for transforms and for targets that need a gradient."""

from __future__ import annotations

import torch

from torchweld.ops.loss import results
from torchweld.ops.loss.chunks import Layer
from torchweld.ops.loss.results import Outputs, RowResults
from torchweld.ops.loss.rows import LossTransform
from torchweld.ops.loss.ways.kind import LossKind


def find_by_reference(
    layer: Layer, target: torch.Tensor, how: LossTransform, wanted: Outputs
) -> RowResults:
    """The results by plain torch, with all logits at once."""
    logits, kind = layer.input, layer.logits_dtype
    if layer.weight is not None:
        bias = None if layer.bias is None else layer.bias.to(kind)
        logits = torch.nn.functional.linear(logits.to(kind), layer.weight.to(kind), bias)
    return results.reference(logits, target, how, wanted)


def compute(
    kind: LossKind, layer: Layer, target: torch.Tensor, how: LossTransform, wanted: Outputs
) -> RowResults:
    kind.sharding.refuse_transforms("linear_weight")
    return find_by_reference(layer, target, how, wanted)
