"""Styles of modules on slices of a sequence: attention as a ring, rotary positions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchweld.distributed.ring.attention import ring_attention
from torchweld.distributed.tensor.styles import Style
from torchweld.errors import ArgumentError
from torchweld.nn import BlockSparseAttention, RotaryEmbedding
from torchweld.random import Shard
from torchweld.sparse import BlockBias


class RingAttention(Style):
    """Run a BlockSparseAttention on slices of the sequence.

    Args:
        heads: whether the mesh has the dimensions ring and tensor, and devices along the tensor
            dimension share the heads.
    """

    def __init__(self, heads: bool = False) -> None:
        super().__init__()
        self.ring = heads

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, BlockSparseAttention)
        if device_mesh.ndim != 1 + self.ring:
            actual, accepted = f"of {device_mesh.ndim} dimensions", f"one of {1 + self.ring}"
            raise ArgumentError("RingAttention", "device_mesh", actual, accepted)
        module.forward = functools.partial(_attend, module, device_mesh)  # type: ignore[method-assign]
        return module


def _attend(
    module: BlockSparseAttention,
    mesh: DeviceMesh,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: BlockBias | None = None,
) -> torch.Tensor:
    length = mesh.size(0) * q.shape[2]
    groups = mesh.size(1) if mesh.ndim > 1 else 1
    first = mesh.get_local_rank(1) * q.shape[1] if mesh.ndim > 1 else 0
    whole = q.new_empty(()).expand(length, 1)
    sizes = (q.shape[0], groups * q.shape[1], length, q.shape[3])
    return ring_attention(
        *(q, k, v, module.layouts.of(whole, whole), mesh.get_group(0)),
        scale=module.scale,
        causal=module.causal,
        key_padding_mask=key_padding_mask,
        alibi_slopes=_select_local_heads(alibi_slopes, first, q.shape[1]),
        bias=_select_local_table(bias, first, q.shape[1]),
        sinks=_select_local_heads(sinks, first, q.shape[1]),
        softcap=module.softcap,
        dropout_p=module.dropout,
        training=module.training,
        shard=Shard(sizes, (0, first, 0, 0)),
    )


def _select_local_table(bias: Any, first: int, count: int) -> Any:
    """Select this device's heads of a bias's table."""
    if not isinstance(bias, BlockBias) or bias.table.shape[0] == 1:
        return bias
    table = _select_local_heads(bias.table.t(), first, count)
    assert table is not None
    return bias.with_table(table.t())


def _select_local_heads(x: torch.Tensor | None, first: int, count: int) -> torch.Tensor | None:
    """Select this device's heads of a replicated tensor; its gradient is summed over devices."""
    if isinstance(x, DTensor):
        x = x.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
    return None if x is None else x[..., first : first + count]


class RotaryPositions(Style):
    """Give a torchweld.RotaryEmbedding the positions of this process's tokens along the ring.

    Slices are in order, as in `sequence_plan`. Positions that the caller gives are kept.
    """

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        if not isinstance(module, RotaryEmbedding):
            actual, accepted = f"a {type(module).__name__}, {name}", "a RotaryEmbedding"
            raise ArgumentError("RotaryPositions", "module", actual, accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        forward = functools.partial(_rotate, module.forward, module, device_mesh.get_local_rank(0))
        module.forward = forward  # type: ignore[method-assign]
        return module


def _rotate(forward: Any, module: Any, place: int, q: Any, k: Any, position_ids: Any = None) -> Any:
    if position_ids is None:
        length = q.shape[module.seq_dim]
        position_ids = torch.arange(length, device=q.device) + place * length
    return forward(q, k, position_ids)
