"""The public functions, in the manner of torch.nn.functional."""

from torchweld.ops.bias_act import bias_act
from torchweld.ops.gated_act import gated_act
from torchweld.ops.layer_norm import layer_norm
from torchweld.ops.rms_norm import rms_norm

__all__ = ["bias_act", "gated_act", "layer_norm", "rms_norm"]
