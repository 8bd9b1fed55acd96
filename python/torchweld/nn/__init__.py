"""Modules: drop-ins for torch.nn's, with the same constructors and state_dict keys."""

from torchweld.nn.dropout import SoftmaxDropout
from torchweld.nn.linear import MLP, GatedMLP, LinearAct, LinearGELU
from torchweld.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "GatedMLP",
    "LayerNorm",
    "LinearAct",
    "LinearGELU",
    "RMSNorm",
    "SoftmaxDropout",
]
