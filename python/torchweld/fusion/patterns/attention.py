"""torch.nn.MultiheadAttention and the layers around it, and softmax + dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.patterns.activation import Asked, LinearAct, in_words
from torchweld.fusion.patterns.dropout_add_norm import add_and_normalize, is_layer_norm
from torchweld.fusion.patterns.pairs import Pair, can_ask, find_pair, propose_pair
from torchweld.fusion.patterns.plain import multiplies_slowly
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Change,
    Proposal,
    Skipped,
    Weld,
    forward_of,
    propose,
    why_not_change,
)
from torchweld.ops.attention.converted import attention
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.ops.gemm.product import multiply
from torchweld.sparse.by_length import DENSE

_ON_CPU = "on the CPU block_sparse_attention over all keys"

# --- torch.nn.MultiheadAttention ------------------------------------------------------------------


class MultiheadAttention(Weld):
    """torch.nn.MultiheadAttention, for calls that need gradients.

    If the caller asks for weights, softmax_dropout computes them. Otherwise attention on the CPU is
    block_sparse_attention over all keys: torch's own is slower there, and with dropout it keeps all
    scores. All other calls run torch's forward.
    """

    batch_first: bool
    dropout: float
    head_dim: int
    training: bool

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
        is_slow = multiplies_slowly(query)
        served = (torch.is_grad_enabled() or is_slow) and batched
        if served and need_weights:
            served = not is_causal
        elif served:
            # On the CPU, with scores that are masked only by position and padding.
            lengths = {x.shape[1 if self.batch_first else 0] for x in inputs}
            served = query.device.type == "cpu"
            served &= attn_mask is None or (is_causal and len(lengths) == 1)
            served &= key_padding_mask is None or key_padding_mask.dtype == torch.bool
        is_masked = attn_mask is not None or key_padding_mask is not None
        takes_mask = is_slow and batched and not need_weights and is_masked
        if not (served or takes_mask):
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return self.welded_from.forward(self, *inputs, *rest)  # type: ignore[no-any-return]
        q, k, v = (_split_heads(part, self) for part in _project(self, inputs))
        if not served:
            mask = _make_mask(q, key_padding_mask, attn_mask)
            return _project_out(self, attention(q, k, v, mask, self.dropout * self.training)), None
        if not need_weights:
            result = functional.block_sparse_attention(
                *(q, k, v, DENSE.of(q, k)),
                causal=is_causal,
                key_padding_mask=key_padding_mask,
                dropout_p=self.dropout,
                training=self.training,
            )
            return _project_out(self, result), None
        # What torch.nn.functional.multi_head_attention_forward computes.
        mask = _make_mask(q, key_padding_mask, attn_mask)
        scale = 1 / math.sqrt(self.head_dim)
        weights = functional.softmax_dropout(
            multiply(q, k.transpose(-2, -1)),
            mask,
            scale=scale,
            p=self.dropout,
            training=self.training,
        )
        result = _project_out(self, multiply(weights.to(v.dtype), v))
        return result, weights.mean(1) if average_attn_weights else weights


def _project_out(module: Any, of_heads: torch.Tensor) -> torch.Tensor:
    result = of_heads.transpose(1, 2).flatten(2)
    result = linear_as_torch(result, module.out_proj.weight, module.out_proj.bias)
    return result if module.batch_first else result.transpose(0, 1)


def _project(module: Any, inputs: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    bias = module.in_proj_bias
    if inputs[0] is inputs[1] is inputs[2]:
        yield from linear_as_torch(inputs[0], module.in_proj_weight, bias).chunk(3, -1)
        return
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for x, weight, part in zip(inputs, module.in_proj_weight.chunk(3), biases, strict=True):
        yield linear_as_torch(x, weight, part)


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
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return functools.reduce(torch.logical_and, [~mask for mask in masks])
    zeros = (torch.zeros_like(mask, dtype=q.dtype) for mask in masks)
    return functools.reduce(
        torch.add,
        [
            zero.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
            for zero, mask in zip(zeros, masks, strict=True)
        ],
    )


def find_multihead_attention(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """torch.nn.MultiheadAttention, called with or without weights."""
    if forward_of(module) is not torch.nn.MultiheadAttention.forward:
        return
    layers = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    if any(isinstance(parent, layers) for parent in view.parents.get(id(module), [])):
        return  # the layer's recogniser changes its attention
    if reason := why_not_change(module) or _why_not_usual(module):
        yield Skipped(module, type(module).__name__, reason)
        return
    attention: Any = module
    inputs = (probe.values((2, 32, attention.embed_dim), view.device(module)),) * 3
    known = type(module) is torch.nn.MultiheadAttention
    becomes = f"softmax_dropout if weights are wanted; {_ON_CPU}"
    yield propose(module, MultiheadAttention, becomes, inputs=inputs, drops=True, known=known)


def _why_not_usual(attention: Any) -> str | None:
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


def find_softmax_dropout(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """The dropouts among a module's children, with the preceding softmax modules."""
    if not any(isinstance(part, torch.nn.Softmax) for part in module.modules()):
        return
    for consumer in module.children():
        if forward_of(consumer) is not torch.nn.Dropout.forward:
            continue
        pair = find_pair(consumer, module, view)
        if isinstance(pair, Skipped):
            yield pair
        if not isinstance(pair, Pair) or forward_of(pair.first) is not torch.nn.Softmax.forward:
            continue
        if pair.first.dim != -1:
            reason = f"its dim is {pair.first.dim}; softmax_dropout's is -1"
            yield Skipped(consumer, pair.what, reason)
        elif consumer.inplace:
            yield Skipped(consumer, pair.what, "it works in place")
        else:
            change = Change(consumer, SoftmaxDropout, "softmax_dropout")
            yield propose_pair(pair, module, change, True, drops=True)


