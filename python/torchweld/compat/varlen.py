"""torch.nn.attention.varlen.varlen_attn's arguments, for packed documents on any device."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockLayout


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Attention of each document to itself, with the bits of every run the same.

    Args:
        query: [tokens, heads, head_dim].
        key, value: [key tokens, key heads, head_dim].
        cu_seq_q: where documents begin, and where the last one ends, [documents + 1].
        cu_seq_k: the same of keys; None: cu_seq_q.
        max_q, max_k: have no effect.
        return_aux: torch's AuxRequest; with its `lse` the log-sum-exp is returned too.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        window_size: tokens before and after that a query sees, -1 for all. (-1, 0) is causal.
        enable_gqa: whether there may be fewer key heads than heads.
        seqused_k, block_table: only None: caches are for inference.
        num_splits: has no effect: no result depends on a split.

    Returns:
        [tokens, heads, head_dim]; with an `lse` asked for a tuple with [tokens, heads], float32.
    """
    for name, given in (("seqused_k", seqused_k), ("block_table", block_table)):
        if given is not None:
            accepted = "None: documents are whole, without a cache"
            raise ArgumentError("varlen_attn", name, f"a {type(given).__name__}", accepted)
    if query.ndim != 3:
        accepted = "[tokens, heads, head_dim]"
        raise ArgumentError("varlen_attn", "query", f"of shape {list(query.shape)}", accepted)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        accepted = f"{query.shape[1]} heads, or fewer with enable_gqa=True"
        raise ArgumentError("varlen_attn", "key", f"of {key.shape[1]} heads", accepted)
    if not (isinstance(window_size, tuple) and len(window_size) == 2):
        accepted = "(tokens before, tokens after)"
        raise ArgumentError("varlen_attn", "window_size", repr(window_size), accepted)
    before, after = window_size
    layout = BlockLayout.documents(
        cu_seq_q,
        cu_seq_k,
        causal=after == 0,
        window_size=None if before < 0 and after <= 0 else (before, after),
        seq_len=(query.shape[0], key.shape[0]),
    )
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    y, lse = functional.block_sparse_attention(q, k, v, layout, scale=scale, return_lse=True)
    y, lse = y[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (y, lse) if getattr(return_aux, "lse", False) else y
