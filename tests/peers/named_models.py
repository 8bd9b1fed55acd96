"""Named architectures of transformers, made small, each with a batch."""

from __future__ import annotations

from typing import Any

import small_models
import torch
import transformers

_SIZES = small_models._SIZES
_GROUPED = {**small_models._GROUPED, "bos_token_id": 1, "eos_token_id": 2}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_FOUR = {"num_local_experts": 4, **_EXPERTS}
_QWEN_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS}
_OLD = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
_OLD |= {"bos_token_id": 1, "eos_token_id": 2}
_MLA = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
_T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    **{f"{name}_token_id": at for at, name in enumerate(("pad", "bos", "eos", "decoder_start"))},
}
_DECODER = {"vocab_size": 128, "d_model": 64, "max_position_embeddings": 64, **_IDS}
_DECODER |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
_IMAGES = {key: size for key, size in _SIZES.items() if "vocab" not in key}
_IMAGES |= {"image_size": 32, "patch_size": 8, "num_labels": 4}
_HEAD_16 = {**_GROUPED, "head_dim": 16}
_WINDOW = {**_HEAD_16, "sliding_window": 16}

# The name of a configuration, the end of the model's name, and the settings.
_MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", _OLD),
    "GPTNeo": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "max_position_embeddings": 64,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPTJ": ("ForCausalLM", {**_OLD, "rotary_dim": 8}),
    "GPTNeoX": ("ForCausalLM", {**_SIZES, "bos_token_id": 1, "eos_token_id": 2}),
    "GPTBigCode": ("ForCausalLM", _OLD),
    "CodeGen": ("ForCausalLM", {**_OLD, "rotary_dim": 8}),
    "OPT": ("ForCausalLM", {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "Bloom": ("ForCausalLM", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Falcon": ("ForCausalLM", {**_SIZES, "new_decoder_architecture": False}),
    "Mpt": ("ForCausalLM", {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    **dict.fromkeys(
        (
            *("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "Cohere", "Olmo", "Olmo2", "Starcoder2"),
            *("StableLm", "Granite", "Nemotron", "Persimmon", "SmolLM3", "Arcee", "Apertus"),
        ),
        ("ForCausalLM", _GROUPED),
    ),
    **dict.fromkeys(
        ("Qwen3", "Gemma", "Glm", "Glm4", "Helium", "Ernie4_5", "SeedOss"),
        ("ForCausalLM", _HEAD_16),
    ),
    **dict.fromkeys(("Gemma2", "Cohere2", "Olmo3", "Exaone4"), ("ForCausalLM", _WINDOW)),
    "Gemma3": ("ForCausalLM", _WINDOW),
    "Mixtral": ("ForCausalLM", {**_GROUPED, **_FOUR}),
    "GraniteMoe": ("ForCausalLM", {**_GROUPED, **_FOUR}),
    "GptOss": ("ForCausalLM", {**_WINDOW, **_FOUR}),
    "Qwen2Moe": ("ForCausalLM", {**_GROUPED, **_QWEN_EXPERTS}),
    "Qwen3Moe": ("ForCausalLM", {**_HEAD_16, **_QWEN_EXPERTS}),
    "DeepseekV2": ("ForCausalLM", {**_GROUPED, **_MLA, "topk_method": "greedy"}),
    "DeepseekV3": ("ForCausalLM", {**_GROUPED, **_MLA}),
    "Bert": ("ForMaskedLM", _SIZES),
    "Roberta": ("ForMaskedLM", _SIZES),
    "Electra": ("ForMaskedLM", {**_SIZES, "embedding_size": 64}),
    "Albert": ("ForMaskedLM", {**_SIZES, "embedding_size": 32}),
    "DistilBert": (
        "ForMaskedLM",
        {"vocab_size": 128, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    "DebertaV2": ("ForMaskedLM", {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c"]}),
    "ModernBert": ("ForMaskedLM", {**_GROUPED, "cls_token_id": 1, "sep_token_id": 2}),
    "MPNet": ("ForMaskedLM", _SIZES),
    "Bart": ("ForConditionalGeneration", _BART),
    "Pegasus": ("ForConditionalGeneration", _BART),
    "T5": ("ForConditionalGeneration", _T5),
    "MT5": ("ForConditionalGeneration", _T5),
    "UMT5": ("ForConditionalGeneration", _T5),
    **dict.fromkeys(("MBart", "PLBart", "Mvp"), ("ForConditionalGeneration", _BART)),
    "PegasusX": ("ForConditionalGeneration", {**_BART, "num_global_tokens": 8, "block_size": 8}),
    **dict.fromkeys(
        ("Tapas", "XLMRobertaXL", "MegatronBert", "RobertaPreLayerNorm"), ("ForMaskedLM", _SIZES)
    ),
    "RoFormer": ("ForMaskedLM", {**_SIZES, "embedding_size": 64}),
    "RemBert": (
        "ForMaskedLM",
        {**_SIZES, **_IDS, "input_embedding_size": 32, "output_embedding_size": 32},
    ),
    "BigBird": ("ForMaskedLM", {**_SIZES, "attention_type": "original_full"}),
    "Yoso": ("ForMaskedLM", {**_SIZES, "use_expectation": True}),
    "Esm": ("ForMaskedLM", {**_SIZES, "pad_token_id": 1, "mask_token_id": 2}),
    "SqueezeBert": ("ForMaskedLM", {**_SIZES, "embedding_size": 64}),
    "Funnel": (
        "ForMaskedLM",
        {
            **{"vocab_size": 128, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16},
            **{"d_inner": 128, "num_decoder_layers": 1},
        },
    ),
    "BioGpt": ("ForCausalLM", {**_SIZES, **_IDS}),
    "TrOCR": ("ForCausalLM", _DECODER),
    "OpenAIGPT": ("LMHeadModel", {key: size for key, size in _OLD.items() if "token" not in key}),
    "Gemma3n": (
        "ForCausalLM",
        {
            **{**_WINDOW, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
            **{"altup_num_inputs": 2, "laurel_rank": 8, "num_kv_shared_layers": 0},
            **{"layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0, 0.0]},
        },
    ),
    "ViT": ("ForImageClassification", _IMAGES),
    "DeiT": ("ForImageClassification", _IMAGES),
    "Dinov2": ("ForImageClassification", {**_IMAGES, "mlp_ratio": 2}),
    "Swin": (
        "ForImageClassification",
        {
            **{"image_size": 32, "patch_size": 4, "num_labels": 4, "embed_dim": 32},
            **{"depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0},
        },
    ),
    "Mamba2": (
        "ForCausalLM",
        {
            **{key: _GROUPED[key] for key in _GROUPED if "intermediate" not in key},
            **{"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 8},
        },
    ),
}
NAMES = tuple(_MADE)


def build(name: str) -> Any:
    """Build the same model each time, without dropout."""
    end, settings = _MADE[name]
    prefix = f"{name}Text" if name in ("Gemma3", "Gemma3n") else name
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**settings)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return getattr(transformers, f"{name}{end}")(config)


def make_batch(name: str) -> dict[str, torch.Tensor]:
    """Make the batch that the model learns from."""
    if _MADE[name][0] == "ForImageClassification":
        return small_models._images()
    return small_models.tokens()