def _find_function(layer: Any) -> tuple[Any, ...]:
    """The parts of a layer's activation, which copies share; none of a module."""
    function = vars(layer).get("activation")
    if isinstance(function, functools.partial):
        return function.func, function.args, tuple(function.keywords.items())
    return (function,)  # a class would make a method of a bare one


# --- Layers ---------------------------------------------------------------------------------------

_Block = Callable[[torch.Tensor], torch.Tensor]
_METHODS = ("_sa_block", "_mha_block", "_ff_block")


class _Layer(Weld):
    """Blocks with the additions, dropouts and norms between them."""

    self_attn: Any
    multihead_attn: Any
    linear1: Any
    linear2: torch.nn.Module
    dropout: torch.nn.Module
    norm_first: bool
    weld_function: tuple[Any, ...]
    weld_kind: Asked  # the activation

    def weld_may_skip(self) -> bool:
        own = vars(self)
        if any(name in own for name in _METHODS):
            return False
        return _find_function(self) == self.weld_function and super().weld_may_skip()

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if can_ask(self.linear1, LinearAct):
            hidden = self.linear1(x, weld_asked=self.weld_kind)
        else:
            hidden = self.activation(self.linear1(x))  # type: ignore[attr-defined]
        return self.linear2(self.dropout(hidden))  # type: ignore[no-any-return]

    def _blocks(self, x: torch.Tensor, blocks: list[_Block]) -> torch.Tensor:
        parts: Any = self
        dropouts = [parts.dropout1, parts.dropout2, *([parts.dropout3] if len(blocks) > 2 else [])]
        norms = [parts.norm1, parts.norm2, *([parts.norm3] if len(blocks) > 2 else [])]
        if not self.norm_first:
            for block, dropout, norm in zip(blocks, dropouts, norms, strict=True):
                x = add_and_normalize(block(x), x, dropout, norm)
            return x
        y = norms[0](x)
        for block, dropout, norm in zip(blocks, dropouts, norms[1:], strict=False):
            y, x = add_and_normalize(block(y), x, dropout, norm, return_residual=True)
        last = dropouts[-1]
        return functional.bias_dropout_add(blocks[-1](y), None, x, p=last.p, training=last.training)


class EncoderLayer(_Layer):
    """torch.nn.TransformerEncoderLayer. Without gradients torch's fast path runs, if it is one."""

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        masks = (src_mask, src_key_padding_mask, is_causal)
        wanted = torch.is_grad_enabled() or multiplies_slowly(src)
        if not (wanted and self.weld_may_skip()):
            return self.welded_from.forward(self, src, *masks)  # type: ignore[no-any-return]

        def attend(x: torch.Tensor) -> torch.Tensor:
            return _run(self.self_attn, x, x, *masks)

        return self._blocks(src, [attend, self._feed_forward])


