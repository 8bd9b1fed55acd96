"""Sharding rules: how DTensors go through the ops, derived from each op's `Sharding`."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.registry import OPS, Op, Signature


@torch.compiler.assume_constant_result
def register_rules() -> bool:
    """Register every op's rules, once; called when the first tensor subclass comes by.

    Not at import: torch.distributed.tensor takes half a second to import.
    """
    if not _registered:
        _registered.append(True)
        for op in OPS.values():
            if op.sharding is None:
                continue
            for kernel in op.kernels.values():
                _register(op, kernel.forward, op.forward_signature)
                _register(op, kernel.backward, op.backward_signature)
    return True


_registered: list[bool] = []


def _register(op: Op, overload: Any, signature: Signature) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    sharding = op.sharding
    assert sharding is not None

    def place(name: str, dim: int | None, last: int) -> Any:
        role = sharding.roles[name]
        if role.startswith("column") and dim == last:
            return Shard(0)
        if dim is None or role in ("whole", "column"):
            return Replicate()
        return Shard(dim) if role == "row" else Partial("sum")

    @register_sharding(overload)
    def rule(*inputs: Any) -> Any:
        given = dict(zip(signature.arguments, inputs, strict=True))
        leading = sharding.leading(*[given[name] for name in op.forward_signature.arguments])
        choices = []
        for dim in [None, *range(leading)]:
            outputs = [place(name, dim, leading - 1) for name in signature.results]
            arguments = [
                place(name, dim, leading - 1)
                if name in sharding.roles and given[name] is not None
                else None
                for name in signature.arguments
            ]
            choices.append((outputs, arguments))
        return choices
