"""Modules: drop-ins for torch.nn's, with the same constructors and state_dict keys."""

from torchweld.nn.activation import (
    GELU,
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
from torchweld.nn.experts import ExpertsMLP
from torchweld.nn.linear import MLP, GatedMLP, LinearAct, LinearGELU
from torchweld.nn.loss import CrossEntropyLoss, LinearCrossEntropy
from torchweld.nn.norm import AdaptiveLayerNorm, AdaptiveRMSNorm, LayerNorm, RMSNorm
from torchweld.nn.rotary import RotaryEmbedding

__all__ = [
    "GELU",
    "MLP",
    "AdaptiveLayerNorm",
    "AdaptiveRMSNorm",
    "BiasDropoutAdd",
    "BlockSparseAttention",
    "BlockSparseMultiheadAttention",
    "CrossEntropyLoss",
    "DropoutAddLayerNorm",
    "DropoutAddRMSNorm",
    "ExpertsMLP",
    "GatedMLP",
    "LayerNorm",
    "LinearAct",
    "LinearBatchNormAct",
    "LinearCrossEntropy",
    "LinearGELU",
    "QuickGELU",
    "RMSNorm",
    "ReLU",
    "ReLUSquared",
    "RotaryEmbedding",
    "SiLU",
    "Sigmoid",
    "SoftmaxDropout",
    "Tanh",
]
