"""block_sparse_attention's rivals from torch: dense attention and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld.registry import OPS

# The forward's arguments by position.
_NAMES = OPS["block_sparse_attention"].forward_signature.arguments


def dense(functional: Any) -> Callable[..., Any]:
    """Attention to every key. The difference to its time is the gain of a layout."""

    def attention(*arguments: Any) -> Any:
        by_name = dict(zip(_NAMES, arguments, strict=True))
        y = functional.scaled_dot_product_attention(
            *arguments[:3],
            dropout_p=by_name["p"],
            is_causal=by_name["causal"],
            scale=by_name["scale"],
            enable_gqa=by_name["group"] > 1,
        )
        return y, y.new_zeros(y.shape[:-1], dtype=torch.float32)

    return attention


def dense_by(backend: str) -> Callable[[Any], Callable[..., Any]]:
    """`dense` by one of torch's backends, such as "CUDNN_ATTENTION".

    It takes torch.nn.attention. torch raises an error if the backend does not serve the call.
    """

    def adapt(module: Any) -> Callable[..., Any]:
        plain, only = dense(torch.nn.functional), getattr(module.SDPBackend, backend)

        def attention(*arguments: Any) -> Any:
            with module.sdpa_kernel(only):
                return plain(*arguments)

        return attention

    return adapt


def flex(module: Any) -> Callable[..., Any]:
    """Compiled FlexAttention, with a BlockMask that is made once per layout.

    Its default backward pass has no usable tiles for smaller blocks than 128 on sm_90, so that
    smaller blocks are joined to blocks of 128; its mask function leaves out the absent ones.
    """
    compiled = torch.compile(module.flex_attention, dynamic=False)
    made: dict[int, Any] = {}

    def attention(*arguments: Any) -> Any:
        by_name = dict(zip(_NAMES, arguments, strict=True))
        key = id(by_name["rows"])
        if key not in made:
            made[key] = block_mask(module, by_name)
        on_cpu = by_name["q"].device.type == "cpu"  # FlexAttention returns no log-sum-exp there
        result = compiled(
            *arguments[:3],
            block_mask=made[key],
            scale=by_name["scale"],
            enable_gqa=by_name["group"] > 1,
            return_lse=not on_cpu,
        )
        return (result, None) if on_cpu else result

    return attention


# Rows and columns of the smallest blocks for which FlexAttention's own tiles fit.
_JOINED = 128


def block_mask(module: Any, by_name: dict[str, Any]) -> Any:
    """A BlockMask of a layout without partial blocks, and of the causal mask."""
    rows, entries, block = by_name["rows"], by_name["row_entries"], by_name["block"]
    queries, keys = by_name["q"].shape[-2], by_name["k"].shape[-2]
    lines, columns = rows.shape[2], by_name["columns"].shape[2]
    ordered = rows.gather(2, rows[..., :1].argsort(2).expand(rows.shape))
    begin, end = ordered[..., 1:2], ordered[..., 3:4]
    at = begin + torch.arange(columns, device=rows.device, dtype=torch.int32)
    present = at < end
    partner = entries[:, 0][at.clamp(max=len(entries) - 1).long()]
    there = torch.zeros(*rows.shape[:2], lines, columns + 1, dtype=torch.bool, device=rows.device)
    there.scatter_(3, torch.where(present, partner, columns).long(), value=True)
    there, causal, shift = there[..., :columns], by_name["causal"], keys - queries
    one = [int(n > 1) for n in rows.shape[:2]]

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        is_present = there[b * one[0], h * one[1], q // block, k // block]
        return is_present & (q + shift >= k) if causal else is_present

    if causal:
        row = torch.arange(lines, device=rows.device)[:, None] * block
        column = torch.arange(columns, device=rows.device) * block
        full = there & (row + shift >= column + block - 1)
        partial = there & ~full & (row + block - 1 + shift >= column)
    else:
        full, partial = there, torch.zeros_like(there)
    joined = max(_JOINED // block, 1)
    if joined > 1:
        every = _join(full, joined, missing=True).all(-1)
        partial = _join(full | partial, joined, missing=False).any(-1) & ~every
        full = every
    return module.BlockMask.from_kv_blocks(
        *_list_blocks(partial), *_list_blocks(full), BLOCK_SIZE=block * joined, mask_mod=seen,
        seq_lengths=(queries, keys),
    )  # fmt: skip


def _join(blocks: torch.Tensor, count: int, *, missing: bool) -> torch.Tensor:
    """The blocks of each square of `count` x `count`, in the last dimension.

    Squares at the end may lack blocks, which count as `missing`.
    """
    lines, columns = (-(-size // count) * count for size in blocks.shape[-2:])
    whole = blocks.new_full((*blocks.shape[:2], lines, columns), missing)
    whole[..., : blocks.shape[-2], : blocks.shape[-1]] = blocks
    squares = whole.unflatten(-1, (-1, count)).unflatten(-3, (-1, count))
    return squares.transpose(-2, -3).flatten(-2)


def _list_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks in each row, and the columns with these blocks sorted to the front."""
    order = (~blocks).to(torch.int8).argsort(dim=-1, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)
