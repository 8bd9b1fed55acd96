"""Sparse attention and experts for models of transformers; importing this imports transformers.

from torchweld import huggingface, sparse

huggingface.register()
model = AutoModel.from_pretrained(name, attn_implementation="torchweld_sparse")
huggingface.set_layout(model, functools.partial(sparse.BlockLayout.bigbird, block=64))
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.huggingface import _experts
from torchweld.huggingface._kernel_mapping import kernel_mapping as kernel_mapping
from torchweld.huggingface._masks import NAME, PADDING, mask
from torchweld.huggingface._names import name_layers as name_layers
from torchweld.huggingface._patch import patch as patch
from torchweld.ops.attention import reference
from torchweld.sparse import BlockBias, BlockLayout, Layouts
from torchweld.sparse.by_length import DENSE, Source

# The attribute that holds a module's layouts.
_LAYOUTS, _PASS = "torchweld_layouts", "torchweld_pass"
_WINDOWS: dict[int, Layouts] = {}
_COUNTED: set[Callable[..., Any]] = set()  # methods `generate` that are wrapped
# Names of the modules with which a decoder attends to its encoder.
_CROSS = re.compile("cross_?att|encoder_?att|encdec_?att", re.IGNORECASE)
# Parts of an attention that mask each query's keys by their content, and need a mask of all pairs.
_CHOOSERS = ("indexer", "compressor", "prepare_dynamic_mask")


class _Pass:
    """The state of the pass that a model is in."""

    def __init__(self) -> None:
        # Whether the pass got a cache, and how many calls of `generate` run.
        self.has_cache, self.generating = False, 0
        # The numbers of documents in the last pass, and the layouts restricted to them.
        self._documents: weakref.ref[torch.Tensor] | None = None
        self._packed: dict[BlockLayout, BlockLayout] = {}

    def within_documents(self, layout: BlockLayout, mask: torch.Tensor) -> BlockLayout:
        """The layout restricted to pairs of one document; all layers of a pass share it."""
        documents = mask.flatten(1)
        if self._documents is None or self._documents() is not mask:
            self._documents, self._packed = weakref.ref(mask), {}
        if layout not in self._packed:
            self._packed[layout] = BlockLayout.from_mask_fn(
                lambda b, h, q, k: (
                    (documents[b, q] == documents[b, k]) & (documents[b, k] != PADDING)
                ),
                (layout.queries, layout.keys),
                block=layout.block,
                batch_size=len(documents),
                within=layout,
                device=documents.device,
            )
        return self._packed[layout]


def register(name: str = NAME) -> None:
    """Register `attn_implementation=name` with transformers. Calling it again is allowed.

    Also register `experts_implementation="torchweld"`, where transformers has such a choice.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    if importlib.util.find_spec("transformers.integrations.moe") is not None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_experts.NAME, _experts.experts)


def set_layout(
    model: torch.nn.Module, layout: Source | None, layers: Collection[int] | None = None
) -> None:
    """Give a model's attention a layout.

    Its attention modules share the layouts. Attention stays as the model has it by itself, dense or
    over its own sliding window, in four cases: in a pass that gets a cache; causal attention in a
    call of `generate`; with fewer queries than keys; and from a decoder to its encoder.

    Args:
        model: a model whose attn_implementation is "torchweld_sparse", or an encoder of LongT5.
            Call this separately for an encoder and a decoder.
        layout: a BlockLayout of the sequences' length, or a function that makes one for any length,
            such as `functools.partial(BlockLayout.bigbird, block=64)`. None: the window that an
            encoder of LongT5 has by itself.
        layers: the `layer_idx` of the layers to change; None: all.
    """
    layouts, state = None if layout is None else Layouts(layout), getattr(model, _PASS, None)
    if layouts is not None:
        _check_implementation(model)
    if state is None:
        state = _Pass()
        setattr(model, _PASS, state)
        model.register_forward_pre_hook(_before_pass, with_kwargs=True)
        model.register_forward_hook(_after_pass, always_call=True)
    _watch_generate(type(model))
    windows: dict[int, Layouts] = {}
    count = 0
    for name, module in model.named_modules():
        own = layouts
        if layers is not None and getattr(module, "layer_idx", None) not in layers:
            continue
        if _has_window(module):
            radius = module.local_radius
            window = functools.partial(BlockLayout.sliding_window, window_size=(radius, radius))
            own = own or windows.setdefault(radius, Layouts(window))
            forward = _attend_globally if hasattr(module, "compute_side_bias") else _attend_locally
            # Copies and pickles of a partial function hold the copied module.
            module.forward = functools.partial(forward, module)
        elif own is None:
            continue
        elif isinstance(getattr(module, "relative_attention_bias", None), torch.nn.Embedding):
            _keep_table(module)
        crosses = getattr(module, "is_cross_attention", False) or _CROSS.search(name)
        setattr(module, _LAYOUTS, (DENSE if crosses else own, state))
        count += 1
    if not count:
        if layout is None:
            accepted = "a layout: no attention of this model has a window by itself"
            raise ArgumentError("set_layout", "layout", "None", accepted)
        accepted = "layer_idx of the model's attention modules"
        raise ArgumentError("set_layout", "layers", repr(layers), accepted)


