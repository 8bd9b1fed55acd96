"""The public functions, in the manner of torch.nn.functional."""

from torchweld.ops.layer_norm import layer_norm
from torchweld.ops.quantize_8bit import dequantize_8bit, quantize_8bit
from torchweld.ops.rms_norm import rms_norm
from torchweld.ops.softmax_dropout import softmax_dropout

__all__ = ["dequantize_8bit", "layer_norm", "quantize_8bit", "rms_norm", "softmax_dropout"]
