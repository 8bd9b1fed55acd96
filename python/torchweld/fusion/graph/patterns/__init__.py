"""Finders of places where an op of torchweld may stand, the largest ops first.

A finder takes a record and the number of a step, and yields proposals that this step belongs to. It
reads the record upwards and downwards from one operation that its op always has, such as rsqrt.
It may propose too much: a proposal counts only if its reference has the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from torchweld.fusion.graph.patterns.activation import find_act
from torchweld.fusion.graph.patterns.attention import find_attention
from torchweld.fusion.graph.patterns.batch_norm import find_batch_norm_act
from torchweld.fusion.graph.patterns.dropout_add import find_dropout_add
from torchweld.fusion.graph.patterns.encoder_layer import find_encoder_layer
from torchweld.fusion.graph.patterns.experts import find_experts
from torchweld.fusion.graph.patterns.gated_act import find_gated_act
from torchweld.fusion.graph.patterns.heads import find_heads
from torchweld.fusion.graph.patterns.layer_norm import (
    find_add_layer_norm,
    find_layer_norm,
    find_layer_norm_by_hand,
)
from torchweld.fusion.graph.patterns.linear_act import find_linear_act
from torchweld.fusion.graph.patterns.loss import find_large_loss, find_loss
from torchweld.fusion.graph.patterns.modulation import find_gated_residual, find_modulated_norm
from torchweld.fusion.graph.patterns.products import (
    find_linear,
    find_product,
    find_slow_attention,
)
from torchweld.fusion.graph.patterns.rms_norm import find_add_rms_norm, find_rms_norm
from torchweld.fusion.graph.patterns.rotary import find_normed_rotary, find_rotary
from torchweld.fusion.graph.patterns.rotary_forms import find_rotary_forms
from torchweld.fusion.graph.patterns.softmax import find_softmax
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record
from torchweld.ops.gemm.linear_act import is_left_to_compiler

FINDERS: list[Callable[[Record, int], Iterable[Proposal]]] = [
    find_loss,
    find_experts,
    find_attention,
    find_heads,
    find_encoder_layer,
    find_normed_rotary,
    find_rotary,  # before norms and gates, which would take its sum for a residual
    find_rotary_forms,
    find_modulated_norm,
    find_gated_residual,
    find_layer_norm_by_hand,
    find_add_rms_norm,
    find_rms_norm,
    find_add_layer_norm,
    find_layer_norm,
    find_dropout_add,
    find_batch_norm_act,
    find_gated_act,
    find_linear_act,
    find_act,
    find_softmax,
    find_linear,
    find_product,
    find_slow_attention,
]


def list_for_inductor(x: torch.Tensor) -> list[Callable[[Record, int], Iterable[Proposal]]]:
    """The finders that pay on x's device where Inductor compiles the rest, and fuses all else."""
    finders: list[Callable[[Record, int], Iterable[Proposal]]] = [find_large_loss]
    finders += [find_add_rms_norm, find_add_layer_norm] if x.is_cuda else [_find_dropped_norm]
    finders += [find_dropout_add, find_linear]
    return finders if is_left_to_compiler(x) else [*finders, find_linear_act]


def _find_dropped_norm(record: Record, at: int) -> Iterable[Proposal]:
    """Norms behind a dropout, whose p is the last constant: a kernel draws in less time."""
    return (each for each in find_add_layer_norm(record, at) if each.constants[-1])
