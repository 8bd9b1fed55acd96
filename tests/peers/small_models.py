"""Models of transformers with a few thousand parameters each, and their batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

from torchweld.fusion import peer

# The argument of a forward that takes a cache, and the result's attribute.
_CODE = inspect.unwrap(transformers.LlamaForCausalLM.forward).__code__
# In another release models differ: peer_welds.py counts what is welded there.
IS_TESTED_RELEASE = transformers.__version__.startswith(f"{peer.TESTED}.")
CACHE = "cache" if "cache" in _CODE.co_varnames else "past_key_values"

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def tokens(rows: int = 4) -> dict[str, torch.Tensor]:
    """Text to predict."""
    ids = torch.randint(3, 128, (rows, 24), generator=_generator())
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(4, 3, 32, 32, generator=_generator())
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


def _dropout(p: float) -> dict[str, float]:
    return {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}


def _opt(p: float) -> Any:
    config = transformers.OPTConfig(
        vocab_size=128,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
        dropout=p,
    )
    return transformers.OPTForCausalLM(config)


def _gpt2(p: float) -> Any:
    config = transformers.GPT2Config(
        vocab_size=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=p,
        embd_pdrop=p,
        attn_pdrop=p,
    )
    return transformers.GPT2LMHeadModel(config)


def _t5(p: float, activation: str = "gated-gelu") -> Any:
    config = transformers.T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj=activation,
        decoder_start_token_id=0,
        dropout_rate=p,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit(p: float) -> Any:
    sizes = {key: value for key, value in _SIZES.items() if "vocab" not in key}
    config = transformers.ViTConfig(
        **sizes, **_dropout(p), image_size=32, patch_size=8, num_labels=4
    )
    return transformers.ViTForImageClassification(config)


def _decoder(name: str, **more: Any) -> Callable[[float], Any]:
    def build(p: float) -> Any:
        config = getattr(transformers, f"{name}Config")(**_GROUPED, **more, attention_dropout=p)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


def _encoder(name: str) -> Callable[[float], Any]:
    def build(p: float) -> Any:
        config = getattr(transformers, f"{name}Config")(**_SIZES, **_dropout(p))
        return getattr(transformers, f"{name}ForMaskedLM")(config)

    return build


_LOSS = {"linear_cross_entropy in training, logits when read": 1}
_LIKE_LLAMA = {"rms_norm": 5, "gated_act (silu)": 2, "rotary_embedding_qk": 2, **_LOSS}
_GATE_FIRST = "rms_norm of gated_act (silu)"
_NORMED = "rotary_embedding_qk, q and k norm"
# How it is made, its batch, and how many modules of a kind fuse() welds in it.
MODELS: dict[str, tuple[Callable[[float], Any], Callable[[], dict[str, Any]], dict[str, int]]] = {
    "opt": (_opt, tokens, {"layer_norm": 5, "linear_act (relu)": 2, **_LOSS}),
    "gpt2": (_gpt2, tokens, {"layer_norm": 5, "linear_act (gelu by tanh)": 2, **_LOSS}),
    "bert": (
        _encoder("Bert"),
        tokens,
        {"layer_norm": 2, "linear_act (gelu)": 3, "dropout_add_layer_norm": 4, **_LOSS},
    ),
    "roberta": (
        _encoder("Roberta"),
        tokens,
        {"layer_norm": 2, "linear_act (gelu)": 2, "dropout_add_layer_norm": 4, **_LOSS},
    ),
    "vit": (_vit, _images, {"layer_norm": 5, "linear_act (gelu)": 2}),
    "t5": (
        _t5,
        tokens,
        {
            "rms_norm": 12,
            "gated_act (gelu by tanh)": 4,
            "on the CPU block_sparse_attention over all keys": 6,
            **_LOSS,
        },
    ),
    "llama": (_decoder("Llama"), tokens, _LIKE_LLAMA),
    "qwen2": (_decoder("Qwen2"), tokens, _LIKE_LLAMA),
    "mistral": (_decoder("Mistral"), tokens, _LIKE_LLAMA),
    "gemma": (
        _decoder("Gemma", head_dim=16),
        tokens,
        {
            "rms_norm, weight + 1": 5,
            "gated_act (gelu by tanh)": 2,
            "rotary_embedding_qk": 2,
            **_LOSS,
        },
    ),
    "phi3": (_decoder("Phi3"), tokens, _LIKE_LLAMA),
}


_STATE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_MIXED = {**_STATE, "mamba_chunk_size": 8, "mamba_expand": 2}


def _causal(name: str, config: Any) -> Any:
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _gemma3(p: float) -> Any:
    return _causal("Gemma3", transformers.Gemma3TextConfig(**_GROUPED, head_dim=16))


def _mamba2(p: float) -> Any:
    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 8}
    return _causal("Mamba2", transformers.Mamba2Config(**sizes, **ids, **heads))


def _nemotron_h(p: float) -> Any:
    heads = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
    more = {"num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "chunk_size": 8}
    config = transformers.NemotronHConfig(**{**_GROUPED, **heads, **more, "head_dim": 16})
    return _causal("NemotronH", config)


# Norms with gates, on heads, of other forms; with how many modules fuse() welds.
WITH_OTHER_NORMS: dict[str, tuple[Callable[[float], Any], dict[str, int]]] = {
    "qwen3": (
        _decoder("Qwen3", head_dim=16),
        {"rms_norm": 5, "gated_act (silu)": 2, _NORMED: 2, **_LOSS},
    ),
    "gemma3": (
        _gemma3,
        {"rms_norm, weight + 1": 9, "gated_act (gelu by tanh)": 2, _NORMED: 2, **_LOSS},
    ),
    "cohere": (
        _decoder("Cohere", bos_token_id=1, eos_token_id=2),
        {"gated_act (silu)": 2, "layer_norm": 3, "rotary_embedding_qk": 2, **_LOSS},
    ),
    "nemotron": (
        _decoder("Nemotron"),
        {"linear_act (relu2)": 2, "layer_norm, weight + 1": 5, "rotary_embedding_qk": 2, **_LOSS},
    ),
    "mamba2": (_mamba2, {"rms_norm": 3, _GATE_FIRST: 2, "bias_act (silu)": 2, **_LOSS}),
    "falcon_h1": (
        _decoder("FalconH1", **_MIXED, mamba_d_ssm=128, mamba_rms_norm=True),
        {
            "gated_act (silu)": 2,
            "bias_act (silu)": 2,
            "rms_norm": 5,
            "rms_norm, gated_act (silu)": 2,
            "rotary_embedding_qk": 2,
            **_LOSS,
        },
    ),
    "nemotron_h": (
        _nemotron_h,
        {
            **{"rms_norm": 5, _GATE_FIRST: 2, "bias_act (silu)": 2, "linear_act (relu2)": 1},
            **_LOSS,
        },
    ),
    "bamba": (
        _decoder("Bamba", **_MIXED, attn_layer_indices=[1]),
        {
            "gated_act (silu)": 2,
            "rms_norm": 5,
            _GATE_FIRST: 1,
            "bias_act (silu)": 1,
            "rotary_embedding_qk": 1,
            **_LOSS,
        },
    ),
}
if not hasattr(transformers, "NemotronHConfig"):  # not in older releases
    del WITH_OTHER_NORMS["nemotron_h"]


def build(name: str, p: float = 0.0) -> Any:
    """Build the same model each time; p is the probability of its dropouts."""
    torch.manual_seed(0)
    return (MODELS if name in MODELS else WITH_OTHER_NORMS)[name][0](p)


def mixture(name: str) -> Any:
    """A mixture of four experts."""
    torch.manual_seed(0)
    count = "num_local_experts" if name == "Mixtral" else "num_experts"
    return _decoder(name, **{count: 4}, num_experts_per_tok=2, head_dim=16)(0.0)


def batch(name: str) -> dict[str, Any]:
    """The batch that the model learns from."""
    return MODELS[name][1]()
