"""torch.nn.TransformerEncoderLayer and TransformerDecoderLayer, for calls that need gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.modules import forward_of, why_not_change
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.patterns.attention import ON_CPU, MultiheadAttention, why_not_usual
from torchweld.fusion.patterns.dropout_add_norm import add_and_normalize, is_layer_norm
from torchweld.fusion.patterns.linear_act import LinearAct
from torchweld.fusion.patterns.pairs import can_ask
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Weld

_Block = Callable[[torch.Tensor], torch.Tensor]


class _Layer(Weld):
    """Blocks with the additions, dropouts and norms between them."""

    linear1: Any
    linear2: torch.nn.Module
    dropout: torch.nn.Module
    norm_first: bool

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if can_ask(self.linear1, LinearAct):
            hidden = self.linear1(x, weld_asked=True)
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
    """torch.nn.TransformerEncoderLayer. Without gradients torch's fast path runs."""

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if not (torch.is_grad_enabled() and self.weld_may_skip()):
            return self.welded_from.forward(  # type: ignore[no-any-return]
                self, src, src_mask, src_key_padding_mask, is_causal
            )

        def attend(x: torch.Tensor) -> torch.Tensor:
            return _attend(self, "self_attn", x, x, src_mask, src_key_padding_mask, is_causal)

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
        if not self.weld_may_skip():
            return self.welded_from.forward(  # type: ignore[no-any-return]
                self,
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )

        def attend(x: torch.Tensor) -> torch.Tensor:
            return _attend(self, "self_attn", x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)

        def cross(x: torch.Tensor) -> torch.Tensor:
            masks = (memory_mask, memory_key_padding_mask)
            return _attend(self, "multihead_attn", x, memory, *masks, memory_is_causal)

        return self._blocks(tgt, [attend, cross, self._feed_forward])


def _attend(
    layer: Any,
    name: str,
    x: torch.Tensor,
    memory: torch.Tensor,
    mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    attention = getattr(layer, name)
    pair = attention(
        x,
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal,
        need_weights=False,
    )
    return pair[0]  # type: ignore[no-any-return]


_LAYERS: dict[Any, tuple[type[Weld], str]] = {
    torch.nn.TransformerEncoderLayer: (EncoderLayer, "12"),
    torch.nn.TransformerDecoderLayer: (DecoderLayer, "123"),
}
# What torch makes a layer of. Another activation is tried.
_PARTS = (
    *(torch.nn.MultiheadAttention, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout),
    *(torch.nn.GELU, torch.nn.ReLU, torch.nn.SiLU),
)


def find_transformer_layer(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """One of torch's layers whose methods are torch's own."""
    for cls, (weld, numbers) in _LAYERS.items():
        methods = ("forward", "_ff_block", "_sa_block", "_mha_block")
        if isinstance(module, cls) and all(
            getattr(type(module), name, None) is getattr(cls, name, None) for name in methods
        ):
            yield _propose(module, weld, numbers, view)


def _propose(module: Any, weld: type[Weld], numbers: str, view: View) -> Proposal | Left:
    what = type(module).__name__
    norms, dropouts = ([f"{kind}{n}" for n in numbers] for kind in ("norm", "dropout"))
    activation = module.activation
    kind = view.activation(activation)
    if reason := why_not_change(module):
        return Left(module, what, reason)
    if kind is None:
        return Left(module, what, "its activation is none of torchweld's")
    if view.linear(module.linear1) != "plain":
        return Left(module, what, f"its linear1 is a {type(module.linear1).__name__}")
    if not all(is_layer_norm(getattr(module, name)) for name in norms):
        return Left(module, what, "its norms are not torch.nn.LayerNorm")
    activations = ("activation",) if isinstance(activation, torch.nn.Module) else ()
    inner = (*norms, *dropouts, *activations)
    settings = {"activation": kind[0], "approximate": kind[1], "transposed": False}
    width = module.linear1.in_features
    x = probe.values((2, 5, width), view.device(module))
    attentions = [
        getattr(module, name) for name in ("self_attn", "multihead_attn")[: len(norms) - 1]
    ]
    attentions = [attention for attention in attentions if _is_usual(attention)]
    becomes = f"dropout_add_layer_norm, linear_act ({in_words(kind)})"
    return Proposal(
        module,
        what,
        (
            Change(
                module,
                weld,
                f"{becomes}; {ON_CPU}" if attentions else becomes,
                {"inner": inner},
            ),
            Change(module.linear1, LinearAct, "", settings),
            *(Change(attention, MultiheadAttention) for attention in attentions),
        ),
        module,
        inner=(module.linear1, *(getattr(module, name) for name in inner)),
        inputs=(x,) * (len(numbers) - 1),
        drops=True,
        known=type(module) in _LAYERS and all(type(part) in _PARTS for part in module.children()),
    )


def _is_usual(attention: Any) -> bool:
    """Whether a module is torch's own attention, and can be welded."""
    own = forward_of(attention) is torch.nn.MultiheadAttention.forward
    return own and why_not_change(attention) is None and why_not_usual(attention) is None
