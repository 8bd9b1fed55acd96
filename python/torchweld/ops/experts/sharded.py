"""Experts on several devices: each computes its own experts' part of every token's sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.dispatch.dtensor import (
    as_dtensor,
    find_offsets,
    is_dtensor,
    is_strided,
    replicate,
    take_part,
)
from torchweld.errors import ArgumentError

_NAME = "experts_mlp"


def run_on_devices(run: Callable[..., torch.Tensor], tensors: Sequence[Any]) -> Any:
    """Run experts_mlp on this device's experts.

    Along the dimensions of the mesh that shard the experts, all tokens are gathered, and the result
    is Partial: its redistribution adds the parts. Along the others tokens stay sharded.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, gate_up, down, indices, weights, *biases = tensors
    if not is_dtensor(x):
        accepted = (
            "a DTensor, as the experts are: from_local(input, mesh, [Replicate()]) where devices"
            " have the same tokens, [Shard(0)] where each has its own"
        )
        raise ArgumentError(_NAME, "input", "a plain tensor", accepted)
    mesh = x.device_mesh
    on_experts = gate_up.placements if is_dtensor(gate_up) else replicate(mesh)
    if any(is_strided(of) or of not in (Replicate(), Shard(0)) for of in on_experts):
        placed = ", ".join(map(str, on_experts))
        accepted = "Shard(0) or Replicate() along each dimension of the mesh"
        raise ArgumentError(_NAME, "gate_up", f"a DTensor placed {placed}", accepted)
    rows, on_rows, on_factors = [], [], []
    for expert, row in zip(on_experts, x.placements, strict=True):
        keeps = not expert.is_shard() and type(row) is Shard and row.dim < x.ndim - 1
        rows.append(row if keeps else Replicate())
        on_rows.append(Partial() if expert.is_shard() else rows[-1])
        on_factors.append(Partial() if keeps else expert)

    def take(name: str, value: Any, placements: Any, grads: Any) -> Any:
        return take_part(_NAME, name, value, mesh, placements, grads)

    factors = {"gate_up": gate_up, "down": down}
    factors |= zip(("gate_up_bias", "down_bias"), biases, strict=True)
    own = [take(name, factor, on_experts, on_factors) for name, factor in factors.items()]
    here = take("indices", indices, rows, rows)
    if any(of.is_shard() for of in on_experts):
        offsets = find_offsets(gate_up.shape, mesh, on_experts)
        assert offsets is not None
        here = here - offsets[0]  # experts on other devices are out of range, and skipped
        if not len(own[0]):  # more devices than experts: this one has an expert that none asks for
            own = [
                None if t is None else torch.nn.functional.pad(t, (*[0] * (2 * t.ndim - 1), 1))
                for t in own
            ]
            here = here.fill_(-1)
    y = run(
        take("input", x, rows, on_rows),
        *own[:2],
        here,
        take("weights", weights, rows, on_rows),
        *own[2:],
    )
    return as_dtensor(y, mesh, on_rows, (*x.shape[:-1], y.shape[-1]))
