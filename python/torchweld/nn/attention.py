"""Attention over the blocks of a layout, with and without projections."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks, functional
from torchweld.errors import ArgumentError
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.sparse import BlockBias, Layouts
from torchweld.sparse.by_length import Source


class BlockSparseAttention(torch.nn.Module):
    """Attention of queries to the keys that a layout lets them see.

    Args:
        layout: a BlockLayout of the inputs' lengths, or a function that makes one for any lengths,
            such as `functools.partial(BlockLayout.bigbird, block=64)`. It is called once for each
            pair of lengths.
        dropout: probability that a weight is dropped while training.
        causal: the last query sees every key, and each earlier query sees one key fewer.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: if not 0, scores become softcap * tanh(score / softcap).
    """

    def __init__(
        self,
        layout: Source,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        checks.probability(name, dropout, "dropout")
        if scale is not None:
            checks.factor(name, "scale", scale)
        checks.factor(name, "softcap", softcap)
        self.layouts = Layouts(layout)
        self.dropout, self.causal, self.scale, self.softcap = dropout, causal, scale, softcap

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        bias: torch.Tensor | BlockBias | None = None,
    ) -> torch.Tensor:
        """q [batch, heads, queries, head_dim], k and v [batch, key heads, keys, ...]."""
        return functional.block_sparse_attention(
            q,
            k,
            v,
            self.layouts.of(q, k),
            scale=self.scale,
            causal=self.causal,
            key_padding_mask=key_padding_mask,
            alibi_slopes=alibi_slopes,
            bias=bias,
            sinks=sinks,
            softcap=self.softcap,
            dropout_p=self.dropout,
            training=self.training,
        )

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, causal={self.causal}"


class BlockSparseMultiheadAttention(torch.nn.Module):
    """Multi-head attention over a layout, with the parameters of torch.nn.MultiheadAttention.

    It has that module's `state_dict` keys and arguments, and takes two more by keyword. Like that
    module it returns a pair, but the second element is always None: the weights are never
    materialised.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads, a divisor of embed_dim.
        dropout: probability that a weight is dropped while training.
        bias: whether the projections add one.
        add_bias_kv, add_zero_attn: torch's arguments. Only False is accepted: a layout has no place
            for a key that is not in the input.
        kdim, vdim: widths of keys and of values; None: embed_dim.
        batch_first: inputs are [batch, length, embed_dim], not [length, batch, embed_dim].
        device, dtype: of the parameters.
        layout: as BlockSparseAttention takes it.
        causal: the last query sees every key, and each earlier query sees one key fewer.
    """

    in_proj_weight: torch.nn.Parameter | None
    in_proj_bias: torch.nn.Parameter | None
    q_proj_weight: torch.nn.Parameter | None
    k_proj_weight: torch.nn.Parameter | None
    v_proj_weight: torch.nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        layout: Source,
        causal: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for argument, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                accepted = "False: a layout has no place for a key that is not in the input"
                raise ArgumentError(name, argument, repr(value), accepted)
        checks.probability(name, dropout, "dropout")
        checks.count(name, "embed_dim", embed_dim, 1)
        checks.count(name, "num_heads", num_heads, 1)
        for argument, size in (("kdim", kdim), ("vdim", vdim)):
            if size is not None:
                checks.count(name, argument, size)
        if embed_dim % num_heads:
            accepted = f"a divisor of embed_dim, {embed_dim}"
            raise ArgumentError(name, "num_heads", repr(num_heads), accepted)
        # Take the parameters and their initial values from torch's own module.
        like = torch.nn.MultiheadAttention(
            embed_dim, num_heads, bias=bias, kdim=kdim, vdim=vdim, device=device, dtype=dtype
        )
        for parameter in ("in_proj_weight", *_SEPARATE, "in_proj_bias"):
            self.register_parameter(parameter, getattr(like, parameter))
        self.out_proj = like.out_proj
        self.attention = BlockSparseAttention(layout, dropout, causal)
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """Return the output and None.

        Takes torch.nn.MultiheadAttention's arguments, also without a batch dimension, but
        `need_weights` is False by default: the weights are never materialised.
        `key_padding_mask` is [batch, keys] and `attn_mask` [queries, keys] or [batch * heads,
        queries, keys]: booleans, where keys at True are ignored, or numbers, which are added to the
        scores and get a gradient. A mask that does not change belongs in the layout, which costs
        less.
        """
        self._check_unserved(need_weights, attn_mask, is_causal)
        if query.ndim == key.ndim == value.ndim == 2:
            batch = 0 if self.batch_first else 1
            padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            query, key, value = (x.unsqueeze(batch) for x in (query, key, value))
            y, _ = self(query, key, value, padding, attn_mask=attn_mask, is_causal=is_causal)
            return y.squeeze(batch), None
        q, k, v = (
            self._heads(x, weight, bias)
            for x, weight, bias in zip((query, key, value), *self._projections(), strict=True)
        )
        bias = None if attn_mask is None else self._added(attn_mask, q, k)
        if key_padding_mask is not None and key_padding_mask.is_floating_point():
            if key_padding_mask.shape != (k.shape[0], k.shape[2]):
                actual = f"of shape {list(key_padding_mask.shape)}"
                accepted = f"[batch, keys], {[k.shape[0], k.shape[2]]}"
                raise ArgumentError(type(self).__name__, "key_padding_mask", actual, accepted)
            added = key_padding_mask.to(q.dtype)[:, None, None]
            bias = added if bias is None else bias + added
            key_padding_mask = None
        y = self.attention(q, k, v, key_padding_mask, bias=bias)
        y = y.permute(0, 2, 1, 3) if self.batch_first else y.permute(2, 0, 1, 3)
        return self.out_proj(y.flatten(2)), None

    def _check_unserved(self, need_weights: bool, attn_mask: Any, is_causal: bool) -> None:
        name = type(self).__name__
        if need_weights:
            raise ArgumentError(
                name, "need_weights", "True", "False: weights are never materialised"
            )
        if is_causal and attn_mask is None and not self.attention.causal:
            accepted = "False, a causal attn_mask, or a module that was made with causal=True"
            raise ArgumentError(name, "is_causal", "True", accepted)

    def _added(self, mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """A mask of scores as numbers to add to them."""
        batch, heads, (queries, keys) = q.shape[0], q.shape[1], (q.shape[2], k.shape[2])
        shapes = ((queries, keys), (batch * heads, queries, keys))
        known = mask.dtype == torch.bool or mask.is_floating_point()
        if not known or tuple(mask.shape) not in shapes:
            actual = f"a {mask.dtype} tensor of shape {list(mask.shape)}"
            accepted = f"booleans or numbers {list(shapes[0])} or {list(shapes[1])}"
            raise ArgumentError(type(self).__name__, "attn_mask", actual, accepted)
        if mask.dtype == torch.bool:
            mask = q.new_zeros(mask.shape).masked_fill(mask, -torch.inf)
        mask = mask.to(q.dtype)
        return mask if mask.ndim == 2 else mask.unflatten(0, (batch, heads))

    def _projections(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
        """Weights and biases of queries, keys and values."""
        weights = (
            tuple(getattr(self, name) for name in _SEPARATE)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return weights, biases

    def _heads(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Project x and split it into heads, [batch, heads, length, head_dim]."""
        if x.ndim != 3:
            accepted = "[batch, length, embed_dim], or with batch_first=False [length, batch, ...]"
            raise ArgumentError(type(self).__name__, "query", f"of {x.ndim} dimensions", accepted)
        x = linear_as_torch(x, weight, bias).unflatten(2, (self.num_heads, -1))
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(1, 2, 0, 3)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
