"""The reference, dense masked attention in torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld.random import drop
from torchweld.sparse.lists import token_mask


def add_dims(x: Tensor) -> Tensor:
    """Add missing leading dimensions."""
    return x[(None,) * (4 - x.ndim)]


def repeat_for_heads(x: Tensor, heads: int, group: int, offset: Sequence[int] | None) -> Tensor:
    """Repeat keys or values for each of q's heads."""
    x = add_dims(x)
    if x.shape[1] == heads and group == 1:
        return x
    if x.shape[1] * group == heads:
        return x.repeat_interleave(group, 1)
    first = offset[-3] if offset else 0
    of_head = (torch.arange(heads, device=x.device) + first) // group
    return x[:, of_head]


def visible(
    q: Tensor,
    k: Tensor,
    rows: Tensor | None,
    row_entries: Tensor | None,
    masks: Tensor | None,
    key_padding_mask: Tensor | None,
    block: int,
    causal: bool,
) -> Tensor | None:
    """Booleans that broadcast to the scores; None: queries see every key."""
    queries, keys = q.shape[-2], k.shape[-2]
    seen = None
    if rows is not None:
        assert row_entries is not None
        assert masks is not None
        seen = token_mask(rows, row_entries, masks, block, queries, keys)
    if causal:
        query = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
        before = torch.arange(keys, device=q.device) <= query
        seen = before if seen is None else seen & before
    if key_padding_mask is not None:
        seen = ~key_padding_mask if seen is None else seen & ~key_padding_mask
    return seen


def scores(
    q: Tensor,
    k: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    softcap: float,
    offset: Sequence[int] | None,
) -> Tensor:
    """The scores before masks and softmax."""
    z = q @ k.mT * scale
    if softcap:
        z = torch.tanh(z / softcap) * softcap
    if alibi_slopes is not None:
        z = z - alibi_slopes * distance(q, k, offset)
    return z


def distance(q: Tensor, k: Tensor, offset: Sequence[int] | None) -> Tensor:
    """Distances between tokens; `offset` has the numbers of the first query and key."""
    queries, keys = q.shape[-2], k.shape[-2]
    first_query, first_key = (_pad_to_four(offset, 0) or [0] * 4)[2:]
    ahead = keys - queries + first_query - first_key
    query = torch.arange(queries, device=q.device)[:, None] + ahead
    return (query - torch.arange(keys, device=q.device)).abs()


def count_distances(queries: int, keys: int, row: int) -> int:
    """Count the numbers of a bias by distance, for tokens in rows of `row`."""
    if row >= keys:
        return max(queries + keys - 1, 0)
    return 2 * _place(keys - 1, row) + 1


def _place(token: Any, row: int) -> Any:
    """A token's place on a plane, see csrc/cpu/block_bias.h."""
    return token + token // row * (row - 1)


def expand_bias(bias: Tensor, row: int, queries: int, keys: int) -> Tensor:
    """Return a bias that broadcasts to the scores; if `row` is not 0, `bias` is by distance."""
    if not row:
        return bias
    key = torch.arange(keys, device=bias.device)
    query = torch.arange(queries, device=bias.device)
    if row >= keys:
        distance = key - query[:, None] + queries - 1
    else:
        query = _place(query + keys - queries, row)
        distance = _place(key, row) - query[:, None] + _place(keys - 1, row)
    return bias.squeeze(-2)[..., distance]


def softmax(z: Tensor, seen: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, zero in rows that see nothing, and the log of the sum of exponentials."""
    if seen is not None:
        z = z.masked_fill(~seen, -torch.inf)
    if z.shape[-1]:
        highest = z.detach().amax(-1, keepdim=True)
    else:
        highest = z.new_full((*z.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.detach())
    highest = highest.masked_fill(highest == -torch.inf, 0)
    e = torch.exp(z - highest)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    none = total == 0
    weights = e / total.masked_fill(none, 1)
    lse = (highest + total.masked_fill(none, 1).log()).masked_fill(none, -torch.inf)
    return weights, lse.squeeze(-1)


def attention(args: Any) -> tuple[Tensor, Tensor]:
    """Compute the results of the op's forward pass from its arguments, by name."""
    shape, q, offset = args.q.shape[:-1], add_dims(args.q), args.offset
    k, v = (repeat_for_heads(x, q.shape[1], args.group, offset) for x in (args.k, args.v))
    lists = (args.rows, args.row_entries, args.masks)
    seen = visible(q, k, *lists, args.key_padding_mask, args.block, args.causal)
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    z = scores(q, k, args.alibi_slopes, args.scale, args.softcap, offset).to(kind)
    if args.bias is not None:
        z = z + expand_bias(args.bias, args.bias_row, *z.shape[-2:]).to(kind)
    weights, lse = softmax(z, seen, None if args.sinks is None else args.sinks.to(kind))
    y = drop_weights(weights, args.p, args.seed, args.whole, offset).to(v.dtype) @ v
    return y.reshape(*shape, y.shape[-1]).contiguous(), lse.reshape(shape).contiguous()


def drop_weights(
    weights: Tensor,
    p: float,
    seed: Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> Tensor:
    """Drop weights, at q's place in a larger tensor."""
    return drop(weights, p, seed, _pad_to_four(whole, 1), _pad_to_four(offset, 0))


def _pad_to_four(sizes: Sequence[int] | None, missing: int) -> list[int] | None:
    """Pad sizes or offsets to the scores' four dimensions; the last size does not matter."""
    return None if not sizes else [missing] * (4 - len(sizes)) + [*sizes]
