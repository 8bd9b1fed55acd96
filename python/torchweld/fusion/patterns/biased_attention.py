"""Attention of transformers with a learnt bias, or with values of another width than keys."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.rewrite import reads, rewrite, unwrap, why_not
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Proposal,
    Rewritten,
    Skipped,
    forward_of,
    propose,
    why_not_change,
    why_not_copy,
)
from torchweld.sparse.by_length import DENSE

_FUNCTIONS, _GET = "ALL_ATTENTION_FUNCTIONS", "get_interface"
# Arguments of transformers' attention functions that ours lacks.
_UNSERVED = ("softcap", "s_aux", "output_attentions", "cache")

_CUTS = "its code cuts the sequence into blocks; torchweld.huggingface gives it a layout"
# Names of the width of a head's keys.
_WIDTHS = ("key_value_proj_dim", "qk_head_dim", "head_dim")


class BiasedAttention(Rewritten):
    """An attention that takes its attention function from `weld_functions`.

    Its forward is recompiled from source, with no other change. On the CPU torch's attention stores
    all scores if a bias needs a gradient or the widths of keys and values differ.
    """

    weld_functions: Any

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Callable[..., Any]:
        cls.weld_functions = _BiasFunctions(unwrap(forward).__globals__[_FUNCTIONS])
        return rewrite(forward, _FUNCTIONS, "weld_functions")


class _BiasFunctions:
    """Transformers' attention functions, with ours for "sdpa" as it was, where it can serve."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._known = registry.get_interface("sdpa", None)
        taken = inspect.signature(self._known).parameters.keys() if self._known else ()
        own = inspect.signature(_attend).parameters.keys()
        self._ours = functools.partial(_attend, self._known, (*_UNSERVED, *(taken - own)))

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Any:
        function = self._registry.get_interface(implementation, default)
        return self._ours if implementation == "sdpa" and function is self._known else function


def _attend(
    otherwise: Callable[..., Any],
    unserved_names: tuple[str, ...],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' function for sdpa computes, which is `otherwise`."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    unserved = any(kwargs.get(name) not in (None, False) for name in unserved_names)
    tensors = (attention_mask, position_bias)
    unserved |= not all(isinstance(x, torch.Tensor | None) for x in tensors)
    if unserved or query.device.type != "cpu" or (causal and query.shape[2] != key.shape[2]):
        options: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        if position_bias is not None:
            options["position_bias"] = position_bias
        attended: tuple[torch.Tensor, None] = otherwise(
            module, query, key, value, attention_mask, **options, **kwargs
        )
        return attended
    y = functional.block_sparse_attention(
        query,
        key,
        value,
        DENSE.of(query, key),
        scale=scaling,
        causal=causal,
        bias=_make_bias(query, attention_mask, position_bias),
        dropout_p=dropout,
    )
    return y.transpose(1, 2).contiguous(), None


def _make_bias(
    query: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The sum of a bias and a mask, whose booleans are True where a key takes part."""
    if mask is None:
        return None if bias is None else bias.to(query.dtype)
    if mask.dtype != torch.bool:
        return (mask if bias is None else mask + bias).to(query.dtype)
    if bias is None:
        return query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    # As transformers has it, which gives queries that see nothing the mean of all values.
    lowest = torch.finfo(query.dtype).min
    return torch.where(mask, bias.to(query.dtype), lowest)


class _BiasScope(torch.nn.Module):
    """An attention, called with the arguments that a probe has.

    Its input is normed, as in models, and its scores are about one: if one key has all of the
    weight, the gradients of scores are nothing but rounding errors.
    """

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention
        widths = (getattr(attention, name, 0) for name in _WIDTHS)
        width = next(filter(None, widths), 1)
        named = (
            (name, getattr(attention, name, None)) for name in ("dropout", "attention_dropout")
        )
        rates = {name: rate for name, rate in named if isinstance(rate, float)}
        self.rates = list(rates)
        self.rate = torch.nn.Dropout(max(rates.values(), default=0.0))
        self.factor = (getattr(attention, "scaling", 1.0) * math.sqrt(width)) ** -0.5

    def forward(self, x: torch.Tensor, *angles: torch.Tensor) -> Any:
        for name in self.rates:  # trials set the rate of a dropout module
            setattr(self.attention, name, self.rate.p)
        x = torch.nn.functional.layer_norm(x, x.shape[-1:]) * self.factor
        more: dict[str, Any] = {}
        if angles:
            angle = angles[0].detach()  # models do not learn angles
            more = {"position_embeddings": (angle.cos(), angle.sin()), "attention_mask": None}
        return self.attention(x, **more)[0]


def find_biased_attention(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """An attention of T5's, Swin's or DeepSeek-V3's kind, and blocks of LongT5's kind."""
    forward, what = forward_of(module), type(module).__name__
    if reads(forward, "_split_into_blocks", "_concatenate_3_blocks"):
        yield Skipped(module, what, _CUTS)
        return
    if not reads(forward, _FUNCTIONS, _GET) or not _has_slow_attention(module):
        return
    reason = _why_not_weld(module, forward)
    hidden = next((p.shape[-1] for p in module.parameters() if p.ndim == 2), None)
    if reason is None and hidden is None:
        reason = "it has no projection"
    if reason is not None:
        yield Skipped(module, what, reason)
        return
    assert hidden is not None
    device = view.device(module)
    inputs = [probe.values((2, _count_tokens(module), hidden), device)]
    if "position_embeddings" in unwrap(forward).__code__.co_varnames:
        width = getattr(module, "qk_rope_head_dim", 0) or getattr(module, "head_dim", hidden)
        inputs.append(probe.values((2, _count_tokens(module), width), device))
    becomes, scope = "on the CPU block_sparse_attention over all keys", _BiasScope(module)
    yield propose(module, BiasedAttention, becomes, scope=scope, inputs=tuple(inputs), drops=True)


def _why_not_weld(module: torch.nn.Module, forward: Any) -> str | None:
    """Why an attention cannot be changed, or None."""
    reason = why_not_change(module) or why_not_copy(module)
    reason = reason or why_not(lambda: rewrite(forward, _FUNCTIONS, "_"))
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if reason is None and implementation != "sdpa":
        reason = f"its attention is {implementation!r}, and only 'sdpa' is replaced"
    return reason


def _has_slow_attention(module: Any) -> bool:
    """Whether torch's attention on the CPU keeps all scores of this module."""
    if isinstance(getattr(module, "relative_position_bias", None), torch.nn.Module):
        return True
    if "position_bias" in unwrap(forward_of(module)).__code__.co_varnames:
        return True
    widths = [getattr(module, name, None) for name in ("qk_rope_head_dim", "v_head_dim")]
    return all(isinstance(width, int) for width in widths)


def _count_tokens(module: Any) -> int:
    """Count the tokens of a sample: the attention's window, or 5 if it has none."""
    table = getattr(module, "relative_position_bias", None)
    places = getattr(table, "relative_position_index", None)
    return 5 if places is None else math.isqrt(places.numel())
