"""Modules: drop-ins for torch.nn's, with the same constructors and state_dict keys."""

from torchweld.nn.dropout import SoftmaxDropout
from torchweld.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "RMSNorm", "SoftmaxDropout"]
