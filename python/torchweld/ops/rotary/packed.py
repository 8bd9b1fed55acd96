"""rotary_embedding_packed_: queries and keys rotated where they are in a packed projection.

    as rotary_embedding, of the queries and keys in [*, (queries + 2 keys) * width]

Read on in: python/torchweld/ops/rotary/rotary_embedding.py, python/torchweld/ops/rotary/op.py,
csrc/cpu/rotary.cpp, triton_kernels/rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import wants_gradient
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.rotary.arguments import prepare
from torchweld.ops.rotary.checked import DTYPES, check
from torchweld.ops.rotary.reference import gather, turn
from torchweld.registry import why_not_now

_NAME = "rotary_embedding_packed_"
# With fewer numbers one pass over queries and keys takes less time, and its memory is small.
_FEW = 2**18


def rotary_embedding_packed_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    *,
    heads: int,
    key_heads: int | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    proportional: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the queries and keys of a packed projection in place; values stay.

    Nothing is concatenated, and no second qkv exists. There is no kernel: eager's passes run on the
    queries, then on the keys. Where memory allows, `rotary_embedding_qk` of views is faster. The
    layer that made qkv does not need its own result in the backward pass; autograd raises an error
    if something else that needs it has saved it.

    Args:
        qkv: [*, tokens, (heads + 2 * key_heads) * width], queries, keys and values side by side, of
            a projection: a leaf that requires grad cannot be written to.
        cos: as in `rotary_embedding`, which has seq_dim=-3 here.
        sin: like cos.
        position_ids: as in `rotary_embedding`.
        heads: the number of heads of queries.
        key_heads: the number of heads of keys, and of values; None: `heads`.
        interleaved: as in `rotary_embedding`.
        rotary_dim: as in `rotary_embedding`.
        proportional: as in `rotary_embedding`.
        cu_seqlens: as in `rotary_embedding`.

    Returns:
        qkv.
    """
    checks.dense(_NAME, "qkv", qkv, DTYPES)
    if is_dtensor(qkv):
        accepted = "a plain tensor: rotary_embedding_qk takes shards"
        raise ArgumentError(_NAME, "qkv", "a DTensor", accepted)
    key_heads = heads if key_heads is None else key_heads
    for name, value in (("heads", heads), ("key_heads", key_heads)):
        if type(value) is not int or value < 1:
            raise ArgumentError(_NAME, name, repr(value), "a number from 1 on")
    every = heads + 2 * key_heads
    if qkv.ndim < 2 or qkv.shape[-1] % every or (qkv.shape[-1] > 1 and qkv.stride(-1) != 1):
        actual = f"of shape {list(qkv.shape)} and strides {list(qkv.stride())}"
        accepted = f"[*, tokens, {every} * width] with adjacent columns"
        raise ArgumentError(_NAME, "qkv", actual, accepted)
    if qkv.is_leaf and qkv.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(_NAME, "qkv", "a leaf that requires grad", "a projection's result")
    for name, table in (("cos", cos), ("sin", sin)):
        if isinstance(table, torch.Tensor) and table.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(_NAME, name, "a table that requires grad", "one without")
    if reason := why_not_now():
        raise ArgumentError(
            _NAME, "qkv", reason, "a call outside: rotary_embedding_qk serves there"
        )
    q, k = _split(qkv.detach(), heads, key_heads, together=False)
    prepared = prepare(
        q,
        cos,
        sin,
        position_ids,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        proportional=proportional,
        seq_dim=-3,
        cu_seqlens=cu_seqlens,
    )
    check(q, k, *prepared[2:])
    tables, layout = prepared[2:5], prepared[7:10]
    if not wants_gradient(qkv):
        _turn(qkv, heads, key_heads, (*tables, *layout), False)
        return qkv
    result: torch.Tensor = _Packed.apply(qkv, heads, key_heads, False, *tables, *layout)  # type: ignore[no-untyped-call]
    return result


def _split(
    qkv: torch.Tensor, heads: int, key_heads: int, together: bool
) -> tuple[torch.Tensor, ...]:
    """Views of the queries and of the keys, or one of both, [*, tokens, heads, width]."""
    rows = qkv.unflatten(-1, (heads + 2 * key_heads, -1))
    if together:
        return (rows.narrow(-2, 0, heads + key_heads),)
    return rows.narrow(-2, 0, heads), rows.narrow(-2, heads, key_heads)


def _turn(
    qkv: torch.Tensor, heads: int, key_heads: int, how: tuple[Any, ...], transposed: bool
) -> None:
    cos, sin, positions, rotary_dim, interleaved, proportional = how
    wide = torch.promote_types(qkv.dtype, torch.float32)
    angles = [gather(table, positions).to(wide) for table in (cos, sin)]
    layout = (rotary_dim, interleaved, proportional)
    for t in _split(qkv, heads, key_heads, qkv.numel() < _FEW):
        t.copy_(turn(t.to(wide), angles[0], angles[1], layout, transposed))


class _Packed(torch.autograd.Function):
    """The rotation in place, or its transpose, which are each other's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, heads: int, key_heads: int, transposed: bool, *how: Any
    ) -> Any:
        ctx.save_for_backward(*how[:3])
        ctx.how = (heads, key_heads, transposed, how[3:])
        ctx.mark_dirty(qkv)
        _turn(qkv, heads, key_heads, how, transposed)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        heads, key_heads, transposed, layout = ctx.how
        # A clone, since others may have the gradient; the pass over it is in place.
        grad = grad.clone(memory_format=torch.contiguous_format)
        how = (*ctx.saved_tensors, *layout)
        if torch.is_grad_enabled():
            grad = _Packed.apply(grad, heads, key_heads, not transposed, *how)  # type: ignore[no-untyped-call]
        else:
            _turn(grad, heads, key_heads, how, not transposed)
        return (grad, *(None,) * 9)