def _check_implementation(model: Any) -> None:
    """Check that a model's attention asks transformers for `attention`, or is LongT5's."""
    if not isinstance(model, PreTrainedModel) or any(map(_has_window, model.modules())):
        return
    modules = [m for m in model.modules() if _asks_for_attention(m)]
    if not modules:
        actual = f"a {type(model).__name__}, whose attention transformers cannot replace"
        accepted = "a model of transformers that takes attn_implementation"
        raise ArgumentError("set_layout", "model", actual, accepted)
    for name, module in model.named_modules():
        if found := [each for each in _CHOOSERS if getattr(module, each, None) is not None]:
            actual = f"a {type(model).__name__}, whose {name}.{found[0]} chooses keys by content"
            accepted = "one whose attention leaves the choice of keys to the layout"
            raise ArgumentError("set_layout", "model", actual, accepted)
    configs = [m.config for m in modules if hasattr(m, "config")]
    names = {config._attn_implementation for config in configs}
    functions = [ALL_ATTENTION_FUNCTIONS.get(name) for name in names]
    if attention not in functions:
        actual = f"a {type(model).__name__} with {', '.join(map(repr, sorted(map(str, names))))}"
        accepted = f"one with attn_implementation={NAME!r}"
        raise ArgumentError("set_layout", "model", actual, accepted)


def _asks_for_attention(module: torch.nn.Module) -> bool:
    """Whether the file of a module's class has the table of attention functions."""
    if isinstance(module, PreTrainedModel):  # the base class has it for other purposes
        return False
    files = [sys.modules.get(each.__module__) for each in type(module).__mro__]
    return any(getattr(file, "ALL_ATTENTION_FUNCTIONS", None) for file in files)


def _has_window(module: Any) -> bool:
    """Whether a module is an attention of LongT5's encoder, which cuts sequences into blocks."""
    needed = ("local_radius", "block_len", "compute_bias", "_relative_position_bucket")
    return all(hasattr(module, name) for name in needed)


def _keep_table(module: Any) -> None:
    """Let an attention of T5's kind hand on its table, where it would expand it to all pairs.

    Only passes over whole sequences get it; parts, as in `generate`, get what the model computes.
    """
    needed = ("compute_bias", "_relative_position_bucket", "is_decoder")
    if all(hasattr(module, name) for name in (*needed, "relative_attention_max_distance")):
        module.compute_bias = functools.partial(_compute_bias, module, {})


class _SharedBias(NamedTuple):
    """The bias that a layer hands on to later ones, and the weight that its table is a view of."""

    bias: BlockBias
    weight: torch.Tensor

    def view(self) -> BlockBias:
        """A new view for one layer: a reentrant checkpoint makes the first one without a graph."""
        return self.bias.with_table(self.weight.t())


