"""Recognisers of modules to weld, one function each, in the order of use.

A recogniser takes a module and a View of the model. It yields a Proposal, or a Skipped with the
reason not to change it. Append your own to PATTERNS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torchweld.fusion.patterns.activation import (
    find_activation,
    find_batch_norm_act,
    find_linear_act,
)
from torchweld.fusion.patterns.attention import (
    find_multihead_attention,
    find_softmax_dropout,
    find_transformer_layer,
)
from torchweld.fusion.patterns.biased_attention import find_biased_attention
from torchweld.fusion.patterns.dropout_add_norm import find_dropout_add_norm
from torchweld.fusion.patterns.experts import find_experts
from torchweld.fusion.patterns.gated_mlp import find_gated_mlp
from torchweld.fusion.patterns.gated_product import find_gated_product
from torchweld.fusion.patterns.loss import find_loss
from torchweld.fusion.patterns.norm import find_norm
from torchweld.fusion.patterns.plain import find_plain_attention, find_plain_linear
from torchweld.fusion.patterns.rotary import find_rotary
from torchweld.fusion.view import View
from torchweld.fusion.weld import Proposal, Skipped

Pattern = Callable[[torch.nn.Module, View], Iterator[Proposal | Skipped]]

# torch's own classes, by identity, with the recognisers that may have something to say of them.
# Pairs of them are found from the module around them.
TORCHS: dict[type[torch.nn.Module], tuple[Pattern, ...]] = {
    **dict.fromkeys(
        (
            *(torch.nn.Embedding, torch.nn.Dropout, torch.nn.Identity),
            *(torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.SiLU, torch.nn.Softmax),
            *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d),
            *(torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Flatten, torch.nn.Unflatten),
            *(torch.nn.TransformerEncoder, torch.nn.TransformerDecoder),
            torch.nn.modules.linear.NonDynamicallyQuantizableLinear,
        ),
        (),
    ),
    torch.nn.Linear: (find_plain_linear,),
    torch.nn.Sequential: (find_batch_norm_act, find_softmax_dropout, find_linear_act),
    torch.nn.LayerNorm: (find_norm,),
    torch.nn.RMSNorm: (find_norm,),
    torch.nn.GELU: (find_activation,),
    torch.nn.MultiheadAttention: (find_multihead_attention,),
    torch.nn.TransformerEncoderLayer: (find_transformer_layer,),
    torch.nn.TransformerDecoderLayer: (find_transformer_layer,),
}

PATTERNS: list[Pattern] = [
    find_transformer_layer,
    find_multihead_attention,
    find_gated_mlp,
    find_experts,
    find_dropout_add_norm,
    find_batch_norm_act,
    find_softmax_dropout,
    find_gated_product,
    find_linear_act,
    find_activation,
    find_biased_attention,
    find_rotary,
    find_norm,
    find_loss,
    find_plain_linear,
    find_plain_attention,
]
_OURS = frozenset(PATTERNS)


def concerns(pattern: Pattern, module: torch.nn.Module) -> bool:
    """Whether a recogniser may know a module. Users' recognisers see every module."""
    known = TORCHS.get(type(module))
    return known is None or pattern in known or pattern not in _OURS
