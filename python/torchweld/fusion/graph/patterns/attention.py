"""block_sparse_attention over all keys, where torch's attention on the CPU keeps all scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float
from torchweld.sparse.by_length import DENSE


class _AttentionOptions(NamedTuple):
    p: float
    causal: bool
    scale: float | None


def _reference(q: Any, k: Any, v: Any, *given: Any) -> Any:
    *masks, options = given
    mask = masks[0] if masks else None
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=options.p, is_causal=options.causal, scale=options.scale
    )


def _run(q: Any, k: Any, v: Any, *given: Any) -> Any:
    *masks, options = given
    bias = None
    for mask in masks:
        is_bool = mask.dtype == torch.bool
        zeros = q.new_zeros(mask.shape) if is_bool else mask
        bias = zeros.masked_fill(~mask, -torch.inf) if is_bool else mask.to(q.dtype)
    return functional.block_sparse_attention(
        *(q, k, v, DENSE.of(q, k)),
        scale=options.scale,
        causal=options.causal,
        bias=bias,
        dropout_p=options.p,
    )


def find_attention(record: Record, at: int) -> Iterator[Proposal]:
    """Attention with a bias for each head, dropout, or values of another width than keys."""
    step = record.steps[at]
    if step.func != "scaled_dot_product_attention":
        return
    q, k, v, mask, p, causal, scale, is_grouped = step.args
    if record.values[q.at].device.type not in ("cpu", "meta") or is_grouped:
        return
    sizes = [record.shape(each) for each in (q, k, v)]
    if any(len(size) != 4 for size in sizes):
        return
    is_biased = isinstance(mask, Ref) and _has_heads(record, mask, sizes[0])
    is_square = str(sizes[0][2]) == str(sizes[1][2])
    rate = as_float(p) or 0.0
    is_other = is_biased or sizes[1][3] != sizes[2][3] or (rate > 0 and mask is None)
    if is_other and (is_square or not causal):
        options = _AttentionOptions(rate, causal, None if scale is None else as_float(scale))
        inputs = [q.at, k.at, v.at, *([mask.at] if isinstance(mask, Ref) else [])]
        out = [step.outs[0]]
        yield Proposal("block_sparse_attention", inputs, out, _reference, _run, (options,))


def _has_heads(record: Record, mask: Ref, sizes: torch.Size) -> bool:
    """Whether a mask differs between heads: then it is learnt, and needs a gradient."""
    x = record.values[mask.at]
    return x.is_floating_point() and x.ndim == 4 and x.shape[1] == sizes[1] != 1
