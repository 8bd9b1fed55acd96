"""Layouts from, and to, the block masks of torch's FlexAttention.

`BlockLayout` imports this module, so layouts are `Any` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from torchweld.errors import ArgumentError
from torchweld.sparse.lists import kinds_of, words_of


def take_block_mask(
    kind: Any,
    block_mask: BlockMask,
    block: int | None,
    batch_size: int | None,
    num_heads: int | None,
) -> Any:
    """Make the layout of a block mask."""
    block = _choose_block(block_mask, block)
    lengths, partial, full = _find_blocks(block_mask, block)
    counts = {"batch_size": batch_size, "num_heads": num_heads}
    for (name, count), own in zip(counts.items(), partial.shape[:2], strict=True):
        if own > 1 and count not in (None, own):
            raise ArgumentError("BlockLayout", name, repr(count), f"{own}, as in block_mask")
        counts[name] = own if own > 1 else count
    some = kind.from_blocks(partial, block=block, seq_len=lengths)
    evaluated = kind.from_mask_fn(
        block_mask.mask_mod,
        lengths,
        block=block,
        within=some,
        device=partial.device,
        num_heads=counts["num_heads"],
        batch_size=counts["batch_size"],
    )
    return evaluated | kind.from_blocks(full, block=block, seq_len=lengths)


def _choose_block(block_mask: BlockMask, block: int | None) -> int:
    """Choose the block size: `block`, or the largest that divides the mask's blocks."""
    if not isinstance(block_mask, BlockMask):
        accepted = "a torch.nn.attention.flex_attention.BlockMask"
        raise ArgumentError("BlockLayout", "block_mask", f"a {type(block_mask).__name__}", accepted)
    size = math.gcd(*block_mask.BLOCK_SIZE)
    fitting = [n for n in (128, 64, 32, 16) if size % n == 0]
    if not fitting or (block is not None and block not in fitting):
        name, actual = ("block_mask", f"with blocks of {list(block_mask.BLOCK_SIZE)} tokens")
        accepted = "blocks that are multiples of 16 tokens"
        if fitting:
            name, actual = "block", repr(block)
            accepted = f"one of {fitting}, which divide the mask's {list(block_mask.BLOCK_SIZE)}"
        raise ArgumentError("BlockLayout", name, actual, accepted)
    return fitting[0] if block is None else block


def _find_blocks(
    block_mask: BlockMask, block: int
) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
    """Find the lengths, and booleans [batch, heads, rows, columns] of partial and full blocks."""
    queries, keys = block_mask.seq_lengths
    counts = [-(-n // block) for n in (queries, keys)]

    def cut(number: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
        of_mask = block_mask.kv_indices
        if number is None or indices is None:
            size = (*of_mask.shape[:2], *counts)
            return torch.zeros(size, dtype=torch.bool, device=of_mask.device)
        columns = indices.shape[-1]
        listed = torch.arange(columns, device=indices.device) < number[..., None]
        at = torch.where(listed, indices, columns).long()
        exists = torch.zeros((*indices.shape[:-1], columns + 1), device=indices.device)
        exists = exists.scatter(-1, at, 1.0)[..., :columns].bool()
        for dim, tokens in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
            exists = exists.repeat_interleave(tokens // block, dim)
        return exists[..., : counts[0], : counts[1]]

    partial = cut(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = cut(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return (queries, keys), partial & ~full, full


def make_block_mask(layout: Any) -> BlockMask:
    """Make FlexAttention's block mask of a layout. Its mask_mod reads the layout's bits."""
    block, lengths = layout.block, (layout.queries, layout.keys)
    if layout.lists is None:
        every = layout.kinds() > 0
        layout = layout.from_blocks(every, block=block, seq_len=lengths)
    lists = layout.lists
    kinds = kinds_of(lists.rows, lists.row_entries, lists.columns.shape[2])

    def order(of_kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number = of_kind.sum(-1, dtype=torch.int32)
        return number, of_kind.int().argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *order(kinds > 1),
        *order(kinds == 1),
        BLOCK_SIZE=block,
        mask_mod=_read_bits(kinds, lists.masks, block),
        seq_lengths=lengths,
    )


def _read_bits(
    kinds: torch.Tensor, masks: torch.Tensor, block: int
) -> Callable[[Any, Any, Any, Any], torch.Tensor]:
    words = words_of(block)
    none = masks.new_zeros(1, block * words)  # a layout without partial blocks has no mask
    masks = torch.cat([masks, none]).view(-1)
    of_batch, of_head = (n > 1 for n in kinds.shape[:2])
    kinds = kinds if of_head else kinds[:, 0]
    kinds = kinds if of_batch else kinds[0]

    def mask_mod(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        own = [index for index, differs in ((b, of_batch), (h, of_head)) if differs]
        kind = kinds[(*own, query // block, key // block)]
        place = (kind - 2).clamp(min=0).long() * (block * words)
        word = masks[place + query % block * words + key % block // 32]
        return (kind == 1) | ((kind > 1) & ((word >> (key % block % 32)) & 1).bool())

    return mask_mod
