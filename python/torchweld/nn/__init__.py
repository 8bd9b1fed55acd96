"""Modules: drop-ins for torch.nn's, with the same constructors and state_dict keys."""

from torchweld.nn.activation import (
    GELU,
    Activation,
    QuickGELU,
    ReLU,
    ReLUSquared,
    Sigmoid,
    SiLU,
    Tanh,
)
from torchweld.nn.attention import BlockSparseAttention, BlockSparseMultiheadAttention
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
    "GELU",
    "MLP",
    "Activation",
    "BiasDropoutAdd",
    "BlockSparseAttention",
    "BlockSparseMultiheadAttention",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "GatedMLP",
    "LayerNorm",
    "LinearAct",
    "LinearBatchNormAct",
    "LinearGELU",
    "QuickGELU",
    "RMSNorm",
    "ReLU",
    "ReLUSquared",
    "SiLU",
    "Sigmoid",
    "SoftmaxDropout",
    "Tanh",
]
