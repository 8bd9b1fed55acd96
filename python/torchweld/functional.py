"""The public functions, in the manner of torch.nn.functional."""

from torchweld.ops.layer_norm import layer_norm
from torchweld.ops.rms_norm import rms_norm
from torchweld.ops.softmax_dropout import softmax_dropout

__all__ = ["layer_norm", "rms_norm", "softmax_dropout"]
