"""The public functions, in the manner of torch.nn.functional."""

import torch

from torchweld.ops.activation import bias_act, gated_act
from torchweld.ops.attention.block_sparse import block_sparse_attention
from torchweld.ops.batch_norm.batch_norm_act import batch_norm_act
from torchweld.ops.batch_norm.normalize_act import normalize_act
from torchweld.ops.experts.mlp import experts_mlp
from torchweld.ops.experts.route import route
from torchweld.ops.gemm.gated_mlp import gated_mlp
from torchweld.ops.gemm.linear_act import linear_act, linear_gelu
from torchweld.ops.gemm.linear_batch_norm_act import linear_batch_norm_act
from torchweld.ops.gemm.mlp import mlp
from torchweld.ops.loss.cross_entropy import cross_entropy
from torchweld.ops.loss.linear import linear_cross_entropy, linear_logprobs
from torchweld.ops.loss.logprobs import logprobs
from torchweld.ops.modulation import (
    adaptive_layer_norm,
    adaptive_rms_norm,
    gated_residual,
    gated_residual_layer_norm,
    gated_residual_rms_norm,
)
from torchweld.ops.norm import layer_norm, rms_norm
from torchweld.ops.quantize_8bit import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_one_bit import average_one_bit, dequantize_one_bit, quantize_one_bit
from torchweld.ops.residual import bias_dropout_add, dropout_add_layer_norm, dropout_add_rms_norm
from torchweld.ops.rotary.packed import rotary_embedding_packed_
from torchweld.ops.rotary.rotary_embedding import rotary_embedding, rotary_embedding_qk
from torchweld.ops.softmax import softmax_dropout

__all__ = [
    "adaptive_layer_norm",
    "adaptive_rms_norm",
    "average_one_bit",
    "batch_norm_act",
    "bias_act",
    "bias_dropout_add",
    "block_sparse_attention",
    "cross_entropy",
    "dequantize_8bit",
    "dequantize_one_bit",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "experts_mlp",
    "gated_act",
    "gated_mlp",
    "gated_residual",
    "gated_residual_layer_norm",
    "gated_residual_rms_norm",
    "layer_norm",
    "linear_act",
    "linear_batch_norm_act",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_logprobs",
    "logprobs",
    "mlp",
    "normalize_act",
    "quantize_8bit",
    "quantize_one_bit",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_packed_",
    "rotary_embedding_qk",
    "route",
    "softmax_dropout",
]

# torch.fx.symbolic_trace records calls of these names in this module without tracing into them.
for _name in __all__:
    torch.fx.wrap(_name)