class DecoderLayer(_Layer):
    """torch.nn.TransformerDecoderLayer."""

    def forward(
        self,
        tgt: torch.Tensor,
        memory: torch.Tensor,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        tgt_key_padding_mask: torch.Tensor | None = None,
        memory_key_padding_mask: torch.Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        own = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        of_memory = (memory_mask, memory_key_padding_mask, memory_is_causal)
        if not self.weld_may_skip():
            masks = (each for pair in zip(own, of_memory, strict=True) for each in pair)
            return self.welded_from.forward(self, tgt, memory, *masks)  # type: ignore[no-any-return]

        def attend(x: torch.Tensor) -> torch.Tensor:
            return _run(self.self_attn, x, x, *own)

        def cross(x: torch.Tensor) -> torch.Tensor:
            return _run(self.multihead_attn, x, memory, *of_memory)

        return self._blocks(tgt, [attend, cross, self._feed_forward])


def _run(attention: Any, x: torch.Tensor, memory: torch.Tensor, *given: Any) -> torch.Tensor:
    """The result of a layer's attention, without weights."""
    mask, padding, is_causal = given
    masks = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
    return attention(x, memory, memory, **masks, need_weights=False)[0]  # type: ignore[no-any-return]


_LAYERS: dict[Any, tuple[type[Weld], str]] = {
    torch.nn.TransformerEncoderLayer: (EncoderLayer, "12"),
    torch.nn.TransformerDecoderLayer: (DecoderLayer, "123"),
}
# What torch makes a layer of. Another activation is tried.
_PARTS = (
    *(torch.nn.MultiheadAttention, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout),
    *(torch.nn.GELU, torch.nn.ReLU, torch.nn.SiLU),
)


def find_transformer_layer(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """One of torch's layers whose methods are torch's own."""
    for cls, (weld, numbers) in _LAYERS.items():
        if isinstance(module, cls) and all(
            getattr(type(module), name, None) is getattr(cls, name, None)
            for name in ("forward", *_METHODS)
        ):
            yield _propose(module, weld, numbers, view)


def _propose(module: Any, weld: type[Weld], numbers: str, view: View) -> Proposal | Skipped:
    what = type(module).__name__
    norms, dropouts = ([f"{kind}{n}" for n in numbers] for kind in ("norm", "dropout"))
    if any(name in vars(module) for name in _METHODS):
        return Skipped(module, what, "one of its methods is set on the instance")
    activation = module.activation
    kind = view.activation(activation)
    if kind is None:
        return Skipped(module, what, "its activation is none of torchweld's")
    if view.linear(module.linear1) != "plain":
        return Skipped(module, what, f"its linear1 is a {type(module.linear1).__name__}")
    if not all(is_layer_norm(getattr(module, name)) for name in norms):
        return Skipped(module, what, "its norms are not torch.nn.LayerNorm")
    activations = ("activation",) if isinstance(activation, torch.nn.Module) else ()
    inner = (*norms, *dropouts, *activations)
    own = {"inner": inner, "function": _find_function(module), "kind": kind}
    settings = {"activation": kind[0], "approximate": kind[1], "transposed": False}
    width = module.linear1.in_features
    x = probe.values((2, 5, width), view.device(module))
    names = ("self_attn", "multihead_attn")[: len(norms) - 1]
    attentions = [getattr(module, name) for name in names if _is_usual(getattr(module, name))]
    becomes = f"dropout_add_layer_norm, linear_act ({in_words(kind)})"
    becomes += f"; {_ON_CPU}" if attentions else ""
    changes = (
        Change(module, weld, becomes, own),
        Change(module.linear1, LinearAct, "", settings),
        *(Change(attention, MultiheadAttention) for attention in attentions),
    )
    return Proposal(
        *(module, what, changes, module),
        inner=(module.linear1, *(getattr(module, name) for name in inner)),
        inputs=(x,) * (len(numbers) - 1),
        drops=True,
        known=type(module) in _LAYERS and all(type(part) in _PARTS for part in module.children()),
    )


def _is_usual(attention: Any) -> bool:
    """Whether a module is torch's own attention, and can be welded."""
    own = forward_of(attention) is torch.nn.MultiheadAttention.forward
    return own and why_not_change(attention) is None and _why_not_usual(attention) is None
