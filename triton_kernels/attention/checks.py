"""Checks of attention's arguments, and how its kernels find a bias."""

from __future__ import annotations

import torch
import triton


def refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(what)


def place_bias(
    bias: torch.Tensor | None, row: int, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[int | None, ...]]:
    """Return the bias, and how kernels find its numbers: strides, and the tokens in a row."""
    if bias is None:
        return None, (0, 0, 0, None)
    bias = bias[(None,) * (4 - bias.dim())]
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    fits = bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
    if row:
        fits = fits and bias.shape[::2] == (1, 1) and bias.shape[3] == distances(queries, keys, row)
        fits = fits and (row >= keys or queries <= keys) and bias.dtype in (q.dtype, torch.float32)
        bias = bias.contiguous()
    else:
        fits = fits and bias.shape[2:] == (queries, keys) and bias.dtype == q.dtype
        bias = bias if bias.stride(3) == 1 or keys < 2 else bias.contiguous()
    refuse(not fits, "bias does not fit q and k")
    strides = [
        0 if n == 1 else stride for n, stride in zip(bias.shape, bias.stride(), strict=True)
    ][:2]
    return bias, (*strides, None if row else bias.stride(2), row if 0 < row < keys else None)


def distances(queries: int, keys: int, row: int) -> int:
    """The count of numbers of a bias by distance, for tokens in rows of `row`."""
    if row >= keys:
        return max(queries + keys - 1, 0)
    return 2 * (keys - 1 + (keys - 1) // row * (row - 1)) + 1


def check_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    row_entries: torch.Tensor | None,
    columns: torch.Tensor | None,
    column_entries: torch.Tensor | None,
    masks: torch.Tensor | None,
    block: int,
) -> None:
    """Refuse lists that point outside q and k."""
    every = (rows, row_entries, columns, column_entries, masks)
    refuse(any(x is None or x.dtype != torch.int32 for x in every), "lists are not all int32")
    assert columns is not None
    assert masks is not None
    refuse(block not in (16, 32, 64, 128), "no kernel for the layout's block")
    for lines, length in ((rows, q.shape[2]), (columns, k.shape[2])):
        sizes = [(1, n) for n in q.shape[:2]] + [(triton.cdiv(length, block),), (4,)]
        fits = lines.dim() == 4 and all(n in s for n, s in zip(lines.shape, sizes, strict=True))
        refuse(not fits, "the layout's lines do not fit q and k")
    for entries in (row_entries, column_entries):
        refuse(entries is None or entries.shape[1:] != (2,), "the layout's entries are not pairs")
    refuse(masks.shape[1:] != (block * max(block // 32, 1),), "masks do not fit the block")
