"""Contract 4: errors name the argument, what came and what is accepted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import torchweld
from torchweld import functional, nn
from torchweld.random import Shard
from torchweld.sparse import BlockBias, BlockLayout

X, W, SEED = torch.ones(4, 8), torch.ones(8), torch.tensor([7])
META, META_NARROW = X.to("meta"), torch.ones(4, 7, device="meta")
CODES, ABSMAX = torch.zeros(2, 300, dtype=torch.uint8), torch.ones(2, 2)
FLAT, BITS, SCALE = torch.ones(20), torch.zeros(3, dtype=torch.uint8), torch.ones(1)
HEADS, COS = torch.ones(2, 4, 6, 16), torch.ones(6, 8)
Q, LAYOUT = torch.ones(2, 4, 64, 8), BlockLayout.dense(64, block=16)
THREE_HEADS = BlockLayout.random(64, 1, block=16, num_heads=3, different_layout_per_head=True)
PADDING, KEYS = torch.zeros(2, 64, dtype=torch.bool), torch.ones(1, 2, 50, 16)
BUCKETS = torch.zeros(9, dtype=torch.int64)
PICKED, CLASSES = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
LOSSES = ("linear_logprobs", "linear_cross_entropy")
PLANE = BlockBias.relative(torch.ones(4, 2), BUCKETS.view(3, 3))
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(functional, name) for name in functional.__all__},
    "attention of few queries": functional.block_sparse_attention,
    "BlockBias.relative": BlockBias.relative,
    "BlockBias.with_table": BlockBias.relative(torch.ones(1, 2), BUCKETS).with_table,
}
# Arguments that a function accepts; each case changes some of them.
ACCEPTED: dict[str, dict[str, Any]] = {
    "layer_norm": {"input": X, "normalized_shape": [8], "weight": W, "bias": W},
    "rms_norm": {"input": X, "normalized_shape": [8], "weight": W},
    "bias_act": {"input": X, "bias": W},
    "gated_act": {"gate": X, "up": X},
    "linear_act": {"input": X, "weight": X},
    "linear_gelu": {"input": X, "weight": X},
    "mlp": {"input": X, "up_weight": X, "up_bias": None, "down_weight": X.mT, "down_bias": None},
    "gated_mlp": {"input": X, "gate_weight": X, "up_weight": X, "down_weight": X.mT},
    "softmax_dropout": {"input": X},
    "bias_dropout_add": {"input": X, "bias": W, "residual": X},
    "dropout_add_layer_norm": {"input": X, "residual": X, "weight": W, "bias": W},
    "dropout_add_rms_norm": {"input": X, "residual": X, "weight": W},
    "adaptive_layer_norm": {"input": X, "scale": X, "shift": X},
    "adaptive_rms_norm": {"input": X, "scale": X, "shift": X},
    "gated_residual": {"input": X, "gate": X, "branch": X},
    "gated_residual_layer_norm": {"input": X, "gate": X, "branch": X, "scale": X, "shift": X},
    "gated_residual_rms_norm": {"input": X, "gate": X, "branch": X, "scale": X, "shift": X},
    "normalize_act": {"input": X, "mean": W, "var": W},
    "batch_norm_act": {
        **{"input": X, "running_mean": W.clone(), "running_var": W.clone()},
        "training": True,
    },
    "linear_batch_norm_act": {
        **{"input": X, "weight": X, "bias": None},
        **{"running_mean": W[:4].clone(), "running_var": W[:4].clone(), "training": True},
    },
    "quantize_8bit": {"input": ABSMAX},
    "dequantize_8bit": {"codes": CODES, "absmax": ABSMAX},
    "quantize_one_bit": {"input": FLAT},
    "dequantize_one_bit": {"bits": BITS, "scale": SCALE, "shape": 20},
    "average_one_bit": {"bits": BITS.view(1, 3), "scale": SCALE.view(1, 1), "size": 20},
    "rotary_embedding": {"x": HEADS, "cos": COS, "sin": COS},
    "rotary_embedding_qk": {"q": HEADS, "k": HEADS, "cos": COS, "sin": COS},
    "rotary_embedding_packed_": {"qkv": torch.ones(6, 96), "cos": COS, "sin": COS, "heads": 2},
    "block_sparse_attention": {"q": Q, "k": Q, "v": Q, "layout": LAYOUT},
    "attention of few queries": {
        **{"q": torch.ones(1, 4, 1, 16), "k": KEYS, "v": KEYS},
        "layout": BlockLayout.dense((1, 50)),
    },
    "experts_mlp": {
        **{"input": torch.ones(5, 10), "gate_up": torch.ones(3, 24, 10)},
        **{"down": torch.ones(3, 10, 12), "indices": PICKED, "weights": torch.ones(5, 2)},
    },
    "route": {"input": X, "k": 2},
    **{
        name: {"input": torch.ones(5, 6), "linear_weight": torch.ones(4, 6), "target": CLASSES}
        for name in LOSSES
    },
    "logprobs": {"input": torch.ones(5, 4), "target": CLASSES},
    "BlockBias.relative": {"table": torch.ones(1, 2), "bucket_of_distance": BUCKETS},
    "BlockBias.with_table": {"table": torch.ones(1, 2)},
}
# Calls whose input is the only tensor.
ALONE: list[tuple[str, dict[str, Any]]] = [
    *(("layer_norm", {"weight": None, "bias": None}), ("rms_norm", {"weight": None})),
    *(("softmax_dropout", {}), ("bias_act", {"bias": None, "activation": "relu"})),
    ("bias_act", {"bias": None, "activation": "silu"}),
]
FEW: list[dict[str, Any]] = [
    *({"q": torch.ones(1, 4, 1, 16).long()}, {"k": KEYS[..., :8]}, {"v": KEYS.half()}),
    *({"k": k, "v": k} for k in (torch.ones(1, 3, 50, 16), KEYS[:, :0], KEYS.to_sparse())),
    *({"layout": BlockLayout.dense((1, 51))}, {"layout": None}, {"causal": "yes"}),
    *({"scale": torch.inf}, {"scale": torch.nan}),
]
# The function, the arguments that are changed, and what the error says is accepted. It names the
# first of the changed ones, and where two do not go together also the other one.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("layer_norm", {"normalized_shape": [7]}, r"of input, whose shape is \[4, 8\]"),
    ("layer_norm", {"normalized_shape": []}, "last dimensions"),
    ("layer_norm", {"normalized_shape": [2, 4, 8]}, "last dimensions"),
    ("layer_norm", {"normalized_shape": "ab"}, "sequence of ints"),
    ("layer_norm", {"weight": W[:7]}, r"\[8\]"),
    ("layer_norm", {"bias": W[:1]}, r"\[8\]"),
    ("layer_norm", {"weight": W.double()}, r"float32.*\binput"),
    ("layer_norm", {"weight": W.half(), "bias": W.half(), "input": X.bfloat16()}, "or float32"),
    ("layer_norm", {"bias": W.bfloat16(), "input": X.bfloat16()}, "the same"),
    ("layer_norm", {"weight": W.to("meta")}, "device of input, cpu"),
    *[("layer_norm", {"eps": eps}, ">= 0") for eps in (-1e-5, torch.nan, "1")],
    ("layer_norm", {"input": X.to_sparse()}, "a dense or jagged tensor"),
    ("layer_norm", {"input": [[1.0]], "normalized_shape": [1]}, "a tensor"),
    ("rms_norm", {"normalized_shape": [7]}, r"\[4, 8\]"),
    ("rms_norm", {"weight": torch.ones(9)}, r"\[8\]"),
    *[("rms_norm", {"eps": eps}, ">= 0") for eps in (-1.0, torch.nan)],
    ("rms_norm", {"input": X.to_sparse()}, "a dense or jagged tensor"),
    ("bias_act", {"bias": W[:1]}, r"last size of input, \[8\]"),
    ("bias_act", {"bias": W.double()}, r"float32.*\binput"),
    ("bias_act", {"bias": W.to("meta")}, "device of input"),
    ("bias_act", {"input": X[0, 0], "bias": W[:1]}, r"\[\*, width\]"),
    ("bias_act", {"activation": "elu"}, "gelu or relu or silu or quick_gelu"),
    ("bias_act", {"approximate": "erf"}, "tanh"),
    ("gated_act", {"approximate": "tanh"}, "none"),
    ("gated_act", {"up": X[:1]}, r"shape of gate, \[4, 8\]"),
    ("gated_act", {"up": X.half()}, r"float32.*\bgate"),
    ("linear_act", {"weight": torch.ones(3, 7)}, r", 8\], to go with input"),
    ("linear_act", {"weight": W}, "out_features, 8"),
    ("linear_act", {"weight": X.half()}, r"float32.*\binput"),
    ("linear_act", {"bias": W}, r"\[4\], as weight"),
    ("linear_act", {"bias": W[:4].half()}, r"float32.*\bweight"),
    ("linear_act", {"activation": "x"}, "or"),
    ("mlp", {"down_weight": X}, r"out_features, 4\], to go with up_weight"),
    ("mlp", {"up_bias": W}, r"\[4\]"),
    ("gated_mlp", {"up_weight": X[:3]}, r"\[4, 8\]"),
    ("gated_mlp", {"down_weight": X}, r"features, 4\], to go with gate_weight"),
    ("softmax_dropout", {"input": [[1.0]], "p": 0.5}, "a tensor"),
    ("softmax_dropout", {"input": torch.ones(())}, "at least one"),
    ("softmax_dropout", {"mask": W[:7] > 0}, r"broadcasts to input, \[4, 8\]"),
    ("softmax_dropout", {"mask": X[None] > 0}, "broadcasts to input"),
    ("softmax_dropout", {"mask": W.half()}, "bool or float32, to go with input"),
    ("softmax_dropout", {"mask": W.to("meta")}, "device of input"),
    ("softmax_dropout", {"mask": [1.0]}, "a tensor"),
    ("softmax_dropout", {"mask": torch.ones(3, 4, 8, requires_grad=True)}, "broadcasts"),
    ("softmax_dropout", {"mask": torch.ones(5, requires_grad=True)}, "broadcasts"),
    ("softmax_dropout", {"mask": W.double().requires_grad_()}, "float32"),
    *[("softmax_dropout", {"p": p}, "from 0 to 1") for p in (1.5, torch.nan, "1")],
    ("softmax_dropout", {"scale": "1"}, "a number"),
    *[
        ("softmax_dropout", {"scale": scale, "input": X.bfloat16()}, "that float32 holds")
        for scale in (1e39, -1e300, torch.inf, torch.nan)
    ],
    *[
        ("softmax_dropout", {"seed": seed, "p": 0.5}, "an int")
        for seed in (-1, 0.5, True, numpy.bool_(True), numpy.complex64(1), numpy.zeros(1))
    ],
    ("softmax_dropout", {"seed": torch.tensor([1, 2]), "p": 0.5}, "one int64"),
    ("softmax_dropout", {"shard": Shard([8], [0]), "p": 0.5}, "2 of each"),
    ("softmax_dropout", {"shard": Shard([8, 8], [5, 0]), "p": 0.5}, "fits into"),
    ("softmax_dropout", {"shard": Shard([4, 16], [0, 8]), "p": 0.5}, "whole rows: 8 columns"),
    ("softmax_dropout", {"shard": Shard([3, 8], [0, 0]), "causal": True}, "fits"),
    ("bias_dropout_add", {"residual": X[:1]}, r"input's shape, \[4, 8\]"),
    ("bias_dropout_add", {"residual": X.double()}, r"float32.*\binput"),
    ("bias_dropout_add", {"residual": X.to("meta")}, "device of input"),
    ("bias_dropout_add", {"residual": None}, "a tensor"),
    ("bias_dropout_add", {"bias": W[:1]}, r"last dimension, \[8\]"),
    ("bias_dropout_add", {"bias": X}, r"last dimension, \[8\]"),
    ("bias_dropout_add", {"bias": W.half()}, "float32"),
    ("bias_dropout_add", {"input": W[0], "bias": None, "residual": W[0]}, "at least one"),
    ("bias_dropout_add", {"input": X.int(), "residual": X.int()}, "float32 or bfloat16"),
    ("bias_dropout_add", {"p": -0.1}, "from 0 to 1"),
    ("bias_dropout_add", {"shard": Shard([4, 8], [0, 1]), "p": 0.5}, "fits into"),
    ("dropout_add_layer_norm", {"input": [[1.0]], "residual": None, "bias": None}, "a tensor"),
    ("dropout_add_layer_norm", {"residual": X[0]}, r"input's shape, \[4, 8\]"),
    ("dropout_add_layer_norm", {"residual": X.double()}, "float32"),
    ("dropout_add_layer_norm", {"weight": W[:7]}, r"whose shape is \[4, 8\]"),
    ("dropout_add_layer_norm", {"weight": W.double()}, "float32"),
    ("dropout_add_layer_norm", {"bias": W[:1]}, r"normalized_shape, \[8\]"),
    ("dropout_add_layer_norm", {"normalized_shape": [7], "weight": None}, r"\[4, 8\]"),
    ("dropout_add_layer_norm", {"eps": -1.0}, ">= 0"),
    ("dropout_add_layer_norm", {"seed": -1, "p": 0.5}, "an int from 0"),
    ("dropout_add_layer_norm", {"shard": Shard([4, 16], [0, 8]), "p": 0.5}, r"ending in \[8\]"),
    *[
        ("dropout_add_rms_norm", {"y_dtype": dtype, "input": x, "residual": x, "weight": None}, "")
        for dtype, x in ((BF16, X), (F16, X.bfloat16()), (F32, X.double()), ("f", X))
    ],
    ("dropout_add_rms_norm", {"residual": X.double()}, r"float32.*\binput"),
    ("dropout_add_rms_norm", {"eps": torch.nan}, ">= 0"),
    ("adaptive_layer_norm", {"scale": X[:3]}, r"input's shape, \[4, 8\]"),
    ("adaptive_layer_norm", {"scale": X[:, :7]}, r"\[width\], \[batch, width\]"),
    ("adaptive_layer_norm", {"scale": None}, "a tensor"),
    ("adaptive_layer_norm", {"shift": W}, r"the shape of scale, \[4, 8\]"),
    ("adaptive_layer_norm", {"shift": X.half()}, "float32"),
    ("adaptive_layer_norm", {"shift": X.to("meta")}, "device of input"),
    ("adaptive_layer_norm", {"eps": -1.0}, ">= 0"),
    ("adaptive_layer_norm", {"input": X.int()}, "float32 or bfloat16"),
    ("adaptive_rms_norm", {"eps": torch.nan}, ">= 0"),
    ("adaptive_rms_norm", {"scale": X.double()}, "float32"),
    ("gated_residual", {"gate": X[:3]}, r"input's shape, \[4, 8\]"),
    ("gated_residual", {"branch": X[:3]}, r"input's shape, \[4, 8\]"),
    ("gated_residual", {"branch": X.double()}, r"float32.*\binput"),
    ("gated_residual", {"branch": X.to("meta")}, "device of input"),
    ("gated_residual_layer_norm", {"scale": W}, r"the shape of gate, \[4, 8\]"),
    ("gated_residual_layer_norm", {"branch": None}, "a tensor"),
    ("gated_residual_rms_norm", {"gate": None}, "a tensor"),
    ("normalize_act", {"mean": None}, "a tensor"),
    ("normalize_act", {"mean": W[:7]}, r"last size of input, \[8\]"),
    ("normalize_act", {"var": W.half()}, "float32"),
    ("normalize_act", {"var": W.double()}, r"float32.*\binput"),
    ("normalize_act", {"weight": W[:1]}, r"last size of input, \[8\]"),
    ("normalize_act", {"bias": W.bfloat16(), "weight": W, "input": X.bfloat16()}, "that of weight"),
    ("normalize_act", {"eps": -1.0}, ">= 0"),
    ("normalize_act", {"activation": "elu"}, "gelu or relu"),
    ("normalize_act", {"input": X.int()}, "float32 or bfloat16"),
    ("batch_norm_act", {"running_mean": None, "running_var": None, "training": False}, ".*both"),
    ("batch_norm_act", {"running_var": None}, "both"),
    ("batch_norm_act", {"running_mean": W[:1]}, r"last size of input, \[8\]"),
    ("batch_norm_act", {"running_mean": W.double(), "running_var": W.double()}, "float32"),
    ("batch_norm_act", {"input": X[:1]}, "more than 1 value per channel"),
    ("batch_norm_act", {"input": X[0, 0]}, r"\[\*, width\]"),
    ("batch_norm_act", {"momentum": "1"}, "a number"),
    ("batch_norm_act", {"process_group": "world"}, "ProcessGroup"),
    ("linear_batch_norm_act", {"weight": W}, "out_features, 8"),
    ("linear_batch_norm_act", {"bias": W}, r"\[4\]"),
    ("linear_batch_norm_act", {"running_mean": W, "running_var": W}, r"rows of weight, \[4\]"),
    ("linear_batch_norm_act", {"bn_weight": W}, r"rows of weight, \[4\]"),
    ("linear_batch_norm_act", {"input": X[:1]}, "more than 1 value per channel"),
    ("layer_norm", {"input": X.int()}, "float32 or bfloat16"),
    *[
        (name, {"input": X.to(dtype)} | changed, "float32 or bfloat16")
        for dtype in (torch.int32, torch.int64, torch.complex64, torch.bool)
        for name, changed in ALONE
    ],
    # The error of meta tensors is ours, not torch's that autocast lacks the device.
    ("linear_act", {"weight": META_NARROW, "input": META}, r".*\binput"),
    ("linear_gelu", {"weight": META_NARROW, "input": META}, r".*\binput"),
    ("linear_act", {"bias": META[0], "weight": META, "input": META}, r".*\bweight"),
    ("mlp", {"up_weight": META_NARROW, "input": META}, r".*\binput"),
    ("mlp", {"down_weight": META, "up_weight": META, "input": META}, r".*\bup_weight"),
    ("gated_mlp", {"gate_weight": META_NARROW, "input": META}, r".*\binput"),
    ("linear_batch_norm_act", {"weight": META_NARROW, "input": META}, r".*\binput"),
    # --- Experts ---
    *[
        ("experts_mlp", changed, "")
        for changed in (
            *({"indices": PICKED.short()}, {"indices": PICKED[:4]}, {"weights": torch.ones(5, 3)}),
            *({"gate_up": torch.ones(3, 7, 10)}, {"down": torch.ones(3, 10, 13)}),
            *({"down": torch.ones(2, 10, 12)}, {"down": torch.ones(3, 10, 12).double()}),
            *({"gate_up_bias": torch.ones(3, 12)}, {"down_bias": torch.ones(10)}),
            {"up_offset": 1.0, "gated": False, "gate_up": torch.ones(3, 12, 10)},
            {"limit": 0, "gated": False, "gate_up": torch.ones(3, 12, 10)},
            *({"limit": -1.0}, {"gated": 1}, {"activation": "swish"}),
        )
    ],
    *[
        ("route", changed, "")
        for changed in (
            *({"k": 0}, {"k": 9}, {"k": 5, "groups": 4, "top_groups": 2}, {"scores": "tanh"}),
            *({"groups": 3}, {"top_groups": 5, "groups": 4}, {"best_of_group": 0}, {"scale": "2"}),
            *({"choice_bias": W[:7]}, {"token_mask": X[:2, 0] > 0}, {"token_mask": X[:, 0]}),
            {"input": X.long()},
        )
    ],
    # --- Losses ---
    *[
        (name, changed, accepted)
        for name in LOSSES
        for changed, accepted in (
            *(({"softcap": -1.0}, "a number > 0"), ({"temperature": 0.0}, "")),
            *(({"temperature": torch.ones(3)}, ""), ({"logit_scale": 0.0}, "")),
            *(({"logits_dtype": torch.float16}, ""), ({"memory": 1.5}, "")),
            *(({"accumulate": "bf16"}, ""), ({"linear_bias": torch.ones(3)}, "")),
            *(({"linear_weight": torch.ones(4, 5)}, ""), ({"target": torch.ones(5)}, "")),
            ({"target": CLASSES[:4]}, ""),
        )
    ],
    *[
        ("logprobs", changed, accepted)
        for changed, accepted in (
            *(({"input": torch.tensor(1.0)}, r"\[\*, V\]"), ({"softcap": -1.0}, "a number > 0")),
            *(({"temperature": 0.0}, ""), ({"temperature": torch.ones(3)}, "the rows' shape")),
            *(({"logit_scale": 0.0}, ""), ({"return_entropy": 1}, "True or False")),
            *(({"target": torch.ones(5)}, ""), ({"target": CLASSES[:4]}, "or that and K")),
            *(({"ignore_index": 1.0}, "an integer"), ({"input": torch.ones(5, 4).long()}, "")),
            ({"inplace": True, "input": torch.ones(5, 4, requires_grad=True)}, "False"),
        )
    ],
    # --- Quantisers ---
    ("quantize_8bit", {"input": CODES}, "float32 or bfloat16"),
    ("quantize_8bit", {"input": ABSMAX.to_sparse()}, "a dense tensor"),
    ("quantize_8bit", {"input": [1.0]}, "a tensor"),
    *[("quantize_8bit", {"signed": None, "input": X.to(d)}, "True or") for d in (F32, F64, BF16)],
    ("dequantize_8bit", {"codes": ABSMAX}, "uint8"),
    ("dequantize_8bit", {"absmax": ABSMAX[:, :1]}, r"\[2, 2\], for codes"),
    ("dequantize_8bit", {"absmax": ABSMAX.double()}, "float32"),
    ("dequantize_8bit", {"absmax": ABSMAX.to("meta")}, "device of codes"),
    ("dequantize_8bit", {"dtype": torch.int8}, "float32 or"),
    *[("dequantize_8bit", {"signed": None, "dtype": d}, "True or") for d in (F32, F64, BF16)],
    ("quantize_one_bit", {"input": FLAT.int()}, "float32 or"),
    ("quantize_one_bit", {"block": 12}, "multiple of 8"),
    ("quantize_one_bit", {"error": FLAT[1:]}, r"\[20\]"),
    ("quantize_one_bit", {"error": FLAT.half()}, "float32 or bfloat16"),
    ("quantize_one_bit", {"error": FLAT.to("meta")}, "device of input"),
    ("dequantize_one_bit", {"bits": BITS[1:]}, r"\[3\]"),
    ("dequantize_one_bit", {"scale": SCALE, "block": 8}, r"\[3\]"),
    ("dequantize_one_bit", {"dtype": torch.int8}, "float32 or"),
    ("average_one_bit", {"bits": BITS, "scale": SCALE}, "workers"),
    ("average_one_bit", {"size": -1}, ">= 0"),
    ("average_one_bit", {"error": FLAT[1:]}, r"\[20\]"),
    # --- Rotary embeddings ---
    ("rotary_embedding", {"x": HEADS.int()}, "float32"),
    ("rotary_embedding", {"cos": None}, "a tensor"),
    ("rotary_embedding", {"sin": None}, "a tensor like cos"),
    ("rotary_embedding", {"sin": COS[:, :3]}, r"\[6, 8\]"),
    ("rotary_embedding", {"cos": COS[:5], "sin": COS[:5]}, "broadcasts"),
    ("rotary_embedding", {"cos": COS.double(), "sin": COS.double()}, "float32"),
    ("rotary_embedding", {"rotary_dim": None, "cos": COS.tile(3), "sin": COS.tile(3)}, "16"),
    ("rotary_embedding", {"rotary_dim": 7}, "an even"),
    ("rotary_embedding", {"cos": COS, "rotary_dim": 4}, "2 or 4"),
    ("rotary_embedding", {"position_ids": torch.full((2, 6), 6)}, "from 0 to 5"),
    ("rotary_embedding", {"position_ids": torch.full((2, 6), -1)}, "from 0 to 5"),
    ("rotary_embedding", {"position_ids": torch.ones(2, 6)}, "int64"),
    ("rotary_embedding", {"position_ids": torch.zeros(2, 5, dtype=torch.int64)}, "broadcasts"),
    *[
        ("rotary_embedding", {"cu_seqlens": torch.tensor(ends), "position_ids": at}, accepted)
        for ends, at, accepted in (
            *(([1, 6], None, "numbers"), ([0, 4, 3], None, "numbers"), ([0, 7], None, "numbers")),
            ([0, 6], torch.zeros(6, dtype=torch.int64), "one of the two"),
        )
    ],
    ("rotary_embedding", {"proportional": True, "interleaved": True}, "halves"),
    ("rotary_embedding", {"seq_dim": 1}, "-2 or -3"),
    ("rotary_embedding", {"norm_weight": W}, "both or neither"),
    ("rotary_embedding", {"norm_weight": torch.ones(17), "norm_eps": 1e-6}, r"\[16\]"),
    (
        "rotary_embedding",
        {"norm_weight": torch.ones(16), "norm_eps": 1e-6, "norm_across_heads": True},
        r"\[64\]",
    ),
    ("rotary_embedding", {"norm_eps": -1.0}, ">= 0"),
    ("rotary_embedding", {"norm_rounding": "all", "norm_eps": 1e-6}, "result"),
    *[
        ("rotary_embedding_qk", {"k": k}, "")
        for k in (HEADS[:1], HEADS[:, :, :3], HEADS[..., :8], HEADS.double(), HEADS[0])
    ],
    *[
        ("rotary_embedding_packed_", {"qkv": qkv}, "")
        for qkv in (torch.ones(6, 95), torch.ones(96, 6).mT)
    ],
    ("rotary_embedding_packed_", {"heads": 0}, ""),
    # --- Attention ---
    ("block_sparse_attention", {"q": [1.0]}, "a tensor"),
    ("block_sparse_attention", {"q": Q.int()}, "float32 or bfloat16"),
    ("block_sparse_attention", {"q": Q[None], "k": Q[None], "v": Q[None]}, "left out"),
    ("block_sparse_attention", {"layout": Q > 0}, "BlockLayout"),
    ("block_sparse_attention", {"layout": LAYOUT, "q": Q[:, :, :63]}, "63 x 64"),
    ("block_sparse_attention", {"layout": THREE_HEADS}, "4 or 1, and 4"),
    ("block_sparse_attention", {"k": Q.half()}, "float32"),
    ("block_sparse_attention", {"k": Q[..., :7]}, "fits q"),
    ("block_sparse_attention", {"k": Q[:, :3], "v": Q[:, :3]}, "divides q's 4"),
    ("block_sparse_attention", {"k": Q.to("meta")}, "device of q"),
    ("block_sparse_attention", {"v": Q[:, :2]}, r"\[2, 4, 64, 8\]"),
    ("block_sparse_attention", {"v": Q[:, :, :63]}, "any width"),
    ("block_sparse_attention", {"scale": "1"}, "a number"),
    ("block_sparse_attention", {"softcap": None}, "a number"),
    ("block_sparse_attention", {"key_padding_mask": PADDING.float()}, "bool"),
    ("block_sparse_attention", {"key_padding_mask": PADDING[:, :9]}, r"\[batch, keys\]"),
    ("block_sparse_attention", {"alibi_slopes": torch.ones(3)}, r"\[heads\]"),
    ("block_sparse_attention", {"sinks": torch.ones(3)}, r"\[heads\]"),
    ("block_sparse_attention", {"dropout_p": 1.5}, "from 0 to 1"),
    ("block_sparse_attention", {"seed": -1, "dropout_p": 0.5}, "an int"),
    ("block_sparse_attention", {"shard": Shard([2, 4, 80, 9], [0] * 4)}, "end in 8"),
    ("block_sparse_attention", {"shard": Shard([2, 4, 80, 8], [0, 0, 0, 2])}, "multiple of 8"),
    *[
        ("block_sparse_attention", {"bias": bias}, accepted)
        for bias, accepted in (
            *(([1.0], "BlockBias"), (torch.ones(()), "dimensions"), (torch.ones(64, 64) > 0, "f")),
            *((torch.ones(64, 64).half(), "float"), (torch.ones(64, 63), "broadcasts")),
            *((torch.ones(3, 64, 64), "2, 4, 64"), (torch.ones(1, 2, 4, 64, 64), "than q")),
            (torch.ones(64, 64, device="meta"), "device of q"),
            (BlockBias.relative(torch.ones(3, 2), BUCKETS), "4 heads or one"),
        )
    ],
    (
        "block_sparse_attention",
        {
            **{"bias": PLANE, "k": Q[:, :, :30], "v": Q[:, :, :30]},
            "layout": BlockLayout.dense((64, 30), block=16),
        },
        "on a line",
    ),
    *[("attention of few queries", changed, "") for changed in FEW],
    ("BlockBias.relative", {"table": torch.ones(2)}, "heads, buckets"),
    ("BlockBias.relative", {"bucket_of_distance": BUCKETS[:8]}, "2 n - 1"),
    ("BlockBias.relative", {"bucket_of_distance": BUCKETS + 2}, "below 2"),
    ("BlockBias.relative", {"bucket_of_distance": BUCKETS.to("meta")}, "device of table"),
    ("BlockBias.with_table", {"table": torch.ones(1, 3)}, "heads, 2"),
]
backends = pytest.mark.parametrize("backend", [None, "cpu", "eager"])


@backends
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_cases_change_is_accepted(name: str, backend: str | None) -> None:
    with torchweld.use_backend(backend):
        FUNCTIONS[name](**ACCEPTED[name])


@backends
@pytest.mark.parametrize(
    ("name", "changed", "accepted"), BAD, ids=[f"{name}, {next(iter(c))}" for name, c, _ in BAD]
)
def test_arguments_are_named(
    name: str, changed: dict[str, Any], accepted: str, backend: str | None
) -> None:
    """The automatic choice, the kernel and eager raise the same typed error."""
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            torchweld.use_backend(backend),
            pytest.raises(torchweld.ArgumentError) as caught,
        ):
            FUNCTIONS[name](**ACCEPTED[name] | changed)
        assert caught.value.argument == next(iter(changed))
        assert caught.match(f"accepted: .*{accepted}")


# A module, the sizes that it is made of, and other arguments.
CONSTRUCTORS: list[tuple[Callable[..., Any], tuple[int, ...], dict[str, Any]]] = [
    (nn.SoftmaxDropout, (), {"p": 2}),
    (nn.SoftmaxDropout, (), {"scale": 1e400}),
    (nn.BiasDropoutAdd, (), {"p": -0.1}),
    (nn.DropoutAddLayerNorm, (8,), {"p": torch.nan}),
    (nn.DropoutAddRMSNorm, (8,), {"eps": -1.0}),
    (nn.LinearAct, (8, 8), {"activation": "swish"}),
    (nn.LinearGELU, (8, 8), {"approximate": "erf"}),
    (nn.MLP, (8, 8), {"activation": "swish"}),
    (nn.GatedMLP, (8, 8), {"activation": "swish"}),
    (nn.GatedMLP, (8, 8), {"approximate": "tanh", "activation": "relu"}),
    (nn.LinearBatchNormAct, (8, 8), {"activation": "swish"}),
    (nn.LinearBatchNormAct, (8, 8), {"eps": -1.0}),
    (nn.ReLU, (), {"inplace": True}),
    (nn.SiLU, (), {"inplace": True}),
    (nn.GELU, (), {"approximate": "erf"}),
]


@pytest.mark.parametrize(("module", "sizes", "changed"), CONSTRUCTORS)
def test_constructors_refuse_the_arguments_that_calls_refuse(
    module: Callable[..., Any], sizes: tuple[int, ...], changed: dict[str, Any]
) -> None:
    with pytest.raises(torchweld.ArgumentError) as caught:
        module(*sizes, **changed)
    # An MLP is made of a LinearAct, which refuses.
    named = "LinearAct" if module is nn.MLP else module.__name__
    assert (caught.value.function, caught.value.argument) == (named, next(iter(changed)))


def test_a_quantized_tensor_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch > 2.11 warns about quantisation itself
        x = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(torchweld.ArgumentError, match="input is a quantized tensor"):
        functional.layer_norm(x, [8])


def test_errors_are_what_torchs_callers_catch() -> None:
    """The error is a ValueError, and a RuntimeError, which torch raises here."""
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            functional.layer_norm(X, [7])
