"""torch's attention in 16 bits on CPUs without 16-bit units, by its kernel for float32.

The 16-bit kernel multiplies in plain loops there, and takes some five times as long. Entries of the
batch are converted some at a time, `_NUMBERS` in all, or one; autograd keeps 16-bit tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import exports_a_derivative, list_reached, wants_gradient
from torchweld.ops.gemm import gemm, product

_torchs = torch.nn.functional.scaled_dot_product_attention
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Numbers of queries, keys and values that are converted at a time.
_NUMBERS = 2**20


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments."""
    dtype, rest = gemm.find_dtype(query), (attn_mask, dropout_p, is_causal)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if not _is_converted(dtype, query, key, value) or exports_a_derivative():
        return _torchs(query, key, value, *rest, **how)
    query, key, value = (t.to(dtype) for t in (query, key, value))
    if not _fits(query, key, value, *rest, enable_gqa):
        is_added = attn_mask is not None and attn_mask.is_floating_point()
        mask = attn_mask.float() if attn_mask is not None and is_added else attn_mask
        with torch.autocast("cpu", enabled=False):
            wide = (query.float(), key.float(), value.float())
            return _torchs(*wide, mask, dropout_p, is_causal, **how).to(dtype)
    if wants_gradient(query, key, value):
        return _Attention.apply(query, key, value, attn_mask, is_causal, scale)  # type: ignore[no-any-return]
    return _run(query, key, value, attn_mask, is_causal, scale)[0]


def _is_converted(dtype: torch.dtype, *tensors: Any) -> bool:
    """Whether torch would multiply such tensors in plain loops."""
    if not all(type(t) in state.PLAIN and t.is_cpu for t in tensors):
        return False
    if not product.is_converted(tensors[0], dtype) or not product.may_run(*tensors):
        return False
    casts = torch.is_autocast_enabled("cpu")
    return all(t.dtype is dtype or (casts and t.dtype in gemm.CAST) for t in tensors)


def _fits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Whether torch's kernel for float32 takes these; others take its separate steps."""
    shapes = [t.shape for t in (query, key, value)]
    if dropout_p or any(len(shape) != 4 or 0 in shape for shape in shapes):
        return False
    if len({shape[0] for shape in shapes}) > 1 or len({shape[-1] for shape in shapes}) > 1:
        return False
    heads = [shape[1] for shape in shapes]
    grouped = enable_gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if shapes[1][2] != shapes[2][2] or not (grouped or len(set(heads)) == 1):
        return False
    if mask is None:
        return True
    wanted = (shapes[0][0], heads[0], shapes[0][2], shapes[1][2])
    return (
        not (is_causal or wants_gradient(mask))
        and type(mask) in state.PLAIN
        and mask.ndim in (2, 4)
        and all(n in (1, w) for n, w in zip(mask.shape[::-1], wanted[::-1], strict=False))
        and (mask.dtype is torch.bool or mask.is_floating_point())
    )


def _list_parts(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Some entries of the batch at a time, with their part of the mask in float32."""
    batch = query.shape[0]
    if state.is_compiling():  # its size must not become a guard
        yield slice(None), _widen(mask)
        return
    each = max(1, _NUMBERS * batch // (query.numel() + 2 * key.numel()))
    for first in range(0, batch, each):
        at = slice(first, first + each)
        is_own = mask is not None and mask.ndim == 4 and mask.shape[0] > 1
        yield at, _widen(mask[at] if is_own and mask is not None else mask)


def _widen(mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return None if mask is None else mask.float()
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the log-sum-exp of each row."""
    parts = []
    for at, own in _list_parts(query, key, mask):
        wide = _take(at, query, key, value)
        y, sums = _forward(*wide, 0.0, is_causal, attn_mask=own, scale=scale)
        parts.append((y.to(query.dtype), sums))
    if len(parts) == 1:
        return parts[0]
    results, sums = zip(*parts, strict=True)
    return torch.cat(results), torch.cat(sums)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, *how: Any) -> Any:
        y, sums = _run(query, key, value, mask, *how)
        ctx.save_for_backward(query, key, value, mask, y, sums)
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, mask, y, sums = ctx.saved_tensors
        is_causal, scale = ctx.how
        heads = [t.shape[1] for t in (query, key, value)]
        parts = []
        for at, own in _list_parts(query, key, mask):
            wide = (grad[at].float(), *_take(at, query, key, value), y[at].float())
            made = _backward(*wide, sums[at], 0.0, is_causal, attn_mask=own, scale=scale)
            parts.append([_fold(t, n).to(query.dtype) for t, n in zip(made, heads, strict=True)])
        found = [torch.cat(some) for some in zip(*parts, strict=True)]
        reached = zip(found, list_reached(ctx), strict=False)
        return *[gradient if to else None for gradient, to in reached], None, None, None


def _take(at: slice, query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Entries of the batch in float32; groups of queries share a key and a value."""
    groups = query.shape[1] // others[0].shape[1]
    wide = [t[at].float() for t in others]
    return [query[at].float(), *(t.repeat_interleave(groups, 1) if groups > 1 else t for t in wide)]


def _fold(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The sum over the queries of a group."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
