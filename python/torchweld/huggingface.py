"""Sparse attention for models of transformers; importing this module imports transformers.

from torchweld import huggingface, sparse

huggingface.register()
model = AutoModel.from_pretrained(name, attn_implementation="torchweld_sparse")
huggingface.set_layout(model, functools.partial(sparse.BlockLayout.bigbird, block=64))
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockLayout, Layouts
from torchweld.sparse.layouts import Source

NAME = "torchweld_sparse"
# The attribute that holds a module's layouts.
_LAYOUTS, _PASS = "torchweld_layouts", "torchweld_pass"
_DENSE = Layouts(lambda lengths: BlockLayout.dense(lengths))
# Names of the modules with which a decoder attends to its encoder.
_CROSS = re.compile("cross_?att|encoder_?att|encdec_?att", re.IGNORECASE)


class _Pass:
    """What is known about the pass that a model is in."""

    def __init__(self) -> None:
        self.generates = False


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers. It may be called again."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def set_layout(
    model: torch.nn.Module, layout: Source, layers: Collection[int] | None = None
) -> None:
    """Give a model's attention a layout.

    Its attention modules share the layouts. Attention stays dense in three cases: in passes of
    `generate`, which get `past_key_values`; with fewer queries than keys; and from a decoder to its
    encoder.

    Args:
        model: a model whose attn_implementation is "torchweld_sparse". Call this separately for an
            encoder and a decoder.
        layout: a BlockLayout of the sequences' length, or a function that makes one for any length,
            such as `functools.partial(BlockLayout.bigbird, block=64)`.
        layers: the `layer_idx` of the layers to change; None: all.
    """
    layouts, state = Layouts(layout), getattr(model, _PASS, None)
    if state is None:
        state = _Pass()
        setattr(model, _PASS, state)
        model.register_forward_pre_hook(_before_pass, with_kwargs=True)
    given = 0
    for name, module in model.named_modules():
        if layers is None or getattr(module, "layer_idx", None) in layers:
            crosses = getattr(module, "is_cross_attention", False) or _CROSS.search(name)
            setattr(module, _LAYOUTS, (_DENSE if crosses else layouts, state))
            given += 1
    if not given:
        accepted = "layer_idx of the model's attention modules"
        raise ArgumentError("set_layout", "layers", repr(layers), accepted)


def _before_pass(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    getattr(model, _PASS).generates = kwargs.get("past_key_values") is not None


def mask(q_length: int, kv_length: int, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Passes over whole sequences get the mask of their keys, others that of sdpa."""
    if q_length != kv_length:
        return sdpa_mask(
            q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: inputs [batch, heads, length, head_dim]."""
    layouts, state = getattr(module, _LAYOUTS, (None, None))
    if layouts is None or state is None:
        came = f"{type(module).__name__} without a layout"
        accepted = "a model that was given to torchweld.huggingface.set_layout"
        raise ArgumentError(NAME, "module", came, accepted)
    if attention_mask is not None and attention_mask.ndim == 4:
        if query.shape[2] == key.shape[2]:
            came = f"of shape {list(attention_mask.shape)}"
            raise ArgumentError(NAME, "attention_mask", came, "[batch, keys], 1 where a key counts")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    dense = state.generates or query.shape[2] != key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    y = functional.block_sparse_attention(
        query,
        key,
        value,
        (_DENSE if dense else layouts).of(query, key),
        scale=scaling,
        causal=bool(causal),
        key_padding_mask=None if attention_mask is None else ~attention_mask,
        sinks=s_aux,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        training=module.training,
    )
    assert isinstance(y, torch.Tensor)
    return y.transpose(1, 2).contiguous(), None
