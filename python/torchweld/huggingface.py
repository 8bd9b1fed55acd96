"""Sparse attention for models of transformers; importing this module imports transformers.

from torchweld import huggingface, sparse

huggingface.register()
model = AutoModel.from_pretrained(name, attn_implementation="torchweld_sparse")
huggingface.set_layout(model, functools.partial(sparse.BlockLayout.bigbird, block=64))
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.ops.attention import reference
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


def mask(
    q_length: int,
    kv_length: int,
    attention_mask: Any = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **kwargs: Any,
) -> Any:
    """Passes over whole sequences get the mask of their keys, others that of sdpa."""
    if q_length != kv_length:
        kwargs |= {"attention_mask": attention_mask, "mask_function": mask_function}
        return sdpa_mask(q_length=q_length, kv_length=kv_length, **kwargs)
    if not _is_plain(mask_function):
        came = "one of packed sequences, prefixes, images or chunks"
        accepted = (
            "causal ones, bidirectional ones and sliding windows; leave out position_ids that begin"
            " anew, and put documents into the layout by BlockLayout.documents or from_mask_fn"
        )
        raise ArgumentError(NAME, "mask_function", came, accepted)
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()


def _is_plain(function: Callable[..., Any]) -> bool:
    """Whether a mask function says no more than `is_causal`, or is the model's sliding window.

    A layout replaces that window. The library makes its functions anew, of the same code.
    """
    code = getattr(function, "__code__", None)
    if code is _ALL_OF:
        return all(map(_is_plain, inspect.getclosurevars(function).nonlocals["mask_functions"]))
    return code in _PLAIN


_ALL_OF = and_masks(causal_mask_function).__code__
_PLAIN = [
    function.__code__
    for function in (
        causal_mask_function,
        bidirectional_mask_function,
        sliding_window_overlay(1),
        sliding_window_bidirectional_overlay(1),
    )
]
# What attention functions are given that does not change what this one computes. The mask says what
# positions are packed, and the layout replaces a sliding window.
_WITHOUT_EFFECT = {
    *("sliding_window", "position_ids", "cache_position", "use_cache", "deterministic"),
    *("num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"),
}


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
    for name, given in kwargs.items():
        if name not in _WITHOUT_EFFECT and given is not None and given is not False:
            accepted = "None: attention over a layout does not take it"
            raise ArgumentError(NAME, name, f"a {type(given).__name__}", accepted)
    several = query.shape[2] != key.shape[2]
    if attention_mask is not None and attention_mask.ndim == 4 and not several:
        came = f"of shape {list(attention_mask.shape)}"
        raise ArgumentError(NAME, "attention_mask", came, "[batch, keys], 1 where a key counts")
    if several and (attention_mask is None or attention_mask.ndim == 4):
        if softcap or s_aux is not None:
            given = (softcap or 0.0, s_aux, dropout if module.training else 0.0)
            summed = _masked(query, key, value, attention_mask, scaling, *given)
            return summed.transpose(1, 2).contiguous(), None
        # A mask that is left out begins at the first key: a cache may have room for more.
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal
        )
    dense = state.generates or several
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


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Attention with a mask of tokens, a soft cap and sinks, which torch's has not."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    z = reference.scores(query, key, None, scale, softcap, None).float()
    beside = None if sinks is None else sinks.float().view(-1, 1, 1)
    weights, _ = reference.softmax(z, mask, beside)
    weights = torch.nn.functional.dropout(weights, dropout, dropout > 0)
    return weights.to(value.dtype) @ value