def _compute_bias(
    module: Any,
    buckets: dict[torch.device, torch.Tensor],
    query_length: int,
    key_length: int,
    device: Any = None,
    past_seen_tokens: Any = 0,
) -> Any:
    if query_length != key_length or not isinstance(past_seen_tokens, int) or past_seen_tokens:
        arguments = (query_length, key_length, device, past_seen_tokens)
        return type(module).compute_bias(module, *arguments)
    return _relative_bias(module, buckets)


def _relative_bias(module: Any, buckets: dict[torch.device, torch.Tensor]) -> _SharedBias:
    """The bias by distance of an attention of T5's kind, whose buckets are kept by device."""
    weight = module.relative_attention_bias.weight
    if weight.device not in buckets:
        last = module.relative_attention_max_distance
        find = module._relative_position_bucket
        settings = {
            "bidirectional": not module.is_decoder,
            "num_buckets": module.relative_attention_num_buckets,
            "max_distance": last,
        }
        # UMT5's has them from its module.
        settings = settings if "bidirectional" in inspect.signature(find).parameters else {}
        distances = torch.arange(-last, last + 1, device=weight.device)
        buckets[weight.device] = find(distances, **settings)
    return _SharedBias(BlockBias.relative(weight.t(), buckets[weight.device]), weight)


def _attend_locally(
    module: Any,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: _SharedBias | None = None,
    output_attentions: bool = False,
) -> tuple[torch.Tensor, _SharedBias | None]:
    """The forward of LongT5's local attention, over a layout."""
    _check_unserved(position_bias, _SharedBias, output_attentions)
    if position_bias is None and module.has_relative_attention_bias:
        position_bias = _relative_bias(module, {})
    if mask is not None:  # [batch, 1, blocks, queries of a block, keys of three blocks]
        mask = mask[:, 0].diagonal(module.block_len, -2, -1).flatten(1)
        mask = mask[:, : hidden_states.shape[1]]
    y, _ = _attend_in_window(module, hidden_states, mask, position_bias)
    return module.o(y.transpose(1, 2).flatten(2)), position_bias


def _attend_globally(
    module: Any,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    position_bias: tuple[_SharedBias, torch.Tensor, Any] | None = None,
    output_attentions: bool = False,
) -> tuple[torch.Tensor, tuple[_SharedBias, torch.Tensor, Any]]:
    """The forward of LongT5's transient-global attention, whose local part has a layout.

    Each token also sees a sum of every `global_block_size` tokens.
    """
    # Only LongT5 gets here, so that its file is imported already.
    from transformers.models.longt5 import modeling_longt5 as long_t5

    _check_unserved(position_bias, tuple, output_attentions)
    counted = hidden_states.new_ones(hidden_states.shape[:2]) if mask is None else mask
    numbers, segments = long_t5._make_global_fixed_block_ids(counted, module.global_block_size)
    if position_bias is None:
        side_bias = module.compute_side_bias(counted, segments)
        position_bias = _relative_bias(module, {}), side_bias, module
    near, side_bias, first = position_bias
    trains = torch.is_grad_enabled() and first.global_relative_attention_bias.weight.requires_grad
    if trains and not side_bias.requires_grad:  # it was made in a reentrant checkpoint
        side_bias = first.compute_side_bias(counted, segments)
    keep = None if mask is None else mask.bool()
    y, lse = _attend_in_window(module, hidden_states, keep, near)
    if segments.shape[-1]:
        sums = long_t5._create_global_aggregates(hidden_states, numbers, segments.shape[-1])
        sums = module.global_input_layer_norm(sums)
        q, k, v = _project(module, hidden_states, sums)
        far, far_lse = _attend(module, q, k, v, DENSE.of(q, k), bias=side_bias.to(q.dtype))
        # A padded query sees nothing near it; the difference of two infinities would be NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.finfo(lse.dtype).min)
        share = torch.sigmoid(lse - far_lse).unsqueeze(-1).to(y.dtype)
        y = far + share * (y - far)
    return module.o(y.transpose(1, 2).flatten(2)), position_bias


