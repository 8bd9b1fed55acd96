"""The style of rotary embeddings whose processes have slices of the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchweld import nn
from torchweld.distributed.styles import Style
from torchweld.errors import ArgumentError


class RotaryPositions(Style):
    """Give a torchweld.nn.RotaryEmbedding the positions of this process's tokens along the ring.

    Slices are in order, as in `sequence_plan`. Positions that the caller gives are kept.
    """

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        if not isinstance(module, nn.RotaryEmbedding):
            actual, accepted = f"a {type(module).__name__}, {name}", "a RotaryEmbedding"
            raise ArgumentError("RotaryPositions", "module", actual, accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        forward = partial(_forward, module.forward, module, device_mesh.get_local_rank(0))
        module.forward = forward  # type: ignore[method-assign]
        return module


def _forward(
    forward: Any, module: Any, place: int, q: Any, k: Any, position_ids: Any = None
) -> Any:
    if position_ids is None:
        length = q.shape[module.seq_dim]
        position_ids = torch.arange(length, device=q.device) + place * length
    return forward(q, k, position_ids)
