"""block_sparse_attention's rivals from torch: dense attention and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.registry import OPS

# The forward's arguments by position.
_NAMES = OPS["block_sparse_attention"].forward_signature.arguments


def dense(functional: Any) -> Callable[..., Any]:
    """Attention to every key. The difference to it is what a layout saves."""

    def attention(*arguments: Any) -> Any:
        given = dict(zip(_NAMES, arguments, strict=True))
        y = functional.scaled_dot_product_attention(
            *arguments[:3],
            dropout_p=given["p"],
            is_causal=given["causal"],
            scale=given["scale"],
            enable_gqa=given["group"] > 1,
        )
        return y, y.new_zeros(y.shape[:-1], dtype=torch.float32)

    return attention


def flex(module: Any) -> Callable[..., Any]:
    """Compiled FlexAttention, with a BlockMask that is made once per layout."""
    compiled = torch.compile(module.flex_attention, dynamic=False)
    made: dict[int, Any] = {}

    def attention(*arguments: Any) -> Any:
        given = dict(zip(_NAMES, arguments, strict=True))
        key = id(given["rows"])
        if key not in made:
            made[key] = block_mask(module, given)
        on_cpu = given["q"].device.type == "cpu"  # FlexAttention returns no log-sum-exp there
        options = {"BLOCK_M": given["block"], "BLOCK_N": given["block"]}
        found = compiled(
            *arguments[:3],
            block_mask=made[key],
            scale=given["scale"],
            enable_gqa=given["group"] > 1,
            return_lse=not on_cpu,
            kernel_options=options if given["block"] < 128 else None,
        )
        return (found, None) if on_cpu else found

    return attention


def block_mask(module: Any, given: dict[str, Any]) -> Any:
    """A BlockMask of a layout without partial blocks, and of the causal mask."""
    rows, entries, block = given["rows"], given["row_entries"], given["block"]
    queries, keys = given["q"].shape[-2], given["k"].shape[-2]
    lines, columns = rows.shape[2], given["columns"].shape[2]
    ordered = rows.gather(2, rows[..., :1].argsort(2).expand(rows.shape))
    begin, end = ordered[..., 1:2], ordered[..., 3:4]
    at = begin + torch.arange(columns, device=rows.device, dtype=torch.int32)
    present = at < end
    partner = entries[:, 0][at.clamp(max=len(entries) - 1).long()]
    there = torch.zeros(*rows.shape[:2], lines, columns + 1, dtype=torch.bool, device=rows.device)
    there.scatter_(3, torch.where(present, partner, columns).long(), value=True)
    there, causal, shift = there[..., :columns], given["causal"], keys - queries
    one = [int(n > 1) for n in rows.shape[:2]]

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = there[b * one[0], h * one[1], q // block, k // block]
        return found & (q + shift >= k) if causal else found

    if causal:
        row = torch.arange(lines, device=rows.device)[:, None] * block
        column = torch.arange(columns, device=rows.device) * block
        full = there & (row + shift >= column + block - 1)
        partial = there & ~full & (row + block - 1 + shift >= column)
    else:
        full, partial = there, torch.zeros_like(there)
    return module.BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=block, mask_mod=seen,
        seq_lengths=(queries, keys),
    )  # fmt: skip


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks in each row, and the columns with these blocks sorted to the front."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)