def _check_unserved(position_bias: Any, kind: type, output_attentions: bool) -> None:
    if output_attentions:
        accepted = "False: weights are never materialised"
        raise ArgumentError(NAME, "output_attentions", "True", accepted)
    if position_bias is not None and not isinstance(position_bias, kind):
        accepted = "what another layer with a layout returned"
        raise ArgumentError(NAME, "position_bias", f"a {type(position_bias).__name__}", accepted)


def _attend_in_window(
    module: Any, x: torch.Tensor, keep: torch.Tensor | None, shared: _SharedBias | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of LongT5's heads over the module's layout."""
    q, k, v = _project(module, x, x)
    layout = getattr(module, _LAYOUTS)[0].of(q, k)
    bias = None if shared is None else shared.view()
    return _attend(module, q, k, v, layout, bias=bias, padding=None if keep is None else ~keep)  # type: ignore[no-any-return]


def _project(module: Any, x: torch.Tensor, of_keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, [batch, heads, length, head_dim]."""
    projected = (module.q(x), module.k(of_keys), module.v(of_keys))
    return tuple(y.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for y in projected)


def _attend(module: Any, *inputs: Any, bias: Any, padding: Any = None) -> Any:
    """LongT5's attention, which does not scale its scores; and their log-sum-exp."""
    options: dict[str, Any] = {"dropout_p": module.dropout, "training": module.training}
    options |= {"bias": bias, "key_padding_mask": padding}
    return functional.block_sparse_attention(*inputs, scale=1.0, return_lse=True, **options)


def _before_pass(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    getattr(model, _PASS).has_cache = any(_is_cache(x) for x in (*args, *kwargs.values()))


def _after_pass(model: torch.nn.Module, args: Any, output: Any) -> None:
    """End a pass with a cache: the next may be of a part of the model, which tells us nothing.

    With gradients a checkpoint may run the pass again.
    """
    if not torch.is_grad_enabled():
        getattr(model, _PASS).has_cache = False


def _is_cache(value: Any) -> bool:
    """Whether an argument is a cache: releases of transformers give it different names.

    Older ones also take keys and values of layers, in tuples.
    """
    pairs = isinstance(value, (tuple, list)) and value and isinstance(value[0], (tuple, list))
    return bool(pairs) or isinstance(value, Cache)


def _watch_generate(kind: type) -> None:
    """Count the calls of `generate` that run, of a class and of transformers' own.

    Its passes without a cache are like others. The model may be a part of the one that generates.
    """
    for each in (*kind.__mro__, GenerationMixin):
        own = vars(each).get("generate")
        if inspect.isfunction(own) and own not in _COUNTED:
            _COUNTED.add(counted := _count_calls(own))
            each.generate = counted


def _count_calls(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self.modules() if isinstance(self, torch.nn.Module) else ()
        states = {state for m in modules if (state := getattr(m, _PASS, None)) is not None}
        for state in states:
            state.generating += 1
        try:
            return generate(self, *args, **kwargs)
        finally:
            for state in states:
                state.generating -= 1

    return counted


# Arguments that do not change what `attention` computes. The mask says which positions are packed.
_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "deterministic", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "return_dict"),
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
    position_bias: torch.Tensor | BlockBias | _SharedBias | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: inputs [batch, heads, length, head_dim].

    A layout replaces `sliding_window`, except in passes of `generate`.
    """
    layouts, state = _check_call(module, kwargs)
    bias: Any = position_bias
    if isinstance(bias, _SharedBias):
        bias = bias.view()
    is_part, crosses = query.shape[2] != key.shape[2], layouts is DENSE
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not is_part:
        attention_mask, bias = _separate_bias(attention_mask, bias, query)
        # Some models leave causality to the mask if there is one; ours are of keys only.
        if attention_mask is not None and not crosses:
            causal = causal or getattr(module, "is_causal", False)
    elif attention_mask is None or attention_mask.ndim == 4:
        settings = (dropout, scaling, is_causal, softcap or 0.0, s_aux)
        inputs = (query, key, value, attention_mask, bias)
        return _attend_to_part(module, *inputs, *settings, causal and not crosses), None
    without = state.has_cache or is_part or (causal and state.generating)
    if without and not crosses:
        layouts = DENSE if sliding_window is None else _make_window(sliding_window, causal)
    layout = layouts.of(query, key)
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        layout = state.within_documents(layout, attention_mask)
        attention_mask = None  # the layout includes it
    y = functional.block_sparse_attention(
        query,
        key,
        value,
        layout,
        scale=scaling,
        causal=causal,
        key_padding_mask=None if attention_mask is None else ~attention_mask.flatten(1),
        bias=bias,
        sinks=s_aux,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        training=module.training,
    )
    return y.transpose(1, 2).contiguous(), None


def _check_call(module: torch.nn.Module, others: Mapping[str, Any]) -> Any:
    """Return the module's layouts and its model's state; refuse arguments that are not served."""
    layouts, state = getattr(module, _LAYOUTS, (None, None))
    if layouts is None or state is None:
        actual = f"{type(module).__name__} without a layout"
        accepted = "a model that was given to torchweld.huggingface.set_layout"
        raise ArgumentError(NAME, "module", actual, accepted)
    for name, extra in others.items():
        if name not in _WITHOUT_EFFECT and extra is not None and extra is not False:
            accepted = "None: attention over a layout does not take it"
            raise ArgumentError(NAME, name, f"a {type(extra).__name__}", accepted)
    return layouts, state


def _separate_bias(mask: torch.Tensor | None, bias: Any, query: torch.Tensor) -> tuple[Any, Any]:
    """Return the mask of keys, and the bias: a mask may have a number for each pair instead."""
    if mask is not None and mask.ndim == 4 and mask.is_floating_point():
        if bias is not None:
            accepted = "None with position_bias, or booleans [batch, keys]"
            raise ArgumentError(NAME, "attention_mask", "numbers for each pair", accepted)
        return None, mask.to(query.dtype)  # Swin's, which has its bias of relative positions in it
    if mask is not None and mask[..., 0].numel() > len(query):
        actual = f"of shape {list(mask.shape)}"
        raise ArgumentError(NAME, "attention_mask", actual, "[batch, keys], 1 where a key counts")
    return mask, bias


def _attend_to_part(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | BlockBias | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float,
    sinks: torch.Tensor | None,
    hides_later: bool,
) -> torch.Tensor:
    """Attend by torch's attention where queries and keys differ in number, as in `generate`."""
    is_own = bool(softcap) or sinks is not None
    # Without a mask, queries begin at the first key: a cache may have room for more keys.
    # torch's attention knows that of `is_causal`, but only without a mask or a bias.
    if mask is None and (is_own or bias is not None) and hides_later and query.shape[2] > 1:
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if bias is not None:
        if is_own:
            accepted = "None with a soft cap or sinks in parts of a sequence"
            raise ArgumentError(NAME, "position_bias", "a tensor", accepted)
        mask = _add_to_mask(bias, mask, query, key)
    if not is_own:
        given = (module, query, key, value, mask, dropout, scaling, is_causal)
        return sdpa_attention_forward(*given)[0]
    # With the soft cap and the sinks, which torch's attention lacks.
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    z = reference.scores(query, key, None, scale, softcap, None).float()
    column = None if sinks is None else sinks.float().view(-1, 1, 1)
    weights, _ = reference.softmax(z, mask, column)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def _make_window(size: int, causal: bool) -> Layouts:
    """The layouts of a model's own sliding window: a token sees this many, itself among them."""
    if not causal:
        accepted = "None in a pass with a cache of a model that is not causal"
        raise ArgumentError(NAME, "sliding_window", f"{size}", accepted)
    window = functools.partial(BlockLayout.sliding_window, window_size=(size - 1, 0))
    return _WINDOWS.setdefault(size, Layouts(window))


def _add_to_mask(
    bias: torch.Tensor | BlockBias,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """The mask that torch's attention adds to scores: of a part of a sequence, with its bias."""
    if isinstance(bias, BlockBias):
        numbers, row = bias.by_distance(query.shape[2], key.shape[2])
        bias = reference.expand_bias(numbers, row, query.shape[2], key.shape[2])[None]
    bias = bias.to(query.dtype)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
