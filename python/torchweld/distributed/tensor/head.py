"""A language model's head whose words devices share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchweld.distributed.tensor.styles import Style, check_rank
from torchweld.errors import ArgumentError
from torchweld.ops.loss.head import SharedHead


class HeadParallel(Style):
    """Shard the words of a head, of any number; each device gets all logits of its rows.

    The layer is one op. In the training step of a fused model the loss takes its place, and devices
    exchange a few numbers a row instead.
    """

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        if not serves(module):
            accepted = "a linear layer with torch's own forward"
            raise ArgumentError("HeadParallel", "module", f"a {type(module).__name__}", accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        weight: Any = module.weight
        classes = weight.shape[0]
        self.distribute(module, device_mesh, lambda _: Shard(0))
        group = device_mesh.get_group(device_mesh.ndim - 1).group_name
        shared = SharedHead(classes, device_mesh.size(-1), group)
        module.forward = partial(self._forward, module, shared)  # type: ignore[method-assign]
        return module

    def _forward(self, module: Any, shared: SharedHead, input: Any) -> Any:
        check_rank("HeadParallel", input, self.place_rows(Replicate()))
        x = input.to_local() if isinstance(input, DTensor) else input
        # Along a ring each device has the gradient of its own rows.
        placed = (Partial(), Shard(0)) if self.ring else (Shard(0),)
        weight = module.weight.to_local(grad_placements=placed)
        bias = None if module.bias is None else module.bias.to_local(grad_placements=placed)
        return shared.compute_logits(x, weight, bias)


def serves(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer that computes as torch's own."""
    is_plain = type(module).forward is torch.nn.Linear.forward
    return isinstance(module, torch.nn.Linear) and is_plain and "forward" not in vars(module)
