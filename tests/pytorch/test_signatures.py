"""Public functions and modules take torch's arguments: names, order, kinds and defaults.

`FUNCTIONS` and `MODULES` name the counterparts in torch, and every difference with its reason. An
argument of ours that torch lacks is no difference if it is taken only by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as theirs

import torchweld
from torchweld import distributed, functional, nn

KEYWORD = inspect.Parameter.KEYWORD_ONLY
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Differences = Mapping[str, str]


def _many(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


NO_INPLACE = {"inplace": "the result always has memory of its own"}
DROPOUT = {
    "p": "0 by default, and by keyword, since many ops drop nothing",
    "training": "by keyword like p",
    **NO_INPLACE,
}
RESIDUAL = {"residual": "the other summand"}
STATISTICS = _many("running_mean running_var", "batch norm's, after the linear layer's")
LAST = _many("dim _stacklevel dtype", "softmax goes over the last dimension, in the input's dtype")
NORM = {
    **RESIDUAL,
    "normalized_shape": "by keyword, since weight has that shape",
    "weight": "no default, since it usually gives normalized_shape",
    "eps": "by keyword, since normalized_shape is",
}
APPROXIMATE = {"approximate": "by keyword, as torch's parser takes it"}

FUNCTIONS: list[tuple[Callable[..., Any], Callable[..., Any], Differences]] = [
    (functional.layer_norm, theirs.layer_norm, {}),
    (functional.rms_norm, theirs.rms_norm, {}),
    (functional.batch_norm_act, theirs.batch_norm, {}),
    (
        functional.normalize_act,
        theirs.batch_norm,
        _many("running_mean running_var mean var", "these statistics are never updated")
        | _many("training momentum", "it never computes statistics"),
    ),
    (functional.cross_entropy, theirs.cross_entropy, {}),
    (functional.softmax_dropout, theirs.softmax, {**LAST, "mask": "masked before the softmax"}),
    (functional.softmax_dropout, theirs.dropout, {**DROPOUT, "mask": "of the softmax"}),
    (functional.linear_act, theirs.linear, {}),
    (functional.linear_gelu, theirs.linear, {}),
    (
        functional.linear_batch_norm_act,
        theirs.linear,
        {"bias": "no default, since the statistics follow it"}
        | STATISTICS
        | _many("bn_weight bn_bias training momentum eps", "batch norm's, in its order"),
    ),
    (
        functional.linear_batch_norm_act,
        theirs.batch_norm,
        _many("weight bias", "the linear layer's")
        | _many("bn_weight bn_bias", "batch norm's weight and bias"),
    ),
    (functional.bias_act, theirs.gelu, {**APPROXIMATE, "bias": "added before the activation"}),
    (
        functional.bias_dropout_add,
        theirs.dropout,
        {**DROPOUT, **RESIDUAL, "bias": "added before the dropout"},
    ),
    (functional.dropout_add_layer_norm, theirs.layer_norm, NORM),
    (functional.dropout_add_rms_norm, theirs.rms_norm, NORM),
    (
        functional.dropout_add_layer_norm,
        theirs.dropout,
        {**DROPOUT, **RESIDUAL, **_many("weight bias", "the norm's")},
    ),
    (
        functional.dropout_add_rms_norm,
        theirs.dropout,
        {**DROPOUT, **RESIDUAL, "weight": "the norm's"},
    ),
    (
        functional.block_sparse_attention,
        theirs.scaled_dot_product_attention,
        _many("query key value q k v", "named as in FlashAttention, with its meaning of causal")
        | {
            "attn_mask": "the layout is the mask",
            "layout": "stands at the place of the mask",
            "dropout_p": "by keyword, as p in every function",
            "is_causal": "`causal` is another mask if lengths differ: bottom right",
            "scale": "by keyword, since attn_mask is missing",
            "enable_gqa": "fewer heads of keys need no switch",
        },
    ),
]
NO_COUNTERPART = {
    **_many("average_one_bit dequantize_one_bit quantize_one_bit", "torch has no 1-bit quantiser"),
    **_many("dequantize_8bit quantize_8bit", "torch has no quantiser of this map"),
    **_many("adaptive_layer_norm adaptive_rms_norm gated_residual", "torch has no function for it"),
    **_many("gated_residual_layer_norm gated_residual_rms_norm", "torch has no function for it"),
    **_many("AdaptiveLayerNorm AdaptiveRMSNorm", "torch's norms have no condition"),
    "gated_act": "torch.nn.functional.glu takes one tensor",
    **_many("experts_mlp gated_mlp linear_logprobs logprobs mlp", "torch has no function for it"),
    **_many("rotary_embedding_packed_ route", "torch has no function for it"),
    **_many("rotary_embedding rotary_embedding_qk", "torch has no released function for it"),
    "BlockSparseAttention": "torch has no attention module without projections",
    **_many("ExpertsMLP QuickGELU ReLUSquared", "torch has no module for it"),
    "RotaryEmbedding": "torch has no released module for it",
}
# Functions that do not begin with `input`.
OTHER_FIRST = {
    "average_one_bit": "bits: from quantize_one_bit",
    "block_sparse_attention": "q, k and v",
    "dequantize_one_bit": "bits: from quantize_one_bit",
    "dequantize_8bit": "codes: from quantize_8bit",
    "gated_act": "gate and up: neither is the only input",
    "rotary_embedding": "x, as in the function that is proposed for torch",
    "rotary_embedding_packed_": "qkv: all three",
    "rotary_embedding_qk": "q and k",
}

LAYERS = {"out_features": "the last layer's, None being in_features", "hidden_features": "between"}
BATCH_NORM = {
    "num_features": "out_features",
    **_many("in_features out_features", "the linear layer's"),
    "bias": "the linear layer's",
    **_many("eps momentum affine track_running_stats", "by keyword, after torch.nn.Linear's"),
}
# Differences of constructors, then of forwards.
SAME = ["LayerNorm", "RMSNorm", "CrossEntropyLoss", "GELU", "ReLU", "SiLU", "Sigmoid", "Tanh"]
MODULES: list[tuple[Any, Any, Differences, Differences]] = [
    *((getattr(nn, name), getattr(torch.nn, name), {}, {}) for name in SAME),
    (nn.LinearAct, torch.nn.Linear, {}, {}),
    (nn.LinearGELU, torch.nn.Linear, {}, {}),
    (nn.LinearBatchNormAct, torch.nn.Linear, {}, {}),
    (nn.LinearBatchNormAct, torch.nn.BatchNorm1d, BATCH_NORM, {}),
    (nn.MLP, torch.nn.Linear, LAYERS, {}),
    (
        nn.GatedMLP,
        torch.nn.Linear,
        {**LAYERS, "bias": "none by default, as in Llama, Mistral, Qwen and Gemma"},
        {},
    ),
    (nn.DropoutAddLayerNorm, torch.nn.LayerNorm, {}, RESIDUAL),
    (nn.DropoutAddRMSNorm, torch.nn.RMSNorm, {}, {**RESIDUAL, **_many("x input", "torch's is x")}),
    (
        nn.SoftmaxDropout,
        torch.nn.Dropout,
        {"p": "0 by default", **NO_INPLACE, **_many("scale causal", "the softmax's")},
        {"mask": "of the softmax"},
    ),
    (
        nn.BiasDropoutAdd,
        torch.nn.Dropout,
        {"p": "0 by default", **NO_INPLACE},
        {**RESIDUAL, "bias": "of the previous layer"},
    ),
    (
        nn.BlockSparseMultiheadAttention,
        torch.nn.MultiheadAttention,
        {},
        {"need_weights": "False by default: weights are never made, and True is refused"},
    ),
]

if hasattr(theirs, "linear_cross_entropy"):
    FUNCTIONS.append((functional.linear_cross_entropy, theirs.linear_cross_entropy, {}))
    of_module = {
        "out_features": "a loss for each of several positions goes through the function",
        "options": "the chunks follow from `memory`",
    }
    MODULES.append((nn.LinearCrossEntropy, torch.nn.LinearCrossEntropyLoss, of_module, {}))
else:
    since = dict.fromkeys(("linear_cross_entropy", "LinearCrossEntropy"), "torch has it since 2.13")
    NO_COUNTERPART.update(since)


def _signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters by name, without self; of torch's builtins as their docstring has them."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        head = (function.__doc__ or "").strip().split(" -> ")[0]
        scope: dict[str, Any] = {}
        exec(f"def {head}: pass", scope)
        signature = inspect.signature(scope[function.__name__])
    parameters = signature.parameters.values()
    return {p.name: p for p in parameters if p.name != "self" and p.kind not in VARIADIC}


def _differences(ours: Callable[..., Any], torchs: Callable[..., Any]) -> set[str]:
    """The names that are missing, or differ in default, in kind or in order."""
    mine, other = _signature(ours), _signature(torchs)
    found = {name for name in other if name not in mine}
    found |= {name for name, p in mine.items() if name not in other and p.kind is not KEYWORD}
    shared = [name for name in mine if name in other]
    for name in shared:
        if mine[name].kind is not other[name].kind or mine[name].default != other[name].default:
            found.add(name)
    in_order = [name for name in shared if name not in found and mine[name].kind is not KEYWORD]
    assert in_order == [name for name in other if name in in_order], "another order"
    return found


def _compare(ours: Callable[..., Any], torchs: Callable[..., Any], listed: Differences) -> None:
    found = _differences(ours, torchs)
    assert found <= set(listed)
    # Torch of other versions lacks some.
    known = {*_signature(ours), *_signature(torchs)}
    assert not {name for name in listed if name in known} - found, "no longer a difference"


@pytest.mark.parametrize(
    ("ours", "torchs", "listed"),
    FUNCTIONS,
    ids=[f"{ours.__name__}-{torchs.__name__}" for ours, torchs, _ in FUNCTIONS],
)
def test_functions_take_torchs_arguments(
    ours: Callable[..., Any], torchs: Callable[..., Any], listed: Differences
) -> None:
    _compare(ours, torchs, listed)


@pytest.mark.parametrize(
    ("ours", "torchs", "constructor", "forward"),
    MODULES,
    ids=[f"{ours.__name__}-{torchs.__name__}" for ours, torchs, *_ in MODULES],
)
def test_modules_take_torchs_arguments(
    ours: Any, torchs: Any, constructor: Differences, forward: Differences
) -> None:
    _compare(ours, torchs, constructor)
    _compare(ours.forward, torchs.forward, forward)


def test_everything_public_is_compared() -> None:
    compared = {ours.__name__ for ours, *_ in (*FUNCTIONS, *MODULES)}
    public = {*functional.__all__, *nn.__all__}
    where = "FUNCTIONS, MODULES or NO_COUNTERPART must have it"
    assert compared | set(NO_COUNTERPART) == public, where
    assert not compared & set(NO_COUNTERPART)


def test_one_name_at_one_place() -> None:
    """What several functions take, they take alike."""
    by_keyword = {"p", "dropout_p", "training", "seed", "shard", "activation", "approximate"}
    for name in functional.__all__:
        parameters = _signature(getattr(functional, name))
        first = next(iter(parameters))
        assert (first == "input") is (name not in OTHER_FIRST)
        batch_norms = {"training"} if "running_mean" in parameters else set()
        for shared in by_keyword.intersection(parameters) - batch_norms:
            assert parameters[shared].kind is KEYWORD
        # Suffixes tell weights and biases of several layers apart.
        assert not any(parameter in ("w1", "w2", "b1", "b2") for parameter in parameters)
    assert list(_signature(functional.mlp))[:5:2] == ["input", "up_bias", "down_bias"]
    assert {"up_weight", "down_weight"} <= {*_signature(functional.mlp)}
    assert {"up_weight", "down_weight"} <= {*_signature(functional.gated_mlp)}
    for attention in (functional.block_sparse_attention, distributed.ring_attention):
        assert list(_signature(attention))[:4] == ["q", "k", "v", "layout"]
    for name in nn.__all__:
        constructor = _signature(getattr(nn, name))
        for shared in {"activation", "recompute"}.intersection(constructor):
            assert constructor[shared].kind is KEYWORD


def test_only_the_public_is_exported() -> None:
    assert not hasattr(nn, "Activation")
    assert torchweld.random.__all__ == ["Shard", "make_mask", "seed"]
