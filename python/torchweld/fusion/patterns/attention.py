"""torch.nn.MultiheadAttention, and softmax + dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.modules import forward_of, why_not_change
from torchweld.fusion.patterns.edges import find_pair, propose_pair
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Weld
from torchweld.sparse import BlockLayout, Layouts

ON_CPU = "on the CPU block_sparse_attention over all keys"

# --- torch.nn.MultiheadAttention ------------------------------------------------------------------


class MultiheadAttention(Weld):
    """torch.nn.MultiheadAttention, for calls that need gradients.

    If the caller asks for weights, softmax_dropout computes them. Otherwise attention on the CPU is
    block_sparse_attention over all keys: torch's own is slower there, and with dropout it keeps all
    scores. All other calls run torch's forward.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = (query, key, value)
        batched = query.ndim == key.ndim == value.ndim == 3 and not query.is_nested
        if torch.is_grad_enabled() and batched:
            if need_weights and not is_causal:
                return _attend_with_weights(
                    self, inputs, key_padding_mask, attn_mask, average_attn_weights
                )
            if not need_weights and _is_plain(self, inputs, key_padding_mask, attn_mask, is_causal):
                return _attend(self, inputs, key_padding_mask, is_causal), None
        return self.welded_from.forward(  # type: ignore[attr-defined,no-any-return]
            self,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )


def _is_plain(
    module: Any,
    inputs: tuple[torch.Tensor, ...],
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> bool:
    """Whether a call runs on the CPU and masks scores only by position and padding."""
    lengths = {x.shape[1 if module.batch_first else 0] for x in inputs}
    causal_or_none = attn_mask is None or (is_causal and len(lengths) == 1)
    padded = key_padding_mask is None or key_padding_mask.dtype == torch.bool
    return inputs[0].device.type == "cpu" and causal_or_none and padded


def _attend(
    module: Any,
    inputs: tuple[torch.Tensor, ...],
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    q, k, v = (_split_heads(part, module) for part in _project(module, inputs))
    result = functional.block_sparse_attention(
        q,
        k,
        v,
        _DENSE.of(q, k),
        causal=is_causal,
        key_padding_mask=key_padding_mask,
        dropout_p=module.dropout,
        training=module.training,
    )
    return _project_out(module, result)  # type: ignore[arg-type]


_DENSE = Layouts(lambda lengths: BlockLayout.dense(lengths))


def _attend_with_weights(
    module: Any,
    inputs: tuple[torch.Tensor, ...],
    key_padding_mask: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    average: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute torch.nn.functional.multi_head_attention_forward with softmax_dropout."""
    q, k, v = (_split_heads(part, module) for part in _project(module, inputs))
    weights = functional.softmax_dropout(
        q @ k.transpose(-2, -1),
        _make_mask(q, key_padding_mask, attn_mask),
        scale=1 / math.sqrt(module.head_dim),
        p=module.dropout,
        training=module.training,
    )
    return _project_out(module, weights @ v), weights.mean(1) if average else weights


def _project_out(module: Any, of_heads: torch.Tensor) -> torch.Tensor:
    result = of_heads.transpose(1, 2).flatten(2)
    result = linear(result, module.out_proj.weight, module.out_proj.bias)
    return result if module.batch_first else result.transpose(0, 1)


def _project(module: Any, inputs: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    bias = module.in_proj_bias
    if inputs[0] is inputs[1] is inputs[2]:
        yield from linear(inputs[0], module.in_proj_weight, bias).chunk(3, -1)
        return
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for x, weight, part in zip(inputs, module.in_proj_weight.chunk(3), biases, strict=True):
        yield linear(x, weight, part)


def _split_heads(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Reshape to [batch, heads, length, head size]."""
    x = x if module.batch_first else x.transpose(0, 1)
    return x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)


def _make_mask(
    q: torch.Tensor, key_padding_mask: torch.Tensor | None, attn_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Convert torch's masks, where True excludes, to softmax_dropout's, where True includes."""
    masks = []
    if attn_mask is not None:
        shape = (*q.shape[:2], *attn_mask.shape[-2:])
        masks.append(attn_mask.view(shape) if attn_mask.ndim == 3 else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if any(mask.dtype != torch.bool for mask in masks):
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
            if mask.dtype == torch.bool
            else mask.to(q.dtype)
            for mask in masks
        ]
        return added[0] if len(added) == 1 else added[0] + added[1]
    included = [~mask for mask in masks]
    if not included:
        return None
    return included[0] if len(included) == 1 else included[0] & included[1]


def find_multihead_attention(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """torch.nn.MultiheadAttention, called with or without weights."""
    own = forward_of(module)
    if own is not torch.nn.MultiheadAttention.forward:
        return
    layers = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    if any(isinstance(parent, layers) for parent in view.parents.get(id(module), [])):
        return  # the layer's recogniser changes its attention
    what = type(module).__name__
    if reason := why_not_change(module) or why_not_usual(module):
        yield Left(module, what, reason)
    else:
        becomes = f"softmax_dropout if weights are wanted; {ON_CPU}"
        changes = (Change(module, MultiheadAttention, becomes),)
        attention: Any = module
        inputs = (probe.values((2, 32, attention.embed_dim), view.device(module)),) * 3
        known = type(module) is torch.nn.MultiheadAttention
        yield Proposal(module, what, changes, module, inputs=inputs, drops=True, known=known)


def why_not_usual(attention: Any) -> str | None:
    """Why MultiheadAttention of this file cannot compute this attention, or None."""
    same = attention.bias_k is None and not attention.add_zero_attn
    same = same and attention._qkv_same_embed_dim
    return None if same else "it uses add_bias_kv, add_zero_attn, kdim or vdim"


# --- Softmax and dropout --------------------------------------------------------------------------


class SoftmaxDropout(Weld):
    """A dropout that computes the preceding softmax too if the module around it asks it to."""

    p: float
    training: bool

    def forward(self, input: torch.Tensor, weld_asked: bool = False) -> Any:
        if not weld_asked:
            return self.welded_from.forward(self, input)
        return functional.softmax_dropout(input, p=self.p, training=self.training)


def find_softmax_dropout(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """The dropouts among a module's children, with the preceding softmax modules."""
    if not any(isinstance(part, torch.nn.Softmax) for part in module.modules()):
        return
    for consumer in module.children():
        if forward_of(consumer) is not torch.nn.Dropout.forward:
            continue
        pair = find_pair(consumer, module, view)
        if pair is None:
            continue
        what = f"Softmax + {type(consumer).__name__}"
        if isinstance(pair, Left):
            yield pair
            continue
        producer: Any = pair.first
        if forward_of(producer) is not torch.nn.Softmax.forward:
            continue
        if producer.dim != -1:
            yield Left(consumer, what, f"its dim is {producer.dim}; softmax_dropout's is -1")
            continue
        if consumer.inplace:  # type: ignore[attr-defined]
            yield Left(consumer, what, "it works in place")
            continue
        change = Change(consumer, SoftmaxDropout, "softmax_dropout")
        yield propose_pair(pair, module, what, change, drops=True)
