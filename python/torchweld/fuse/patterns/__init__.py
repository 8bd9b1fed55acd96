"""Recognisers of modules to weld, one function each, in the order of use.

A recogniser takes a module and a View of the model. It yields a Proposal, or a Left with the reason
to leave the module alone. Append your own to PATTERNS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torchweld.fuse.patterns.activation import find_activation
from torchweld.fuse.patterns.attention import find_multihead_attention, find_softmax_dropout
from torchweld.fuse.patterns.batch_norm_act import find_batch_norm_act
from torchweld.fuse.patterns.dropout_add_norm import find_dropout_add_norm
from torchweld.fuse.patterns.gated_mlp import find_gated_mlp
from torchweld.fuse.patterns.linear_act import find_linear_act
from torchweld.fuse.patterns.norm import find_norm
from torchweld.fuse.patterns.transformer_layer import find_transformer_layer
from torchweld.fuse.view import Left, Proposal, View

Pattern = Callable[[torch.nn.Module, View], Iterator[Proposal | Left]]

PATTERNS: list[Pattern] = [
    find_transformer_layer,
    find_multihead_attention,
    find_gated_mlp,
    find_dropout_add_norm,
    find_batch_norm_act,
    find_softmax_dropout,
    find_linear_act,
    find_activation,
    find_norm,
]
