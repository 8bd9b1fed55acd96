"""Modules: drop-ins for torch.nn's, with the same constructors and state_dict keys."""

from torchweld.nn.batch_norm import LinearBatchNormAct
from torchweld.nn.dropout import (
    BiasDropoutAdd,
    DropoutAddLayerNorm,
    DropoutAddRMSNorm,
    SoftmaxDropout,
)
from torchweld.nn.linear import MLP, GatedMLP, LinearAct, LinearGELU
from torchweld.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "BiasDropoutAdd",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GatedMLP",
    "LayerNorm",
    "LinearAct",
    "LinearBatchNormAct",
    "LinearGELU",
    "RMSNorm",
    "SoftmaxDropout",
]
