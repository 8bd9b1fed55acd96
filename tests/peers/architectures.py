"""Small models of all language architectures of the installed transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)
# A config gets the sizes that it has a name for.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "vocab_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_hidden_groups", "inner_group_num"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LARGEST = 30e6


def list_names() -> dict[str, str]:
    """The class of each architecture with a head for language."""
    names: dict[str, Any] = {}
    for mapping in MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping).items():
            names.setdefault(kind, name if isinstance(name, str) else name[0])
    return {kind: name for kind, name in names.items() if kind in CONFIG_MAPPING}


def make(kind: str, **more: Any) -> torch.nn.Module:
    """A small model of this architecture; `more` are sizes beyond SIZES."""
    return make_class(getattr(transformers, list_names()[kind]), CONFIG_MAPPING[kind], more)


def make_class(model_class: Any, config_class: Any, more: dict[str, Any]) -> torch.nn.Module:
    """A small model of this class."""
    config = _make_config(config_class, more)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(
            f"{model_class.__name__} is large, with {size / 1e6:.0f} million parameters"
        )
    return model_class(config)  # type: ignore[no-any-return]


def _make_config(config_class: Any, more: dict[str, Any]) -> Any:
    """A small config. Some refuse a size that they have."""
    sizes = {n: size for n, size in (SIZES | more).items() if hasattr(config_class(), n)}
    try:
        config = config_class(**sizes)
    except Exception:
        sizes.pop("num_key_value_heads", None)
        config = config_class(**sizes)
    config.decoder_start_token_id = 0  # as pretrained ones have
    return config
