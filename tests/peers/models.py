"""Small models of transformers with a few thousand parameters each, and their batches."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchweld

# In another release models differ: peer_welds.py counts what is welded there.
_MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()
_TESTED: Any = re.search(r"^TRANSFORMERS := transformers==(\d+\.\d+)", _MAKEFILE, re.MULTILINE)
IS_TESTED_RELEASE = transformers.__version__.startswith(f"{_TESTED[1]}.")
# The argument of a forward that takes a cache, and the result's attribute.
_CODE = inspect.unwrap(transformers.LlamaForCausalLM.forward).__code__
CACHE = "cache" if "cache" in _CODE.co_varnames else "past_key_values"

# A config gets the sizes that it has a name for.
_NAMES: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embedding_size n_positions max_position_embeddings",
    128: "intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim vocab_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_local_experts num_experts n_routed_experts",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank v_head_dim",
    16: "head_dim d_kv qk_head_dim kv_lora_rank state_size mamba_d_state",
    8: "rotary_dim qk_rope_head_dim qk_nope_head_dim",
    1: "num_hidden_groups inner_group_num",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LARGEST = 30e6
# Sizes and kinds of layers of single architectures, in addition.
_SPLIT = {"head_dim": 8, "n_group": 2, "topk_group": 1}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32"), _SPLIT),
    **dict.fromkeys(("kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _LAYERS),
    "bailing_hybrid": _LAYERS | {"n_group": 2, "topk_group": 1},
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 1, "expert_layer_offset": 0},
    },
    "longcat_flash": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


def make_config(config_class: Any, **more: Any) -> Any:
    """A small config. Some refuse a size that they have."""
    sizes = {n: size for n, size in (SIZES | more).items() if hasattr(config_class(), n)}
    if "qk_rope_head_dim" in sizes:  # latent attention: a rotation has this width, each head keys
        more = {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}
        if "partial_rotary_factor" in (getattr(config_class(), "rope_parameters", None) or {}):
            del more["head_dim"]  # of which it takes a part by itself, as in Mistral 4
        sizes |= {name: sizes[other] for name, other in more.items() if name in sizes}
    for refused in ("num_key_value_heads", "head_dim", ""):
        try:
            config = config_class(**sizes)
            break
        except Exception:
            if not refused:
                raise
            sizes.pop(refused, None)
    config.decoder_start_token_id = 0  # as pretrained ones have
    return config


def make(name: str, end: str = "ForCausalLM", **more: Any) -> Any:
    """The same small model of this name each time; `more` are sizes beyond SIZES."""
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{end}")(make_config(_find_config(name), **more))


def _find_config(name: str) -> Any:
    prefix = f"{name}Text" if name in ("Gemma3", "Gemma3n", "Llama4") else name
    return getattr(transformers, f"{prefix}Config")


def tokens(rows: int = 4) -> dict[str, torch.Tensor]:
    """Text to predict."""
    ids = torch.randint(3, 128, (rows, 24), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


def images(size: int = 32) -> dict[str, torch.Tensor]:
    pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(7))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


# --- All language architectures of the installed transformers -------------------------------------

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)


def list_names() -> dict[str, str]:
    """The class of each architecture with a head for language."""
    names: dict[str, Any] = {}
    for mapping in MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping).items():
            names.setdefault(kind, name if isinstance(name, str) else name[0])
    return {kind: name for kind, name in names.items() if kind in CONFIG_MAPPING}


def make_kind(kind: str, **more: Any) -> torch.nn.Module:
    """A small model of this architecture."""
    cls = getattr(transformers, list_names()[kind])
    return make_class(cls, CONFIG_MAPPING[kind], OWN.get(kind, {}) | more)


def make_class(model_class: Any, config_class: Any, more: dict[str, Any]) -> torch.nn.Module:
    """A small model of this class."""
    config = make_config(config_class, **more)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(
            f"{model_class.__name__} is large, with {size / 1e6:.0f} million parameters"
        )
    return model_class(config)  # type: ignore[no-any-return]


def list_welds(model: torch.nn.Module) -> Counter[str]:
    """The ops that the captured calls of a fused model have, in all of its layers."""
    return Counter(row.becomes for row in torchweld.explain_fusion(model) if row.welded)


# --- Named models ---------------------------------------------------------------------------------

_CAUSAL, _MASKED, _PAIRS = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"
_WINDOW: dict[str, Any] = {"sliding_window": 16}
_IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": 4}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1}
_LATENT |= {"n_shared_experts": 1, "n_group": 2, "topk_group": 1}

# The end of the model's name, and sizes beyond SIZES, which those in `_WHOLE` have none of.
_MADE: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("GPT2", "OpenAIGPT"), ("LMHeadModel", {})),
    "GPTNeo": (_CAUSAL, {"attention_types": [[["global", "local"], 1]], "window_size": 16}),
    **dict.fromkeys(
        (
            *("GPTJ", "GPTNeoX", "CodeGen", "Bloom", "Mpt", "BioGpt", "TrOCR"),
            *("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "Cohere", "Olmo", "Olmo2", "Starcoder2"),
            *("StableLm", "Granite", "Nemotron", "Persimmon", "SmolLM3", "Arcee", "Apertus"),
            *("Qwen3", "Gemma", "Glm", "Glm4", "Helium", "Ernie4_5", "SeedOss"),
            *("Mixtral", "GraniteMoe", "Qwen2Moe", "Qwen3Moe"),
        ),
        (_CAUSAL, {}),
    ),
    "GPTBigCode": (_CAUSAL, {"num_key_value_heads": 1}),
    "OPT": (_CAUSAL, {"word_embed_proj_dim": 64}),
    "Falcon": (_CAUSAL, {"new_decoder_architecture": False}),
    **dict.fromkeys(
        ("Gemma2", "Gemma3", "Cohere2", "Olmo3", "Exaone4", "GptOss"), (_CAUSAL, _WINDOW)
    ),
    "DeepseekV2": (_CAUSAL, _LATENT | {"topk_method": "greedy"}),
    "DeepseekV3": (_CAUSAL, _LATENT),
    **dict.fromkeys(
        (
            *("Bert", "Roberta", "Electra", "DistilBert", "MPNet", "Tapas", "XLMRobertaXL"),
            *("MegatronBert", "RobertaPreLayerNorm", "RoFormer", "SqueezeBert"),
        ),
        (_MASKED, {}),
    ),
    "Albert": (_MASKED, {"embedding_size": 32}),
    "DebertaV2": (_MASKED, {"relative_attention": True, "pos_att_type": ["p2c"]}),
    "ModernBert": (_MASKED, {"cls_token_id": 1, "sep_token_id": 2}),
    "RemBert": (_MASKED, {"input_embedding_size": 32, "output_embedding_size": 32}),
    "BigBird": (_MASKED, {"attention_type": "original_full"}),
    "Yoso": (_MASKED, {"use_expectation": True}),
    "Esm": (_MASKED, {"pad_token_id": 1, "mask_token_id": 2}),
    **dict.fromkeys(("Bart", "Pegasus", "MT5", "UMT5", "MBart", "PLBart", "Mvp"), (_PAIRS, {})),
    "T5": (_PAIRS, {"feed_forward_proj": "gated-gelu"}),
    "PegasusX": (_PAIRS, {"num_global_tokens": 8, "block_size": 8}),
    "Funnel": (
        _MASKED,
        {
            **{"vocab_size": 128, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16},
            **{"d_inner": 128, "num_decoder_layers": 1},
        },
    ),
    "Gemma3n": (
        _CAUSAL,
        {
            **{**_WINDOW, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
            **{"altup_num_inputs": 2, "laurel_rank": 8, "num_kv_shared_layers": 0},
            **{"layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0, 0.0]},
        },
    ),
    **dict.fromkeys(("ViT", "DeiT"), ("ForImageClassification", _IMAGES)),
    "Dinov2": ("ForImageClassification", {**_IMAGES, "mlp_ratio": 2}),
    "Swin": (
        "ForImageClassification",
        {
            **{"image_size": 32, "patch_size": 4, "num_labels": 4, "embed_dim": 32},
            **{"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
        },
    ),
    "Mamba2": (_CAUSAL, {"num_heads": 8, "n_groups": 1, "chunk_size": 8}),
}
_WHOLE = {"Funnel", "Swin"}
NAMES = tuple(_MADE)
_STATE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_MIXED: dict[str, Any] = {**_STATE, "mamba_chunk_size": 8, "mamba_expand": 2}
_HEADS = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
_MADE |= {
    "FalconH1": (_CAUSAL, {**_MIXED, "mamba_d_ssm": 128, "mamba_rms_norm": True}),
    "Bamba": (_CAUSAL, {**_MIXED, "attn_layer_indices": [1]}),
    "NemotronH": (
        _CAUSAL,
        {
            **{**SIZES, **_HEADS, "num_hidden_layers": 4, "chunk_size": 8},
            "hybrid_override_pattern": "M*-M",
        },
    ),
}
_WHOLE.add("NemotronH")

_LOSS = {"linear_cross_entropy": 1}
_LIKE_LLAMA = {"rms_norm": 1, "dropout_add_rms_norm": 4, "gated_act": 2, "rotary_embedding_qk": 2}
_LIKE_LLAMA |= _LOSS
# How many of each op a training step of a fused model has.
MODELS: dict[str, dict[str, int]] = {
    "OPT": {"layer_norm": 4, "dropout_add_layer_norm": 1, "linear_act": 2, **_LOSS},
    "GPT2": {"layer_norm": 1, "dropout_add_layer_norm": 4, "linear_act": 2, **_LOSS},
    "Bert": {"layer_norm": 2, "dropout_add_layer_norm": 4, "linear_act": 3, **_LOSS},
    "Roberta": {"layer_norm": 1, "dropout_add_layer_norm": 5, "linear_act": 3, **_LOSS},
    "ViT": {"layer_norm": 1, "dropout_add_layer_norm": 4, "linear_act": 2},
    "T5": {
        **{"rms_norm": 2, "dropout_add_rms_norm": 10, "gated_act": 4, **_LOSS},
        "block_sparse_attention": 6,
    },
    **dict.fromkeys(("Llama", "Qwen2", "Mistral", "Phi3"), _LIKE_LLAMA),
    "Gemma": {"rms_norm": 5, "gated_act": 2, "rotary_embedding_qk": 2, **_LOSS},
}
# Norms with gates, on heads, of other forms.
WITH_OTHER_NORMS: dict[str, dict[str, int]] = {
    "Qwen3": _LIKE_LLAMA,
    "Gemma3": {"rms_norm": 9, "gated_act": 2, "rotary_embedding_qk": 2, **_LOSS},
    "Cohere": {"layer_norm": 3, "gated_act": 2, "rotary_embedding_qk": 2, **_LOSS},
    "Nemotron": {
        **{"layer_norm": 1, "dropout_add_layer_norm": 4, "linear_act": 2, **_LOSS},
        "rotary_embedding_qk": 2,
    },
    "Mamba2": {"rms_norm": 3, "dropout_add_rms_norm": 2, "gated_act": 2, **_LOSS},
    "FalconH1": {
        **{"rms_norm": 3, "dropout_add_rms_norm": 4, "gated_act": 4, **_LOSS},
        "rotary_embedding_qk": 2,
    },
    "NemotronH": {
        **{"rms_norm": 3, "dropout_add_rms_norm": 4, "gated_act": 2, **_LOSS},
        "linear_act": 1,
    },
    "Bamba": {
        **{"rms_norm": 2, "dropout_add_rms_norm": 4, "gated_act": 3, **_LOSS},
        "rotary_embedding_qk": 1,
    },
}
if not hasattr(transformers, "NemotronHConfig"):  # not in older releases
    del WITH_OTHER_NORMS["NemotronH"]
_DROPOUTS = {
    *("dropout", "dropout_rate", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def build(name: str, p: float = 0.0) -> Any:
    """Build the same model each time; p is the probability of its dropouts."""
    end, more = _MADE[name]
    torch.manual_seed(0)
    kind = _find_config(name)
    config = kind(**more) if name in _WHOLE else make_config(kind, **more)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, p if key in _DROPOUTS else 0.0)
    model = getattr(transformers, f"{name}{end}")(config)
    if hasattr(config, "num_experts_per_tok") and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def batch(name: str) -> dict[str, torch.Tensor]:
    """The batch that the model learns from."""
    return images() if _MADE[name][0] == "ForImageClassification" else tokens()
