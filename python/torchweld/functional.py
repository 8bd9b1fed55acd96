"""The public functions, in the manner of torch.nn.functional."""

import torch

from torchweld.ops.activation.bias_act import bias_act
from torchweld.ops.activation.gated_act import gated_act
from torchweld.ops.attention.block_sparse import block_sparse_attention
from torchweld.ops.batch_norm.batch_norm_act import batch_norm_act
from torchweld.ops.batch_norm.normalize_act import normalize_act
from torchweld.ops.gemm.gated_mlp import gated_mlp
from torchweld.ops.gemm.linear_act import linear_act, linear_gelu
from torchweld.ops.gemm.linear_batch_norm_act import linear_batch_norm_act
from torchweld.ops.gemm.mlp import mlp
from torchweld.ops.norm.layer_norm import layer_norm
from torchweld.ops.norm.rms_norm import rms_norm
from torchweld.ops.quantize_1bit import dequantize_1bit, dequantize_mean, quantize_1bit
from torchweld.ops.quantize_8bit import dequantize_8bit, quantize_8bit
from torchweld.ops.residual.bias_dropout_add import bias_dropout_add
from torchweld.ops.residual.dropout_add_layer_norm import dropout_add_layer_norm
from torchweld.ops.residual.dropout_add_rms_norm import dropout_add_rms_norm
from torchweld.ops.softmax_dropout import softmax_dropout

__all__ = [
    "batch_norm_act",
    "bias_act",
    "bias_dropout_add",
    "block_sparse_attention",
    "dequantize_1bit",
    "dequantize_8bit",
    "dequantize_mean",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "gated_act",
    "gated_mlp",
    "layer_norm",
    "linear_act",
    "linear_batch_norm_act",
    "linear_gelu",
    "mlp",
    "normalize_act",
    "quantize_1bit",
    "quantize_8bit",
    "rms_norm",
    "softmax_dropout",
]

# torch.fx.symbolic_trace records calls of these names in this module without tracing into them.
for _name in __all__:
    torch.fx.wrap(_name)
